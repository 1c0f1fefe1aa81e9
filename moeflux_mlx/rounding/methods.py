"""The ways to round that need nothing but a matrix, and perhaps the importance of its columns.

`fit_small_floats` rounds to floats of 4 bits, E2M1, with the scale of each group that has the least squared error.

A scale has 8 bits, so the best one is found by trying those near the scale that takes the group's largest value to the
largest code. A smaller scale clips the largest values; a larger one may have values that suit the group better.
"""

from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..ops import backend
from ..ops.forms import is_computed, settings
from ..quant import E4M3, E8M0, FLOAT, GLOBAL_UNIT, INTEGER, Quant
from .affine import fit_affine, packed
from .k_types import fit_k_type
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


LARGEST = 6.0  # E2M1
# What is added to a scale's bits. A step of E8M0 is a factor of 2, eight steps of E4M3 are. Of 4,000 groups of normal
# weights and of Student's t none chose a scale farther away.
STEPS = {E8M0: range(-1, 2), E4M3: range(-3, 7)}
MOST_BITS = {E8M0: 254, E4M3: 126}  # the largest scale that is a number
CHUNK_VALUES = 1 << 18  # so that the results of operations stay in a CPU's caches


def fit_small_floats(values: mx.array, quant: Quant, weights: np.ndarray) -> tuple[mx.array, mx.array]:
    """Fits a matrix.

    Args:
        values: [rows, cols] of a floating dtype.
        quant: of mode "mxfp4" or "nvfp4", without a global scale.
        weights: float32 [cols], of the squared error of each column.

    Returns:
        words and scales, as `mx.quantize` returns them.
    """
    rows, columns = values.shape
    w = mx.array(weights).reshape(-1, quant.group_size)
    made, step = [], max(1, CHUNK_VALUES // columns)
    for row in range(0, rows, step):
        part = values[row : row + step].astype(mx.float32)
        x = part.reshape(len(part), -1, quant.group_size)
        scales = _best_scales(x, w, quant.scale)
        codes = _codes(x / _value(scales, quant.scale)).reshape(part.shape)
        made.append((packed(codes, quant.bits), scales[..., 0]))
        mx.eval(made[-1])
    words, scales = (mx.concatenate(list(parts)) for parts in zip(*made, strict=True))
    return words, scales


def _best_scales(x: mx.array, w: mx.array, kind: str) -> mx.array:
    """The bits of the groups' scales, uint8 [rows, groups, 1]."""
    first = _bits(mx.abs(x).max(-1, keepdims=True) / LARGEST, kind).astype(mx.int32)
    best, least = mx.ones(first.shape, mx.uint8), mx.full(first.shape, mx.inf)
    for step in STEPS[kind]:
        bits = mx.clip(first + step, 1, MOST_BITS[kind]).astype(mx.uint8)
        scale = _value(bits, kind)
        off = x - _nearest(x / scale) * scale
        error = (off * off * w).sum(-1, keepdims=True)
        is_better = error < least
        best, least = mx.where(is_better, bits, best), mx.where(is_better, error, least)
    return best


def _bits(values: mx.array, kind: str) -> mx.array:
    """The bits of scales: of the power of two below, or of the nearest E4M3."""
    return values.view(mx.uint32) >> 23 if kind == E8M0 else mx.to_fp8(values)


def _value(bits: mx.array, kind: str) -> mx.array:
    """What the bits of scales stand for."""
    return (bits.astype(mx.uint32) << 23).view(mx.float32) if kind == E8M0 else mx.from_fp8(bits, mx.float32)


def _step(size: mx.array) -> mx.array:
    """The distance between neighbouring E2M1 at this size."""
    return mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))


def _nearest(x: mx.array) -> mx.array:
    """The nearest E2M1; of two, the one with an even code."""
    step = _step(mx.abs(x))
    return mx.clip(mx.round(x / step) * step, -LARGEST, LARGEST)


def _codes(x: mx.array) -> mx.array:
    """The codes of the nearest E2M1, uint8."""
    size = mx.abs(_nearest(x))
    first = mx.where(size < 2, 0, mx.where(size < 4, 2, 4))  # 2 has code 4, and 4 has code 6
    return (size / _step(size) + first).astype(mx.uint8) | mx.where(x < 0, 8, 0).astype(mx.uint8)
