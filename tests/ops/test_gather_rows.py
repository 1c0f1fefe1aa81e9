"""Rows by number, copied by the kernel or by MLX."""

import mlx.core as mx
import numpy as np
import pytest

from metal import msl
from moeflux_mlx.ops.gather_rows import gather_rows, plan
from moeflux_mlx.ops.launch import Reason

pytestmark = msl.needed


def rows(count, width, dtype):
    values = mx.array(np.random.default_rng(7).normal(size=(count, width)), dtype)
    return values, mx.array([3, 0, 3, count - 1, 1], mx.int32)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("width, dtype", [(8, mx.bfloat16), (1032, mx.float16), (520, mx.float32)])
def test_the_requested_rows(width, dtype):
    x, places = rows(6, width, dtype)
    with msl.launching():
        got = gather_rows(x, places)
        mx.eval(got)
    assert got.dtype == dtype and mx.array_equal(got, x[places])


@pytest.mark.usefixtures("cpu_device")
def test_places_of_any_shape():
    x, places = rows(6, 24, mx.bfloat16)
    with msl.launching():
        got = gather_rows(x, mx.stack([places, places[::-1]])[:, None])
        mx.eval(got)
    assert got.shape == (2, 1, 5, 24) and mx.array_equal(got[1, 0], x[places[::-1]])


@pytest.mark.usefixtures("cpu_device")
def test_rows_that_are_not_whole_units_are_gathered_by_mlx():
    x, places = rows(6, 12, mx.bfloat16)
    assert isinstance(plan("metal", x.shape, x.dtype, places.shape), Reason)
    with msl.launching():
        assert mx.array_equal(gather_rows(x, places), x[places])


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("width", [4, 0])
def test_few_values_are_gathered_by_mlx(width):
    """Metal passes an array of fewer than eight values as another kind of pointer."""
    x, places = mx.ones((1, width)), mx.zeros(3, mx.int32)
    with msl.launching():
        assert mx.array_equal(gather_rows(x, places), x[places])


@pytest.mark.usefixtures("cpu_device")
def test_a_planted_fault_is_caught(monkeypatch):
    msl.plant(monkeypatch, "gather_rows.metal", "size_t(places[row])", "size_t(places[0])")
    with pytest.raises(AssertionError):
        test_the_requested_rows(1032, mx.float16)
