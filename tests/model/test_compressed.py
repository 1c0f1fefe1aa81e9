"""DeepSeek-V4: the ends of entries, experts from a table, and the effect of typical mistakes."""

from dataclasses import replace
from functools import partial

import goldens
import mistakes
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import TOLERANCE
from tiny_models import logits_of_calls as logits
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.experts.lookahead import MEMORY, LayerGuesses
from moeflux_mlx.kinds import HyperConnections
from moeflux_mlx.mixers.compressed import module
from moeflux_mlx.model import moe, weights
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import streams

FAMILY = "deepseek_v4"
TOKENS, WANTED = goldens.golden(FAMILY)
error, broken = (partial(check, family=FAMILY) for check in (mistakes.error, mistakes.broken))


@pytest.fixture
def model():
    return tiny_model(FAMILY, mx.float32, "hub")


def test_the_text_passes_everything(model):
    """The text passes the end of the window, both ratios more than once, and the budget: 4 entries of 4 positions."""
    ratios = [mixer.compressor and mixer.compressor.ratio for mixer in model.args.mixers]
    assert ratios == [None, 4, 16, 4] and model.args.mixers[1].compressor.indexer.top == 4
    assert [layer.feed_forward.router.table for layer in model.args.layers] == [256, 256, None, None]
    assert len(TOKENS) == 64 > 2 * 16 and model.args.mixers[0].window == 7


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("lengths", [(16, 48), (15, 1, 48), (17, 47), (19, 1, 1, 43), (20, 44), (24, 40), (3, 61)])
def test_calls_that_end_about_entries_and_the_budget(model, lengths):
    assert error(model, lengths) < TOLERANCE


@pytest.mark.usefixtures("computing")
def test_a_few_tokens_at_a_time_give_the_same(model, index_values):
    index_values(1 << 8)
    assert model.args.mixers[1].rows_at_once(64, 64) < 3 and error(model) < TOLERANCE


def test_a_table_that_names_experts_that_are_not_there(model):
    table = {"x.tid2eid": mx.array([[9, 0]], mx.uint32)}
    with pytest.raises(ModelFileError, match="names expert 9 of 9"):
        weights._take_table(table, "x.tid2eid", (1, 2), 9)


def test_experts_that_a_table_names_are_read_ahead():
    """The second layer's experts are read while the first layer computes. Each expert that is read is used."""
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    lookahead = model.layers[0].mlp.experts.lookahead
    lookahead.prefetch, wanted = "lookahead", WANTED[:30]
    assert np.abs(logits(model, TOKENS[:30], (1,) * 30) - wanted).max() < TOLERANCE
    named, others = lookahead.predictor.record(1), [lookahead.predictor.record(i) for i in (0, 2, 3)]
    assert named.judged > 5 and not any(record.judged for record in others)
    at_first = LayerGuesses().useful
    assert named.useful == pytest.approx(1 - (1 - at_first) * MEMORY**named.judged)  # no read was unnecessary
    model.experts.close()


@given(st.integers(0, 2**16))
@settings(max_examples=examples(10), deadline=None)
def test_mixtures_are_doubly_stochastic(seed):
    rule = HyperConnections(4, 400, 1e-9)
    comb = streams.doubly_stochastic(np.random.default_rng(seed).normal(0, 2, (3, 4, 4)), rule)
    assert (comb > 0).all() and np.abs(comb.sum(-1) - 1).max() < 1e-3 and np.abs(comb.sum(-2) - 1).max() < 1e-6


# ---- mistakes


def test_columns_before_rows(monkeypatch):
    right = streams.doubly_stochastic
    wrong = lambda comb, rule: right(comb.swapaxes(-1, -2), replace(rule, iterations=2)).swapaxes(-1, -2)  # noqa: E731
    assert broken(monkeypatch, streams, "doubly_stochastic", wrong)


def test_a_mixture_that_is_transposed(monkeypatch):
    right = streams.doubly_stochastic
    assert broken(monkeypatch, streams, "doubly_stochastic", lambda comb, rule: right(comb, rule).swapaxes(-1, -2))


def test_results_that_are_not_rotated_back(monkeypatch):
    right = module.turned

    def wrong(x, rope, position):
        return x if rope.stride == -1 else right(x, rope, position)

    assert broken(monkeypatch, module, "turned", wrong)


def test_entries_rotated_by_their_last_position(monkeypatch):
    right = module.turned

    def wrong(x, rope, position):
        return right(x, rope, position + 1 if rope.stride > 1 else position)

    assert broken(monkeypatch, module, "turned", wrong)


def test_entries_without_the_positions_before_their_own(monkeypatch, model):
    right = module.pooled

    def wrong(values, gates, bias, overlaps, is_first):
        if overlaps and not is_first:
            values, gates = values[:, 1:], gates[:, 1:]
        return right(values, gates, bias, overlaps, True)

    assert broken(monkeypatch, module, "pooled", wrong, (10, 54)) and error(model) < TOLERANCE


def test_gates_without_their_biases(monkeypatch):
    right = module.pooled
    assert broken(monkeypatch, module, "pooled", lambda v, g, bias, *rest: right(v, g, bias * 0, *rest))


def test_sinks_that_are_left_out(monkeypatch):
    right = module.attend_compressed
    assert broken(monkeypatch, module, "attend_compressed", lambda q, seen, sinks, m: right(q, seen, sinks - 1e9, m))


def test_experts_that_are_chosen_where_a_table_names_them(monkeypatch):
    right = moe.route

    def wrong(logits, rule, table, tokens):
        return right(logits, replace(rule, table=None))

    assert broken(monkeypatch, moe, "route_by_table", wrong)
