"""Values of chosen matrices: three ways of computing them, and each row by itself."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.layers import Linear, Stack
from moeflux_mlx.mixers.grouped.values_op import mix_values
from moeflux_mlx.ops import native
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
COUNT, ROWS, COLUMNS, TOP = 6, 32, 128, 3


@pytest.fixture(scope="module")
def matrices():
    """Returns value experts of 4 bits, and their stack."""
    made, rng = [], np.random.default_rng(0)
    for _ in range(COUNT):
        matrix = Linear(COLUMNS, ROWS)
        matrix.weight, matrix.scales, matrix.biases = mx.quantize(
            mx.array(rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)), 64, 4
        )
        matrix.quant, matrix.filled = Quant(4, 64), True
        made.append(matrix)
    return made, Stack(*made).stacked


def given(count):
    """Returns rows, ids and weights of `count` tokens."""
    rng = np.random.default_rng(count)
    ids = np.stack([rng.permutation(COUNT)[:TOP] for _ in range(count)]).astype(np.uint32)
    return rng.normal(size=(count, COLUMNS)).astype(np.float32), ids, rng.random((count, TOP)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_gathered_matrices_and_native_products_equal_all_products(matrices, count):
    """40 tokens choose so many that choices are sorted."""
    each, stacked = matrices
    arrays = given(count)
    obvious = np.array(mix_values(*map(mx.array, arrays), each, None))
    ways = [np.array(mix_values(*map(mx.array, arrays), each, stacked))]
    ways += [mix_values(*arrays, each, stacked)] if native.available() else []
    for made in ways:
        assert np.abs(made - obvious).max() < 1e-5 * np.abs(obvious).max()


@pytest.mark.parametrize("kind", [mx.array, np.array])
def test_a_row_has_the_bits_that_it_has_alone(matrices, kind):
    each, stacked = matrices
    arrays = [kind(one) for one in given(5)]
    together = np.array(mix_values(*arrays, each, stacked))
    alone = [np.array(mix_values(*(one[i : i + 1] for one in arrays), each, stacked)) for i in range(5)]
    assert np.array_equal(together, np.concatenate(alone))
