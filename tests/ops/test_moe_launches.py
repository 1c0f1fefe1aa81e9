"""The few launches of an MoE layer: norm and router, choice. Each against float64 or its slow form."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import FLOATS, LIMITS, error, wide

from metal import msl
from moeflux_mlx.kinds import Router
from moeflux_mlx.ops import launch
from moeflux_mlx.ops.linear import Part
from moeflux_mlx.ops.route import route, router_logits
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
SIGMOID = Router(64, 6, "sigmoid", True, 8, 4, scale=2.5)


@pytest.fixture
def host():
    with msl.launching():
        yield


def random(rng, *shape, dtype=mx.float32):
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


# ---- norm and router


def router(rng, rows, columns, bits, group):
    """A matrix in a stored form, or with 0 bits in floats, and its values."""
    values = random(rng, rows, columns)
    if not bits:
        return Part(None, values), wide(values)
    parts = mx.quantize(values, group, bits)
    return Part(Quant(bits, group), *parts), wide(mx.dequantize(*parts, group, bits))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits, group", [(0, 64), (8, 64), (4, 32)])
@pytest.mark.parametrize("T, O, H", [(1, 33, 2048), (3, 8, 192)])
def test_norm_and_logits_match_oracle(host, T, O, H, bits, group, dtype):
    rng = np.random.default_rng([T, O, bits])
    w, values = router(rng, O, H, bits, group)
    h, norm = random(rng, T, H, dtype=dtype), random(rng, H, dtype=dtype)
    x, logits = router_logits(h, norm, 1e-6, w)
    want = wide(h) / np.sqrt((wide(h) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
    assert x.dtype == dtype and error(x, want) < LIMITS[dtype]
    assert error(logits, wide(x) @ values.T) < 2e-5, "logits are of the row as it is stored"


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernel_and_twin_of_the_router_agree(dtype):
    rng = np.random.default_rng(2)
    w, _ = router(rng, 17, 256, 8, 64)
    h, norm = random(rng, 2, 256, dtype=dtype), random(rng, 256, dtype=dtype)
    twin = router_logits(h, norm, 1e-6, w)
    with msl.launching():
        kernel = router_logits(h, norm, 1e-6, w)
    assert all(error(got, wide(want)) < 2 * LIMITS[dtype] for got, want in zip(kernel, twin, strict=True))


# ---- the choice


@settings(max_examples=12)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([(16, 4), (40, 10), (128, 8), (512, 10)]), st.booleans()
)
def test_softmax_topk(seed, T, shape, norm):
    E, K = shape
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.tile(np.arange(E) * 0.05, (T, 1)), axis=1).astype(np.float32)
    with msl.launching():
        ids, weights = route(mx.array(logits), Router(E, K, normalise=norm))
        mx.eval(ids, weights)
    want_ids, want_weights = oracle.softmax_topk(logits, K, norm)
    assert np.array_equal(np.array(ids), want_ids)
    np.testing.assert_allclose(np.array(weights), want_weights, rtol=1e-5)


@settings(max_examples=12)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.sampled_from([(8, 8, 4, 8), (4, 40, 2, 4), (2, 16, 1, 3), (1, 24, 1, 5), (8, 32, 4, 8), (16, 1, 9, 3)]),
    st.floats(-3, 3),
)
def test_groups_of_sigmoids(seed, T, shape, shift):
    groups, size, kept, K = shape
    rng = np.random.default_rng(seed)
    order = np.tile(np.arange(groups * size) * 0.02, (T, 1))
    logits = (rng.permuted(order, axis=1) + rng.normal(size=(T, 1))).astype(np.float32)
    bias = (rng.normal(size=groups * size) * 0.1 + shift).astype(np.float32)
    rule = Router(groups * size, K, "sigmoid", True, groups, kept, scale=2.5)
    with msl.launching():
        ids, weights = route(mx.array(logits), rule, mx.array(bias))
        mx.eval(ids, weights)
    want_ids, want_weights = oracle.noaux_tc_topk(logits, bias, K, groups, kept, 2.5)
    assert np.array_equal(np.sort(np.array(ids)), np.sort(want_ids))
    order = np.argsort(np.array(ids)), np.argsort(want_ids)
    got = np.take_along_axis(np.array(weights), order[0], 1)
    np.testing.assert_allclose(got, np.take_along_axis(want_weights, order[1], 1), rtol=2e-5)


def test_ties_go_to_the_lowest_index(host):
    logits = np.zeros((1, 70), np.float32)
    logits[0, [3, 40, 69]] = 1
    for score in ("softmax", "sigmoid"):
        ids, _ = route(mx.array(logits), Router(70, 6, score))
        assert np.array(ids)[0].tolist() == [3, 40, 69, 0, 1, 2]
    ids, _ = route(mx.array(logits[:, :64]), Router(64, 4, "sigmoid", groups=8, kept_groups=3), None)
    assert np.array(ids)[0].tolist() == [3, 40, 0, 1], "groups as good as one another: the first"


@pytest.mark.parametrize("rule", [Router(64, 4), SIGMOID])
def test_a_choice_among_what_is_no_number_stays_in_range(host, rule):
    ids, _ = route(mx.full((1, 64), float("nan")), rule, mx.zeros((64,)) if rule.correction_bias else None)
    assert np.array(ids).max() < 64


@pytest.mark.parametrize("rule", [Router(24, 5), Router(24, 5, "sigmoid", True, 4, 2, True, 1.5)])
def test_columns_beside_the_experts_are_not_chosen(rule):
    """The last is the shared expert's gate."""
    rng = np.random.default_rng(4)
    logits, bias = random(rng, 3, 25), random(rng, 24) if rule.correction_bias else None
    logits[:, -1] = 100.0
    want = route(np.array(logits), rule, bias)
    for with_kernels in (False, True):
        if with_kernels:
            with msl.launching():
                got = route(logits, rule, bias)
        else:
            got = route(logits, rule, bias)
        assert np.array_equal(np.array(got[0]), want[0])
        np.testing.assert_allclose(np.array(got[1]), want[1], rtol=2e-5)


# ---- planted faults

FAULTS = {
    "no norm": ("router.h.metal", "v[j] * scale * w[j]", "v[j] * w[j]"),
    "a simdgroup's squares are left out": ("router_codes.metal", "s < SG; s++", "s < SG - 1; s++"),
    "the weight of other columns": ("router_codes.metal", "norm + CHUNK * chunk", "norm"),
    "missing barrier": ("router_codes.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a choice later": ("topk.h.metal", "found = wanted == k", "found = wanted == k + 1"),
    "bias in the weights": ("topk.h.metal", "topk_sigmoid(float(logits[where]))", "best"),
    "one of the best two": ("topk.h.metal", "first + second", "first"),
}  # fmt: skip


@msl.needed
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(host, monkeypatch, name):
    file, old, new = FAULTS[name]
    text = launch._text
    assert old in text(file)
    monkeypatch.setattr(launch, "_text", lambda n: text(n).replace(old, new) if n == file else text(n))
    try:
        caught = not errors_of(np.random.default_rng(1)) < 1e-4  # NaN is caught too
    except msl.Failure:
        caught = True
    assert caught


def errors_of(rng):
    w, values = router(rng, 9, 2048, 8, 64)
    h, norm = random(rng, 2, 2048), random(rng, 2048)
    _, logits = router_logits(h, norm, 1e-6, w)
    x = wide(h) / np.sqrt((wide(h) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
    chosen, bias = np.array(random(rng, 2, 64)), np.array(random(rng, 64))
    ids, weights = route(mx.array(chosen), SIGMOID, mx.array(bias))
    want_ids, want = route(chosen, SIGMOID, mx.array(bias))
    found = error(logits, x @ values.T), error(weights, want)
    return max(found) if np.array_equal(np.array(ids), want_ids) else 1.0
