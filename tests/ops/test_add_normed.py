"""Adding a normed output to the stream, by the kernel, natively and by plain operations, compared with float64."""

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_kernels import FLOATS, LIMITS, error, wide

from metal import msl
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.ops import launch
from moeflux_mlx.ops.add_normed import Pair, add_normed, add_weighed, plan
from moeflux_mlx.ops.launch import NO_KERNELS

pytestmark = pytest.mark.usefixtures("cpu_device")
EPS = 1e-3


def case(shape, dtype=mx.float32, seed=0):
    """Returns h, two results and three norms."""
    rng = np.random.default_rng(seed)
    norms = [RMSNorm(shape[-1], EPS) for _ in range(3)]
    for norm in norms:
        norm.weight = mx.array(rng.normal(1, 0.3, shape[-1]).astype(np.float32)).astype(dtype)
    rows = [mx.array((scale * rng.normal(size=shape)).astype(np.float32)).astype(dtype) for scale in (1, 3, 0.5)]
    return rows, norms


def wanted(rows, norms, is_pair, factor):
    def normed(x, norm):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * wide(norm.weight)

    h, made, beside = map(wide, rows)
    made = normed(made, norms[1]) + normed(beside, norms[2]) if is_pair else made
    return (h + normed(made, norms[0])) * factor


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("shape, dtype", drawn([(1, 1, 2816), (1, 16, 128), (2, 3, 1000)], FLOATS, seed=2))
def test_the_kernel_and_plain_operations(host, shape, dtype, is_pair):
    rows, norms = case(shape, dtype)
    made = Pair(rows[1], norms[1], rows[2], norms[2]) if is_pair else rows[1]
    for factor in (None, mx.array([0.75], dtype)):
        got = add_normed(rows[0], made, norms[0], factor)
        want = wanted(rows, norms, is_pair, 1.0 if factor is None else 0.75)
        assert got.shape == shape and got.dtype == dtype
        assert error(got, want) < 2 * LIMITS[dtype]


def weighed_error(shape, dtype, scales):
    """The error of a weighed sum, over its largest value (transformers, `MuseSparkResidualGate`)."""
    (h, made, _), norms = case(shape, dtype)
    kept, own, scale = (norm.weight.astype(mx.float32) for norm in norms)
    got = add_weighed(h, made, (kept, own), EPS, scale if scales else None)
    assert got.shape == shape and got.dtype == dtype
    x = wide(made) * wide(scale) if scales else wide(made)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return error(got, wide(h) * wide(kept) + normed * wide(own))


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("shape, dtype", drawn([(1, 1, 2816), (1, 16, 128), (2, 3, 1000)], FLOATS, seed=2))
def test_weighed_sums(host, shape, dtype, scales):
    assert weighed_error(shape, dtype, scales) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("scales", [False, True])
def test_weighed_sums_without_a_kernel(scales):
    assert weighed_error((1, 3, 96), mx.float32, scales) < 2e-5


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [("* float(beside_weight[i])", ""), ("WEIGHED == 2", "WEIGHED == 3"), ("scale)) * float(weight[i])", "scale))")],
)
def test_a_planted_fault_in_weighed_sums_is_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "add_normed.metal", old, new)
    assert weighed_error((1, 2, 96), mx.float32, True) > 1e-2


@msl.needed
@pytest.mark.usefixtures("both_builds")
def test_contraction_would_change_the_bits(host, monkeypatch):
    """A norm's product is rounded before the sum, which no text says by itself."""
    monkeypatch.setattr(launch, "UNFUSED", "")
    rows, norms = case((1, 1, 128))
    with pytest.raises(msl.Failure, match="the result depends on contraction"):
        add_normed(rows[0], rows[1], norms[0], None)


@pytest.mark.parametrize("array", [np.array, mx.array])
def test_without_a_kernel(array):
    rows, norms = case((1, 5, 64))
    h, one, other = map(array, rows)
    got = add_normed(h, Pair(one, norms[1], other, norms[2]), norms[0], mx.array([0.5]))
    assert error(mx.array(got), wanted(rows, norms, True, 0.5)) < 2e-5


def test_reasons_why_there_is_no_kernel():
    given = 64, mx.float32, False, False, 0
    assert plan("ops", 1, *given) is NO_KERNELS
    assert "more than 16 rows" in str(plan("metal", 17, *given))
    assert "wider than" in str(plan("metal", 1, 1 << 14, *given[1:]))


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("for (uint round = 0; round <= PAIR; round++)", "for (uint round = 0; round < 1; round++)"),
        ("float(made_weight[i])", "float(beside_weight[i])"),
        ("joined * float(factor[0])", "joined"),
        ("partial[SG + simdgroup] = others", "partial[SG + simdgroup] = squares"),
    ],
)
def test_a_planted_fault_is_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "add_normed.metal", old, new)
    rows, norms = case((1, 2, 96))
    got = add_normed(rows[0], Pair(rows[1], norms[1], rows[2], norms[2]), norms[0], mx.array([0.5]))
    assert error(got, wanted(rows, norms, True, 0.5)) > 1e-2
