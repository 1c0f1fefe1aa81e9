"""Rounding to integer codes with the least squared error: scale * code + bias for each group of columns.

The search begins at several ranges, from a part of the group's own range to a little more, because the best scale
clips some values. From each range it takes turns: values get their nearest codes, then scale and bias are those of
least squares over these codes. The range that explains most of the variance takes some more turns. Its scale is
rounded to the stored dtype, and the bias is computed again for this scale and rounded. The scale and bias of
`mx.quantize` (min-max) are used instead if their error is not larger. All errors are those of the scales and biases as
stored.

`native/fit.h` is the native form. A core with AVX-512 fits a weight in about 5 ns, with AVX2 in 8 ns; `mx.quantize`
takes 3 ns. It is used on every backend, and computes the same bits on every processor and with any number of threads.
Without a compiler, the twin computes in MLX operations; on the CPU it has the same bits, and takes 30 times as long.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..installation import module_if_here
from ..ops.backend import view
from ..ops.cores import cores
from ..quant import Quant

EIGHT = 8  # codes that fill whole bytes at any width


def packed(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., cols] below 2 ** bits -> uint32 words [..., cols * bits / 32], as MLX stores them: a row is one
    stream of bits, the first code in the lowest ones. `cols` is a multiple of 32.
    """
    *lead, columns = codes.shape
    words = codes.reshape(-1, columns // EIGHT, EIGHT).astype(mx.uint64)
    width = bits
    while words.shape[-1] > 1:  # neighbours are joined until eight codes are one number
        words = words[..., 0::2] | (words[..., 1::2] << width)
        width *= 2
    stream = mx.contiguous(words).view(mx.uint8)[..., :bits]
    return mx.contiguous(stream.reshape(-1, columns * bits // 8)).view(mx.uint32).reshape(*lead, columns * bits // 32)


# The smallest range of a search, as a part of the group's, by bits; the largest is MOST. With STARTS, TURNS and LAST,
# squared errors are within 1.5 % of those of 23 ranges with 12 turns each (docs/quality.md).
LEAST = {1: 0.5, 2: 0.5, 3: 0.7, 4: 0.85, 5: 0.9, 6: 0.95, 8: 0.97}
MOST = 1.02
STARTS, TURNS, LAST = 8, 3, 4
BLOCK = 8  # columns that are summed before sums are
LEAST_RANGE, LEAST_SCALE = 1e-7, 1e-30  # of mx.quantize; the inverse of a smaller scale may be infinite
KINDS = (mx.float32, mx.bfloat16, mx.float16)  # dtypes of scales, in the order of the kernel's numbers
CHUNK_VALUES = 1 << 18  # of one thread's piece of work, or of one run of the twin, at the most
LEAST_PIECE = 1 << 16  # of one thread's piece of work, so that an expert of a few million values keeps 16 cores busy

Fitted = tuple[mx.array, mx.array, mx.array]
Line = tuple[mx.array, mx.array]


extension = module_if_here("moeflux_mlx.rounding._fit")  # None if it is not built


def fit_affine(values: mx.array, quant: Quant, weights: np.ndarray, dtype: mx.Dtype) -> Fitted:
    """Fits a matrix.

    Args:
        values: [rows, cols] of a floating dtype.
        quant: of mode "affine".
        weights: float32 [cols], of the squared error of each column, with a positive sum in each group.
        dtype: of scales and biases.

    Returns:
        words, scales and biases, as `mx.quantize` returns them.
    """
    assert quant.mode == "affine" and dtype in KINDS, (quant, dtype)
    fit = fit_ops if extension is None else fit_native
    return fit(values, quant, np.ascontiguousarray(weights, np.float32), dtype)


def _shrinks(bits: int) -> np.ndarray:
    """The ranges at which a search begins, as parts of the group's."""
    return np.linspace(LEAST[bits], MOST, STARTS).astype(np.float32)


def fit_native(values: mx.array, quant: Quant, weights: np.ndarray, dtype: mx.Dtype, least: int = 0) -> Fitted:
    """`fit_affine` in the C extension. `least`: 1 and 2 leave faster instruction sets out, for tests."""
    is_half = values.dtype == mx.bfloat16
    x = view(values if is_half else values.astype(mx.float32))
    rows, columns = x.shape
    words = np.empty((rows, quant.words(columns)), np.uint32)
    scales, biases = np.empty((2, rows, quant.groups(columns)), np.float32)
    form = quant.bits, quant.group_size, is_half, KINDS.index(dtype), TURNS, LAST, least
    step = max(1, min(CHUNK_VALUES, max(LEAST_PIECE, x.size // (2 * cores()))) // columns)

    def fit(start: int) -> None:
        part = slice(start, start + step)
        given = x[part], weights, _shrinks(quant.bits), len(x[part]), columns
        cast(Any, extension).fit(*given, *form, words[part], scales[part], biases[part])

    starts = range(0, rows, step)
    if len(starts) == 1:
        fit(0)
    else:
        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(fit, starts))
    return mx.array(words), mx.array(scales).astype(dtype), mx.array(biases).astype(dtype)


# ---- the twin


@dataclass(frozen=True)
class _Groups:
    """Values and weights, [groups, group_size], and the largest code."""

    x: mx.array
    w: mx.array
    top: float

    def codes(self, line: Line) -> mx.array:
        """The nearest codes."""
        return codes_of(self.x, *line, self.top)

    @cached_property
    def weight(self) -> mx.array:
        return _sum(self.w)

    @cached_property
    def mean(self) -> mx.array:
        return _sum(self.w * self.x) / self.weight

    def error(self, line: Line) -> mx.array:
        off = self.x - (line[0] * self.codes(line) + line[1])
        return _sum(off * off * self.w)

    def improved(self, line: Line) -> tuple[Line, mx.array]:
        """The line of weighted least squares through the values over the codes that `line` gives them, and the part of
        the values' variance that it explains."""
        q = self.codes(line)
        wq = q * self.w
        q1, q2, qx = _sum(wq), _sum(wq * q), _sum(wq * self.x)
        mean = q1 / self.weight
        spread, shared = q2 - mean * q1, qx - self.mean * q1
        is_line = spread > 0
        scale = mx.where(is_line, shared / mx.where(is_line, spread, 1), line[0])
        bias = mx.where(is_line, self.mean - scale * mean, line[1])
        return (scale, bias), mx.where(is_line, shared * scale, 0)

    def bias_for(self, line: Line) -> mx.array:
        """The best bias for the line's scale."""
        return self.mean - line[0] * (_sum(self.codes(line) * self.w) / self.weight)


def codes_of(x: mx.array, scale: mx.array, bias: mx.array, top: float) -> mx.array:
    """The codes from 0 to `top`, in float32, whose values scale * code + bias are nearest to x."""
    is_usable = mx.abs(scale) > LEAST_SCALE
    by = mx.where(is_usable, 1 / mx.where(is_usable, scale, 1), 0)
    return mx.round(mx.minimum(mx.maximum((x - bias) * by, 0), top))


def _sum(terms: mx.array) -> mx.array:
    """[groups, group_size] -> [groups, 1], in the order of the native form."""
    blocks = terms.reshape(len(terms), -1, BLOCK)
    parts = reduce(mx.add, (blocks[..., i] for i in range(BLOCK)))
    return reduce(mx.add, (parts[:, i : i + 1] for i in range(parts.shape[1])))


def _min_to_max(low: mx.array, high: mx.array, top: float) -> Line:
    """The scale and bias of `mx.quantize`: the end of the range farther from zero is a bias, and zero is a code."""
    scale = mx.maximum((high - low) / top, LEAST_RANGE)
    is_low = mx.abs(low) > mx.abs(high)
    edge, scale = mx.where(is_low, low, high), mx.where(is_low, scale, -scale)
    zero = mx.round(edge / scale)
    is_zero = zero == 0
    return mx.where(is_zero, scale, edge / mx.where(is_zero, 1, zero)), mx.where(is_zero, 0, edge)


def fit_ops(values: mx.array, quant: Quant, weights: np.ndarray, dtype: mx.Dtype) -> Fitted:
    """The twin of `fit_native`."""
    rows, columns = values.shape
    w = mx.array(weights).reshape(-1, quant.group_size)
    made, step = list[Fitted](), max(1, CHUNK_VALUES // columns)
    for row in range(0, rows, step):
        part = values[row : row + step].astype(mx.float32)
        groups = _Groups(part.reshape(-1, quant.group_size), mx.tile(w, (len(part), 1)), float(2**quant.bits - 1))
        line = _fitted(groups, _shrinks(quant.bits), dtype)
        codes = groups.codes(line).astype(mx.uint8).reshape(part.shape)
        scale, bias = (one.reshape(len(part), -1).astype(dtype) for one in line)
        made.append((packed(codes, quant.bits), scale, bias))
        mx.eval(made[-1])
    words, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*made, strict=True))
    return words, scales, biases


def _fitted(groups: _Groups, shrinks: np.ndarray, dtype: mx.Dtype) -> Line:
    def stored(line: Line) -> Line:
        return line[0].astype(dtype).astype(mx.float32), line[1].astype(dtype).astype(mx.float32)

    low, high = groups.x.min(-1, keepdims=True), groups.x.max(-1, keepdims=True)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    centred = replace(groups, x=groups.x - middle)  # so that sums of products keep their precision
    best, most = (mx.zeros_like(half), mx.zeros_like(half)), mx.full(half.shape, -1.0)
    for shrink in shrinks.tolist():
        reach = half * shrink
        line: Line = (reach * float(np.float32(2) / np.float32(groups.top)), -reach)
        for _ in range(TURNS):
            line, gain = centred.improved(line)
        is_more = gain > most
        most = mx.where(is_more, gain, most)
        best = mx.where(is_more, line[0], best[0]), mx.where(is_more, line[1], best[1])
        mx.eval(best, most)
    for _ in range(LAST):
        best, _gain = centred.improved(best)
    best = best[0].astype(dtype).astype(mx.float32), best[1]
    best = stored((best[0], centred.bias_for(best) + middle))
    plain = stored(_min_to_max(low, high, groups.top))
    is_better = groups.error(best) < groups.error(plain)
    return mx.where(is_better, best[0], plain[0]), mx.where(is_better, best[1], plain[1])
