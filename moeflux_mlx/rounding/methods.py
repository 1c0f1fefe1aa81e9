"""The ways to round that need nothing but a matrix, and perhaps the importance of its columns."""

from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..ops import backend
from ..ops.forms import is_computed, settings
from ..quant import E4M3, FLOAT, GLOBAL_UNIT, INTEGER, Quant
from .affine import fit_affine
from .k_types import fit_k_type
from .small_floats import fit_small_floats
from .weights import group_weights

FIT, MINMAX = "fit", "minmax"
METHODS = (FIT, MINMAX)


def rounded(
    values: mx.array,
    quant: Quant,
    method: str = FIT,
    importance: mx.array | None = None,
    dtype: mx.Dtype = mx.bfloat16,
) -> tuple[mx.array, ...]:
    """Rounds matrices to a stored form.

    The result of a row depends on nothing but the row and the importance of its columns, and on the matrix's largest
    value if the form has a global scale.

    Args:
        values: [..., rows, cols] of a floating dtype, finite.
        quant: a known form without a table, whose `multiple` divides `cols`.
        method: "fit" has the least squared error that a search finds, and never a larger one than "minmax" in mode
            affine; "minmax" is `mx.quantize` of the values in `dtype`. In mode "mxfp8" both are `mx.quantize`: E4M3 has
            the same relative error in 15 octaves, so no other power of two is better. In GGUF's forms both are "fit".
        importance: [cols] or [..., cols], the weight of the squared error in each column, such as the mean square of
            that input; None: all alike. "minmax" does not use it.
        dtype: of the floating scales and biases of MLX's forms.

    Returns:
        words, scales and, in mode affine, biases, as `mx.quantize` returns them; or a global scale, the largest
        magnitude of each matrix, float32 [..., 1, 1]. The parts [..., rows, values] of a form of GGUF.

    Raises:
        ValueError: there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not known; there are {', '.join(METHODS)}")
    if quant.has_global_scale:
        wide = values.astype(mx.float32)
        largest = mx.abs(wide).max((-2, -1), keepdims=True)
        largest = mx.where(largest > 0, largest, 1)
        alone = replace(quant, has_global_scale=False)
        return *rounded(wide / largest * GLOBAL_UNIT, alone, method, importance, mx.float32), largest
    if quant.is_of_mlx and method == MINMAX or quant.codes == E4M3:
        with nullcontext() if is_computed(backend.name(), quant) else mx.stream(mx.cpu):
            return tuple(mx.quantize(values.astype(dtype), **settings(quant)))
    *lead, rows, columns = values.shape
    weights = group_weights(importance, columns, quant.multiple)
    if weights.ndim == 1:
        parts = _fit(values.reshape(-1, columns), quant, weights, dtype)
    else:
        each = zip(values.reshape(-1, rows, columns), weights.reshape(-1, columns), strict=True)
        made = [_fit(matrix, quant, of_it, dtype) for matrix, of_it in each]
        parts = tuple(mx.concatenate(list(part)) for part in zip(*made, strict=True))
    return tuple(part.reshape(*lead, rows, -1) for part in parts)


def _fit(matrix: mx.array, quant: Quant, weights: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    if quant.codes != INTEGER:
        return fit_small_floats(matrix, quant, weights)
    if quant.has_biases:
        of_mlx = Quant(quant.bits, quant.group_size)
        return fit_affine(matrix, of_mlx, weights, dtype if quant.scale == FLOAT else mx.float16)
    return fit_k_type(matrix, quant, weights)
