"""MiniMax-M3: blocks that each key head chooses, and the effect of typical mistakes."""

from dataclasses import replace
from functools import partial

import goldens
import mistakes
import mlx.core as mx
import pytest
from mistakes import TOLERANCE
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.errors import ConfigError
from moeflux_mlx.mixers.grouped import blocks_op as blocks
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops.backend import library_of
from moeflux_mlx.spec import ModelArgs

FAMILY = "minimax_m3_vl"
TOKENS, WANTED = goldens.golden(FAMILY)
error = partial(mistakes.error, family=FAMILY)


@pytest.fixture
def model():
    return tiny_model(FAMILY, mx.float32, "hub")


def test_the_text_passes_everything(model):
    """The first layer is dense and has no blocks.

    Then three blocks of eight positions are chosen, and a token's own is one of them.
    """
    parts = [mixer.blocks for mixer in model.args.mixers]
    assert parts[0] is None and [(one.ratio, one.indexer.top) for one in parts[1:]] == [(8, 3)] * 3
    assert model.args.moe_layers == (1, 2, 3) and len(TOKENS) == 64


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("lengths", [(23, 41), (24, 40), (25, 39), (22, 1, 1, 1, 39), (31, 1, 1, 31), (3, 61)])
def test_calls_that_end_about_blocks_and_the_budget(model, lengths):
    assert error(model, lengths) < TOLERANCE


# ---- mistakes: each must exceed the tolerance


def with_choice(monkeypatch, change):
    """Returns the model with `change` applied to what is chosen, in one call and one token at a time."""
    model, right = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32), blocks.choose_by_head
    monkeypatch.setattr(blocks, "choose_by_head", lambda *given: change(right(*given), *given))
    return min(error(model), error(model, (1,) * 64)) > 10 * TOLERANCE


@pytest.mark.usefixtures("cpu_device")  # on a GPU a kernel chooses
def test_one_choice_for_all_heads(monkeypatch):
    assert with_choice(
        monkeypatch, lambda chosen, *_: library_of(chosen).repeat(chosen[:, :, :1], chosen.shape[2], axis=2)
    )


@pytest.mark.usefixtures("cpu_device")  # on a GPU a kernel chooses
def test_the_first_blocks_instead_of_the_best(monkeypatch):
    first = lambda chosen, *_: chosen * 0 + library_of(chosen).arange(2)  # noqa: E731
    assert with_choice(monkeypatch, first)


def test_blocks_by_the_mean_of_their_keys(monkeypatch):
    right = blocks.choose_by_head

    def wrong(index, seen, rule):
        B, positions, width = index.keys.shape
        count = positions // rule.ratio
        means = index.keys[:, : count * rule.ratio].reshape(B, count, rule.ratio, width).mean(axis=2)
        return right(index._replace(keys=library_of(means).repeat(means, rule.ratio, axis=1)), seen, rule)

    assert mistakes.broken(monkeypatch, blocks, "choose_by_head", wrong, family=FAMILY)


def test_a_budget_of_another_block(monkeypatch):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for layer in list(model.layers)[1:]:
        mixer = layer.self_attn.mixer
        indexer = replace(mixer.blocks.indexer, top=2)
        layer.self_attn.mixer = replace(mixer, blocks=replace(mixer.blocks, indexer=indexer))
    assert error(model) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sparse_num_index_heads": 3}, "index_n_heads 3 is not num_key_value_heads 2"),
        ({"sparse_local_block": 2}, "index_local_blocks"),
        ({"sparse_disable_index_value": [0, 1, 0, 1]}, "sparse_disable_index_value"),
        ({"sparse_score_type": "mean"}, "sparse_score_type"),
    ],
)
def test_what_the_indexer_does_not_compute_is_refused(change, message):
    config = goldens.config(FAMILY)
    config["text_config"]["sparse_attention_config"].update(change)
    with pytest.raises(ConfigError, match=message):
        ModelArgs.from_dict(config)
