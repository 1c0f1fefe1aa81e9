"""The bytes that a prompt's experts move on Metal, beside mlx-lm's, and the table of them in the documentation."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")
import prompt_bytes
from tile_choices import Chosen

from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.ops import grouped
from moeflux_mlx.ops.tiles import TILES, using
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.skipif(mx.cuda.is_available(), reason="traces what a Mac would run")
DOCS = Path(__file__).parents[1] / "docs/performance.md"
LAYOUT = ExpertLayout.from_args(ModelArgs.from_variant("qwen3.6-35b-a3b"))
TOKENS = (64, 512, 2048, 4096)


def ratio(way, tokens):
    ids = prompt_bytes.drawn(tokens, LAYOUT.num_experts, 8)
    one, other = (prompt_bytes.traffic(each, LAYOUT, ids) for each in (way, "mlx-lm"))
    return (one.weights + one.others) / (other.weights + other.others)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("way, most", [("default", 1.2), ("kernel", 1.0)])
def test_experts_move_little_more_than_those_of_mlx_lm(way, most, tokens):
    assert ratio(way, tokens) < most


def test_the_padding_of_blocks_costs_most_at_256_tokens():
    assert 1.3 < ratio("default", 256) < 1.4


def test_copies_of_codes_would_be_seen(monkeypatch):
    monkeypatch.setattr(grouped, "views", lambda *_: None)
    assert ratio("default", 512) > 1.8


def test_views_that_mlx_copies_would_be_seen(monkeypatch):
    """Its product of sorted single rows copies them."""
    monkeypatch.setitem(grouped.BLOCK_ROWS, "metal", 1)
    product = mx.gather_qmm
    monkeypatch.setattr(mx, "gather_qmm", lambda *given, **named: product(*given, **named | {"sorted_indices": True}))
    assert ratio("default", 2048) > 1.4


def test_dequantised_experts_would_be_seen():
    with using(Chosen({"prompt_experts": replace(TILES["metal"]["prompt_experts"], dense=32)})):
        assert ratio("default", 2048) > 2


def test_the_documentation_has_the_table(capsys):
    prompt_bytes.main(["--tokens", *map(str, TOKENS)])
    assert capsys.readouterr().out in DOCS.read_text()
