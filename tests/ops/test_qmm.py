"""Products of a short prompt's rows on matrix units: every stored form, any number of rows, and rows that are alone."""

from contextlib import ExitStack

import mlx.core as mx
import numpy as np
import pytest
from tile_choices import Chosen

from metal import msl
from moeflux_mlx.ops import linear, qmm
from moeflux_mlx.ops.forms import settings, unpacked_float32
from moeflux_mlx.ops.tiles import Tile, using
from moeflux_mlx.quant import AFFINE_BITS, Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
FORMS = [*(Quant(bits, 64) for bits in AFFINE_BITS), Quant(4, 32), Quant(4, 128)]
FORMS += [Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4")]


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(linear, "_qmm_refusal", lambda *_: None)
    with ExitStack() as stack:
        stack.enter_context(msl.launching())
        stack.enter_context(using(Chosen({"qmm": Tile(rows=2, lanes=32, simdgroups=2)})))
        yield


def matrix(quant, rows, columns, seed=2):
    weights = mx.array(np.random.default_rng(seed).normal(size=(rows, columns)), mx.bfloat16)
    return linear.Part(quant, *mx.quantize(weights, **settings(quant)))


def rows_of_x(count, columns, dtype=mx.bfloat16):
    return mx.array(np.random.default_rng(count).normal(size=(count, columns)), dtype)


def error(x, w, residual=None):
    got = np.array(linear.linear(x, w, residual=residual).astype(mx.float32))
    weights = unpacked_float32(w.quant, *linear.parts_of(w)).astype(x.dtype).astype(mx.float32)
    want = np.array(x.astype(mx.float32)) @ np.array(weights).T
    want = want if residual is None else want + np.array(residual.astype(mx.float32))
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("quant", FORMS, ids=str)
def test_every_form(host, quant):
    assert error(rows_of_x(19, 128), matrix(quant, 40, 128)) < 4e-3


@pytest.mark.parametrize("count, rows, columns", [(17, 64, 64), (40, 24, 192), (33, 16, 704)])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_every_shape_with_a_residual(host, count, rows, columns, dtype):
    residual = rows_of_x(count, rows, dtype)
    assert error(rows_of_x(count, columns, dtype), matrix(Quant(4, 64), rows, columns), residual) < 4e-3


def test_a_row_has_the_same_bits_at_every_tile_and_among_any_others(host):
    x, w = rows_of_x(60, 192), matrix(Quant(4, 64), 40, 192)
    want = linear.linear(x, w)
    for tile in (Tile(1, 32, 1), Tile(4, 32, 3, ahead=4), Tile(8, 32, 4, ahead=2)):
        with using(Chosen({"qmm": tile})):
            assert mx.array_equal(linear.linear(x, w), want)
    assert mx.array_equal(linear.linear(x[21:40], w), want[21:40])


@msl.needed
@pytest.mark.parametrize(
    "old, new", [("8 * j + quad", "8 * j"), ("place < rows", "place + 1 < rows"), ("+ float(residual[cell])", "")]
)
def test_planted_faults_are_seen(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "qmm.metal", old, new)
    x, w = rows_of_x(19, 128), matrix(Quant(4, 64), 40, 128)
    assert not error(x, w, rows_of_x(19, 40)) < 4e-3


def test_what_the_kernel_does_not_take():
    shape, quant = (64, 128), Quant(4, 64)
    assert qmm.refusal("cuda", mx.bfloat16, shape, quant) is None
    assert "float32" in qmm.refusal("cuda", mx.float32, shape, quant)
    assert "floats" in qmm.refusal("cuda", mx.bfloat16, shape, None)
    assert "3 axes" in qmm.refusal("cuda", mx.bfloat16, (4, *shape), quant)
    assert "Metal" in qmm.refusal("metal", mx.bfloat16, shape, quant)
