"""The connections between several streams and a part of a layer, by kernels and plain operations, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import msl
from moeflux_mlx.kinds import HyperConnections, IndependentConnections
from moeflux_mlx.ops import backend, launch, streams

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
EPS = 1e-3


def case(rule, D, dtype, seed=0):
    """Returns h [1, 1, n * D], out [1, 1, D], and the parameters that compute weights from h."""
    rng, rows, n = np.random.default_rng(seed), rule.weights, rule.streams
    h, out = (mx.array(rng.normal(size=(1, 1, width)).astype(np.float32)).astype(dtype) for width in (n * D, D))
    fn, base = (rng.normal(size=shape) / shape[-1] ** 0.5 for shape in ((rows, n * D), (rows,)))
    arrays = [mx.array(part.astype(np.float32)) for part in (fn, base, rng.normal(size=rule.kinds))]
    return h, out, streams.Mapping(*arrays, launch.pack(arrays[1:]))


def wanted(h, out, by, rule):
    """Returns (a part's input, the streams after it) as in arXiv:2512.24880, in the order of DeepSeek-V4's code; or as
    transformers' `HYV4HyperConnection` makes them.
    """
    (h, out, fn, base, scale), n = map(wide, (h[0, 0], out[0, 0], *by[:3])), rule.streams
    v = fn @ h / np.sqrt((h**2).mean() + EPS)
    pre = 1 / (1 + np.exp(-(v[:n] * scale[0] + base[:n]))) + rule.eps
    post = 2 / (1 + np.exp(-(v[n : 2 * n] * scale[1] + base[n : 2 * n])))
    if isinstance(rule, IndependentConnections):
        post = rule.magnitude / 2 * post + rule.eps
        return pre @ h.reshape(n, -1), (h.reshape(n, -1) + post[:, None] * out).reshape(-1)
    comb = np.exp(v[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    comb = comb / comb.sum(1, keepdims=True) + rule.eps
    for i in range(rule.iterations):
        comb = comb / (comb.sum(1, keepdims=True) + rule.eps) if i else comb
        comb = comb / (comb.sum(0, keepdims=True) + rule.eps)
    h = h.reshape(n, -1)
    return pre @ h, (comb.T @ h + post[:, None] * out).reshape(-1)


def rules(n):
    shifted = HyperConnections(n, 3, 1e-2, shifted=True)
    return HyperConnections(n, 3, 1e-2), IndependentConnections(n, 1e-2, 1.5), shifted


def check(rule, D, dtype):
    """Checks the input of a part and the streams after it."""
    h, out, by = case(rule, D, dtype)
    x, mixing = streams.gathered(h, by, rule, EPS)
    got = x, streams.scattered(h, out, mixing, rule)
    if getattr(rule, "shifted", False):  # the weights of the sum come apart
        weights, mixing = streams.mapped(h, by, rule, EPS)
        got = streams.weighed(h, weights), streams.scattered(h, out, mixing, rule)
    for one, want in zip(got, wanted(h, out, by, rule), strict=True):
        assert np.abs(wide(one)[0, 0] - want).max() < LIMITS[dtype] * np.abs(want).max()
    behind = streams.gathered_behind(h, out, mixing, by, rule, EPS)
    for one, want in zip(behind, (got[1], *streams.gathered(got[1], by, rule, EPS)), strict=True):
        assert mx.array_equal(one, want), "in one launch or in two"


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("rule", rules(3), ids=str)
def test_plain_operations(rule):
    check(rule, 40, mx.float32)


@msl.needed
@pytest.mark.parametrize("n, D, dtype", [(4, 300, mx.float32), (2, 40, mx.bfloat16)])
def test_a_token_on_kernels(n, D, dtype):
    with msl.launching():
        for rule in rules(n):
            assert not streams.refusal(backend.name(), 1, rule)
            check(rule, D, dtype)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("streams_gather.metal", "uint o = N; o < CELLS", "uint o = 1; o < N"),
        pytest.param("streams_gather.metal", "round < ROUNDS", "round + 1 < ROUNDS", marks=pytest.mark.full),
        pytest.param("streams.h.metal", "N + j * N + k", "N + k * N + j", marks=pytest.mark.full),
        pytest.param(
            "streams_products.metal", "row < O ? weights[k * D + column]", "row < 0 ? v", marks=pytest.mark.full
        ),
        ("streams_next.metal", "row == O", "row == 0 && column > 0"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with msl.launching(), pytest.raises(AssertionError):
        check(rules(4)[0], 40, mx.float32)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("streams_gather.metal", "MAGNITUDE /", "2.0f /"),
        ("streams_gather.metal", "-logit)) + POST_EPS", "-logit))"),
        ("streams_next.metal", "<N, MIXED, D>", "<N, 1, D>"),
    ],
)
def test_a_planted_fault_between_independent_streams_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        check(rules(4)[1], 40, mx.float32)
