"""Values of chosen matrices: the sum of silu(W x) over a token's experts, weighed (IFM's K2 Horizon, MoVA).

On the CPU each chosen matrix multiplies the rows that chose it. MLX gathers matrices that are stored alike in a form of
its own; for any others every matrix multiplies all rows, and the weights of those that were not chosen are 0.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ...ops.backend import AnyArray, computes_at_once
from ...ops.elementwise import sigmoid
from ...ops.forms import settings
from ...ops.linear import linear, row_by_row
from ...ops.matrix import Weights

SORTED_FROM = 64  # choices that are sorted first, so that MLX reads a matrix once for many of them


def mix_values(
    x: AnyArray, ids: AnyArray, weights: AnyArray, matrices: Sequence[Weights], stacked: Weights | None
) -> AnyArray:
    """[T, rows] of x [T, D], ids and weights [T, K] of `matrices`, each [rows, D]. `stacked`: the rows of all, one
    matrix after the other, if they are stored alike.
    """
    if computes_at_once(x):
        return _mix_native(x, ids, weights, matrices)
    if stacked is None or stacked.quant is None or not stacked.quant.is_of_mlx or stacked.quant.has_global_scale:
        return _mix_ops(x, ids, weights, matrices)

    def gathered(x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        made = _products(x, ids, stacked, len(matrices))
        return ((made * mx.sigmoid(made)) * weights[..., None].astype(x.dtype)).sum(axis=1)

    return row_by_row(gathered, x, ids, weights)


def _mix_native(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, matrices: Sequence[Weights]) -> np.ndarray:
    """The sums are in the order of the matrices, so that no row depends on the others."""
    out = np.zeros((len(x), matrices[0].shape[0]), np.float32)
    for number in np.unique(ids):
        rows, places = np.nonzero(ids == number)
        made = linear(np.ascontiguousarray(x[rows]), matrices[number])
        out[rows] += made * sigmoid(made) * weights[rows, places][:, None]
    return out


def _mix_ops(x: mx.array, ids: mx.array, weights: mx.array, matrices: Sequence[Weights]) -> mx.array:
    """The obvious form: every product, of which those count that were chosen."""
    out = mx.zeros((len(x), matrices[0].shape[0]), x.dtype)
    for number, matrix in enumerate(matrices):
        made, share = linear(x, matrix), mx.where(ids == number, weights, 0.0).sum(axis=1, keepdims=True)
        out = out + made * mx.sigmoid(made) * share.astype(x.dtype)
    return out


def _products(x: mx.array, ids: mx.array, stacked: Weights, count: int) -> mx.array:
    """[T, K, rows] of each row's chosen matrices."""
    quant, (T, K) = stacked.quant, ids.shape
    assert quant is not None
    codes, scales = (part.reshape(count, -1, part.shape[-1]) for part in (stacked.weight, stacked.second))
    biases = stacked.third.reshape(count, -1, stacked.third.shape[-1]) if quant.has_biases else None
    if ids.size < SORTED_FROM:
        made = mx.gather_qmm(x[:, None, None], codes, scales, biases, None, ids, True, **settings(quant))
        return made[:, :, 0]
    order = mx.argsort(ids.reshape(-1))
    rows, owners = x[order // K][:, None], ids.reshape(-1)[order]
    made = mx.gather_qmm(rows, codes, scales, biases, None, owners, True, sorted_indices=True, **settings(quant))
    return made[mx.argsort(order), 0].reshape(T, K, -1)
