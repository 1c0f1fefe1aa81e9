"""The norm of parts of a row, by the kernel and plain operations, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import drawn

from metal import msl
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.norm import group_norm, refusal

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
EPS = 0.1


def error(shape, dtype, groups, make=lambda x: x):
    rng = np.random.default_rng(groups)
    x, weight = (mx.array(rng.normal(size=size)).astype(dtype) for size in (shape, shape[-1:]))
    parts = wide(x).reshape(*shape[:-1], groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + EPS)
    got = mx.array(group_norm(make(x), weight, EPS, groups))
    assert got.shape == shape and got.dtype == dtype
    return np.abs(wide(got) - parts.reshape(shape) * wide(weight)).max()


@pytest.mark.parametrize("shape, dtype", drawn([(1, 1, 2560), (1, 16, 96)], LIMITS))
def test_the_kernel(host, shape, dtype):
    assert not refusal(backend.name(), shape[1]) and error(shape, dtype, 2) < 4 * LIMITS[dtype]


@pytest.mark.parametrize("make", [np.array, mx.array])
def test_without_a_kernel(make):
    assert error((2, 20, 96), mx.float32, 3, make) < 4e-5


@msl.needed
@pytest.mark.parametrize("old, new", [("* float(weight[group * D + i])", ""), (" * G + group) * D", " * G) * D")])
def test_a_planted_fault_is_caught(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "group_norm.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        assert error((1, 2, 96), mx.float32, 2) < 1e-2
