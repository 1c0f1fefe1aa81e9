"""GLM-5.3-Flash: the ends of blocks, and the effect of typical mistakes."""

from dataclasses import replace
from functools import partial

import goldens
import mistakes
import mlx.core as mx
import numpy as np
import pytest
from mistakes import TOLERANCE
from tiny_models import logits_of_calls as logits
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import kinds
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import ChannelDecay
from moeflux_mlx.mixers.latent import chosen_op as operations
from moeflux_mlx.mixers.latent import scoring as indexed
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.model import streams
from moeflux_mlx.opening.engine import load_model

FAMILY = "glm5_next"
TOKENS, WANTED = goldens.golden(FAMILY)
error, broken = (partial(check, family=FAMILY) for check in (mistakes.error, mistakes.broken))


@pytest.fixture
def model():
    return tiny_model(FAMILY, mx.float32, "hub")


def test_the_text_passes_everything(model):
    """The text passes a dense layer, the budget of four pools, and several chunks of the delta rule."""
    blocks = [mixer.blocks for mixer in model.args.mixers if isinstance(mixer, Latent)]
    assert [(one.ratio, one.indexer.top, one.weighed) for one in blocks] == [(4, 4, True)] * 2
    assert [isinstance(layer.feed_forward, kinds.Dense) for layer in model.args.layers] == [True] + [False] * 4
    assert model.args.mixers[0].channel_decay == ChannelDecay(-5.0, 64) and len(TOKENS) == 64


# The 19th position is the last that sees no more whole pools than are chosen.
LENGTHS = [(19, 45), (20, 1, 43), (16, 1, 1, 1, 1, 1, 43)]
LENGTHS += [pytest.param(lengths, marks=pytest.mark.full) for lengths in ((23, 1, 40), (3, 61))]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_calls_that_end_about_pools_and_the_budget(model, lengths):
    assert error(model, lengths) < TOLERANCE


# ---- mistakes: each must exceed the tolerance


def wrong_pools(change):
    """Returns `pooled` with other arguments."""
    right = indexed.pooled
    return lambda *given: right(*change(*given))


def test_index_keys_that_are_not_normed(monkeypatch):
    assert broken(monkeypatch, indexed.LayerNorm, "__call__", lambda self, x: x)


def test_pools_that_are_plain_means(monkeypatch):
    wrong = wrong_pools(lambda keys, gates, ape, *rest: (keys, gates * 0, ape * 0, *rest))
    assert broken(monkeypatch, indexed, "pooled", wrong)


def test_gates_without_the_bias_of_their_place(monkeypatch):
    wrong = wrong_pools(lambda keys, gates, ape, *rest: (keys, gates, ape * 0, *rest))
    assert broken(monkeypatch, indexed, "pooled", wrong)


@pytest.mark.parametrize("lengths", [(26,), (14,) + (1,) * 12])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_budget_of_another_pool(lengths, more):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for attention in (model.layers[i].self_attn for i in (2, 4)):
        attention.blocks = replace(attention.blocks, indexer=replace(attention.blocks.indexer, top=4 + more))
    differs = np.abs(logits(model, TOKENS, lengths) - WANTED[:26]).max(axis=1) > 10 * TOLERANCE
    assert np.flatnonzero(differs)[0] in ((15, 16, 17, 18, 19) if more < 0 else (19, 20, 21, 22, 23))


def test_positions_after_the_last_pool_that_are_left_out(monkeypatch):
    right = operations.with_tail
    wrong = lambda chosen, places, *rest: right(chosen, places * 0 - 1, *rest)  # noqa: E731
    assert broken(monkeypatch, operations, "with_tail", wrong)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("lengths", [(64,), (56,) + (1,) * 8])
def test_a_decay_for_each_head(monkeypatch, lengths):
    right = delta.log_decays

    def wrong(*given):
        decays = right(*given)
        return decays * 0 + decays.mean(axis=-1, keepdims=True)

    assert broken(monkeypatch, delta, "log_decays", wrong, lengths)


@pytest.mark.usefixtures("cpu_device")
def test_decays_without_their_bias(monkeypatch):
    right = delta.log_decays
    assert broken(monkeypatch, delta, "log_decays", lambda a, rates, bias, rule: right(a, rates, bias * 0, rule))


def test_results_gated_by_silu():
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for layer in (model.layers[i] for i in (0, 1, 3)):
        layer.self_attn.mixer = replace(layer.self_attn.mixer, gate="silu")
    assert error(model) > 10 * TOLERANCE


def test_one_stream_after_the_last_layer(monkeypatch):
    assert broken(monkeypatch, streams, "mean_of", lambda h, count: h[..., : h.shape[-1] // count])
