"""Attention over chosen positions: where it begins, and the effect of typical mistakes."""

from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import TOLERANCE, broken, error
from tiny_models import tiny_model

from metal import msl
from moeflux_mlx import layers
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.kinds import GatedConnections, HyperConnections, IndependentConnections, Indexer, Residual
from moeflux_mlx.mixers.latent import module, scoring
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.span import Span
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.ops.backend import contiguous
from moeflux_mlx.ops.index import Index, choose
from moeflux_mlx.ops.seen import Chosen
from moeflux_mlx.spec import ModelArgs

FAMILIES = ("deepseek_v32", "glm_moe_dsa")


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 4])
def test_calls_that_end_about_the_budget(family, beyond):
    model = tiny_model(family, mx.float32, "hub")
    first = model.args.mixers[0].indexer.top + beyond
    assert error(model, (first, 1, 63 - first), family=family) < TOLERANCE


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_tokens_at_a_time_give_the_same(family, index_values):
    index_values(1 << 12)
    model = tiny_model(family, mx.float32, "hub")
    rows = model.args.mixers[0].indexer.rows_at_once(64, 80)
    assert 1 <= rows < 20 and error(model, family=family) < TOLERANCE


@pytest.mark.parametrize("dtype", [np.float32, mx.float32])
@given(seed=st.integers(0, 2**16), levels=st.sampled_from([1, 2, 4, 1024]), top=st.integers(1, 8))
@settings(max_examples=examples(25), deadline=None)
def test_the_best_are_chosen_and_the_first_of_equal_ones(dtype, seed, levels, top):
    """float32 holds all these numbers exactly."""
    rng, heads, first, rows, count = np.random.default_rng(seed), 3, 9, 4, 14
    q = rng.integers(-levels, levels + 1, (1, rows, heads, 2)) / levels
    k = rng.integers(-levels, levels + 1, (1, count, 2)) / levels
    w = rng.integers(-2, 3, (1, rows, heads)).astype(np.float64)
    scores = np.einsum("rh,rhp->rp", w[0], np.maximum(q[0] @ k[0].T, 0))
    seen = [range(first + row + 1) for row in range(rows)]
    ordered = [sorted(seen[row], key=lambda place, row=row: (-scores[row, place], place)) for row in range(rows)]
    made = [a.astype(np.float32) if dtype is np.float32 else mx.array(a, dtype) for a in (q, k, w)]
    library = np if dtype is np.float32 else mx
    found = np.array(choose(Index(*made), library.arange(first + 1, first + rows + 1), Indexer(heads, 2, top)))
    assert found.tolist() == [[sorted(places[:top]) for places in ordered]]


def test_a_span_that_was_left_between_two_layers_goes_on():
    model, (tokens, _) = tiny_model("glm_moe_dsa", mx.float32, "hub"), goldens.golden("glm_moe_dsa")
    whole, left = (Span(mx.array(tokens[None]), 0, 20) for _ in range(2))
    wanted = finished(model.advance(whole, model.make_cache()))
    cache, told = model.make_cache(), []

    def stop(share):
        told.append(share)
        if 0.2 < share < 0.3 or 0.6 < share < 0.7:  # in the layers that reuse the choice of the layer before them
            raise InterruptedError

    for _ in range(50):
        try:
            got = finished(model.advance(left, cache), stop)
            break
        except InterruptedError:
            stop = (lambda right: lambda share: None if told.append(share) or len(told) > 12 else right(share))(stop)
    assert len(told) > 3 and mx.array_equal(got, wanted)
    assert left.nbytes > left.hidden.nbytes and any(one.positions is not None for one in left.chosen.values())


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(
    "rule", [HyperConnections(2, 3, 1e-6), GatedConnections(2, 16), IndependentConnections(2, 1e-6)], ids=str
)
def test_a_choice_reaches_the_next_layer_between_several_streams(monkeypatch, rule):
    """Prompts, single tokens and rows of a step give the same, and a layer that reuses a choice gets the last one."""
    args = ModelArgs.from_dict(goldens.config("glm_moe_dsa"))
    one = replace(args.layers[0], residual=Residual(connections=rule))  # its feed-forward part is dense
    model = randomly_filled(
        Model(replace(args, layers=tuple(replace(one, mixer=mixer) for mixer in args.mixers)), None)
    )
    right, reused, last = module.attend_indexed, [], [None]

    def watching(*given, made, chosen, **more):
        out = right(*given, made=made, chosen=chosen, **more)
        if made is None:
            reused.append(chosen.positions is last[0] and chosen.positions is not None)
        last[0] = chosen.positions
        return out

    monkeypatch.setattr(module, "attend_indexed", watching)
    tokens = mx.array(goldens.golden("glm_moe_dsa")[0])[None, :30]
    want, caches = np.array(model(tokens)[0, 24:]), [model.make_cache() for _ in range(2)]
    assert all(reused) and len(reused) == 3
    for cache in caches:
        mx.eval(model(tokens[:, :24], cache))
    single = [model(tokens[:, i : i + 1], caches[0])[0, 0] for i in range(24, 30)]
    assert all(reused) and len(reused) == 3 + 2 * 3 + 6 * 3
    np.testing.assert_allclose(np.array(mx.stack(single)), want, atol=1e-4)
    rows = model.step([SequenceRows(caches[1], tokens[0, 24:].tolist())]).logits
    np.testing.assert_allclose(np.array(rows), want, atol=1e-4)


def randomly_filled(model):
    rng = np.random.default_rng(0)
    for part in model.modules():
        for name, value in part.items():
            if isinstance(value, mx.array):
                part[name] = mx.array(rng.normal(size=value.shape).astype(np.float32) * 0.2)
        part.filled = True
    for part in model.modules():
        if hasattr(part, "arrange"):
            part.arrange()
    return model


# ---- mistakes


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_not_normed(monkeypatch, family):
    assert broken(monkeypatch, scoring.LayerNorm, "__call__", lambda self, x: x, family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_whose_norm_has_no_bias(monkeypatch, family):
    right = layers.layer_norm
    assert broken(monkeypatch, layers, "layer_norm", lambda x, w, b, eps: right(x, w, b * 0, eps), family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_values_of_a_head_rotated(monkeypatch, family):
    right = module.Rope.__call__

    def wrong(self, x, offset):
        if x.shape[-1] == self.dims or self.dims != 16 or x.shape[-1] > 48:
            return right(self, x, offset)
        return contiguous(right(self, contiguous(x[..., ::-1]), offset)[..., ::-1])

    assert broken(monkeypatch, module.Rope, "__call__", wrong, family=family)


def test_the_choice_of_the_first_layer_for_all_that_reuse(monkeypatch):
    right, kept = module.attend_indexed, {}

    def wrong(*given, made, chosen, **more):
        if made is not None:
            out = right(*given, made=made, chosen=chosen, **more)
            kept.setdefault("positions", chosen.positions)
            return out
        return right(*given, made=None, chosen=Chosen(kept["positions"]), **more)

    assert broken(monkeypatch, module, "attend_indexed", wrong, family="glm_moe_dsa")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_heads_that_are_left_out(monkeypatch, family):
    right = scoring.Projections
    assert broken(
        monkeypatch, scoring, "Projections", lambda q, k, w, terms: right(q, k, w * 0 + 1, terms), family=family
    )


@msl.needed
@pytest.mark.usefixtures("plain_operations", "cpu_device")
@pytest.mark.parametrize("before", [10, 20])
def test_the_stand_ins_of_both_caches_take_rows_of_one_text(before):
    """Checks kernels, with the bits of single tokens. 12 positions are attended to."""
    model = tiny_model("deepseek_v32", mx.float32)
    layer, rng = model.layers[0], np.random.default_rng(0)
    x = mx.array(rng.normal(size=(1, before + 2, model.args.hidden_size)).astype(np.float32))
    one, other = (make_caches(model.args.mixers[0]) for _ in range(2))
    mix = lambda row, caches: layer.mixer.mixed(x[:, row : row + 1], layer.input_layernorm, caches)  # noqa: E731
    for caches in (one, other):
        layer.mixer.mixed(x[:, :before], layer.input_layernorm, caches)
    with msl.launching():
        want = [mix(before + i, one) for i in range(2)]
        places, stand_ins, later = [mx.array(before + i) for i in range(2)], [], []
        for cache in other:
            cache.reserve(2)
            kind, arrays = cache.traced(2), cache.step_arrays(2)
            stand_ins.append(kind(*arrays[: kind.num_inputs], places[0], places[0], None))
            later.append(arrays[kind.num_inputs :])
        got = [mix(before, stand_ins)]
        for stand_in, arrays in zip(stand_ins, later, strict=True):
            stand_in.go_on(*arrays, places[1], places[1], None)
        got.append(mix(before + 1, stand_ins))
        for cache, stand_in in zip(other, stand_ins, strict=True):
            for _ in range(2):
                cache.take_step(stand_in.arrays)
        assert all(map(mx.array_equal, got, want)) and [cache.offset for cache in other] == [before + 2] * 2
        for a, b in zip(one, other, strict=True):
            for left, right in zip(a.state[:2], b.state[:2], strict=True):
                assert mx.array_equal(left[..., : before + 2, :], right[..., : before + 2, :])


def test_a_layer_that_reuses_a_choice_has_no_keys():
    args = tiny_model("glm_moe_dsa", mx.float32, "hub").args
    own, shared = (args.mixers[i] for i in (0, 1))
    assert shared == replace(own, indexer=replace(own.indexer, reuses=True))
    sizes = [sum(one.bytes_for(256, 4) // 1024 for one in make_caches(mixer)) for mixer in (own, shared)]
    assert sizes == [64 + 16 + 48, 64 + 16]
