"""Rounding to GGUF's forms of integer codes with a small weighted squared error, by MLX's operations.

The groups of 256 weights share float16 factors d and m, by which their integer scales S and minima M are multiplied
(`Quant`). First each group gets a float scale and minimum, as in mode affine: from several ranges, nearest codes and
least squares by turns. Then d and m are chosen so that the largest of these are near the largest integers, and by turns
S and M become the best neighbours for them, codes the nearest, and d and m those of least squares over all 256. A value
that is stored as float16 is rounded before what depends on it is chosen. The simple types are the same with one group,
whose S is always 1.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..quant import Quant
from .affine import LEAST, packed

# Ranges at which the search for a group's own scale begins, turns from each, and turns for all of a block. More of any
# have less than 0.5 % less error.
STARTS, TURNS, LAST = 6, 2, 2
NEIGHBOURS = (-1.0, 1.0)  # what is added to S; without these turns q2_k and q4_k have 2.5 % more error
MOST_HALF = 65504.0
CHUNK_VALUES = 1 << 18  # so that the results of operations stay in a CPU's caches

# The least and the largest integer scale, by kind of scale; the simple types have none.
SCALES = {"q2_k": (0.0, 15.0), "q3_k": (-32.0, 31.0), "q4_k": (0.0, 63.0), "q6_k": (-128.0, 127.0)}


def fit_k_type(matrix: mx.array, quant: Quant, weights: np.ndarray) -> tuple[mx.array, ...]:
    """Fits a matrix.

    Args:
        matrix: [rows, cols] of a floating dtype; cols is a multiple of `quant.multiple`.
        quant: a form of GGUF with integer codes.
        weights: float32 [cols], of the squared error of each column.

    Returns:
        The parts of the form, [rows, values].
    """
    rows, columns = matrix.shape
    w = mx.array(weights).reshape(-1, quant.multiple // quant.group_size, quant.group_size)
    made, step = list[tuple[mx.array, ...]](), max(1, CHUNK_VALUES // columns)
    for row in range(0, rows, step):
        part = matrix[row : row + step].astype(mx.float32)
        x = part.reshape(-1, *w.shape[1:])
        blocks = _Blocks(quant, x, mx.tile(w, (len(part), 1, 1)) * _emphasis(x))
        made.append(tuple(one.reshape(len(part), -1) for one in _parts(blocks, _fitted(blocks))))
        mx.eval(made[-1])
    return tuple(mx.concatenate(list(parts)) for parts in zip(*made, strict=True))


def _emphasis(x: mx.array) -> mx.array:
    """How much more the squared errors of large weights count, as in ggml's quantisers: the least sum of plain squares
    makes them smaller on average, which adds up in products. In q2_k it loses 15 % more (docs/quality.md)."""
    squares = x * x
    mean = squares.mean((1, 2), keepdims=True)
    return mx.sqrt(1 + _ratio(squares, mean, mx.zeros_like(x)))


@dataclass(frozen=True)
class _Fit:
    """Factors d and m [blocks, 1, 1], integers S and M [blocks, groups, 1], all float32, and the squared errors
    [blocks, groups, 1]."""

    d: mx.array
    m: mx.array
    S: mx.array
    M: mx.array
    error: mx.array

    @property
    def line(self) -> tuple[mx.array, mx.array]:
        """The scales and minima of groups."""
        return self.d * self.S, self.m * self.M


@dataclass(frozen=True)
class _Blocks:
    """Values and weights [blocks, groups, group_size]."""

    quant: Quant
    x: mx.array
    w: mx.array

    @property
    def has_minima(self) -> bool:
        return self.quant.zero == 0

    @property
    def top(self) -> float:
        return float(2**self.quant.bits - 1)

    @property
    def integers(self) -> tuple[float, float]:
        """The least and the largest S."""
        return SCALES.get(self.quant.scale, (1.0, 1.0))

    def steps(self, scale: mx.array, minimum: mx.array) -> mx.array:
        """The nearest codes less the form's zero, for groups' scales and minima."""
        by = mx.where(scale == 0, 0, 1 / mx.where(scale == 0, 1, scale))
        zero = self.quant.zero
        return mx.clip(mx.round((self.x + minimum) * by), -zero, self.top - zero)

    def error(self, scale: mx.array, minimum: mx.array) -> mx.array:
        off = self.x - (scale * self.steps(scale, minimum) - minimum)
        return _sum(off * off * self.w)

    def improved(self, scale: mx.array, minimum: mx.array) -> tuple[mx.array, mx.array]:
        """The groups' scales and minima, not negative, of least squares for the codes that these give them."""
        p = self.steps(scale, minimum)
        wp = p * self.w
        p1, p2, px = _sum(wp), _sum(wp * p), _sum(wp * self.x)
        alone = _ratio(px, p2, scale)
        if not self.has_minima:
            return alone, minimum
        total, x1 = _sum(self.w), _sum(self.w * self.x)
        slope = _ratio(total * px - p1 * x1, total * p2 - p1 * p1, scale)
        least = _ratio(slope * p1 - x1, total, minimum)
        is_negative = least < 0
        return mx.where(is_negative, alone, slope), mx.where(is_negative, 0, least)

    def minimum_for(self, scale: mx.array, minimum: mx.array) -> mx.array:
        """The best minimum for the codes that these give, and the same scale."""
        if not self.has_minima:
            return minimum
        p = self.steps(scale, minimum)
        return mx.maximum(_ratio(_sum(self.w * (scale * p - self.x)), _sum(self.w), minimum), 0)


def _sum(terms: mx.array) -> mx.array:
    return terms.sum(-1, keepdims=True)


def _ratio(over: mx.array, under: mx.array, otherwise: mx.array) -> mx.array:
    is_usable = under > 0
    return mx.where(is_usable, over / mx.where(is_usable, under, 1), otherwise)


def _half(values: mx.array) -> mx.array:
    """Rounded to float16."""
    return mx.clip(values, -MOST_HALF, MOST_HALF).astype(mx.float16).astype(mx.float32)


def _lines(blocks: _Blocks) -> tuple[mx.array, mx.array]:
    """The best scale and minimum of each group by itself."""
    x, zero = blocks.x, blocks.quant.zero
    least = LEAST[blocks.quant.bits]
    if blocks.has_minima:
        low, high = mx.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
        middle, half = (low + high) * 0.5, (high - low) * 0.5
        shrinks = np.linspace(least, 1.02, STARTS)
        starts = [(half * (2 * s / blocks.top), mx.maximum(half * s - middle, 0)) for s in shrinks.tolist()]
    else:  # the value of the largest size gets code 0
        largest = mx.take_along_axis(x, mx.abs(x).argmax(-1, keepdims=True), axis=-1) / zero
        shrinks = np.linspace(least, 1.02 * zero / (zero - 1), STARTS)
        starts = [(largest * -s, mx.zeros_like(largest)) for s in shrinks.tolist()]
    best, error = starts[0], mx.full(starts[0][0].shape, mx.inf)
    for scale, minimum in starts:
        for _ in range(TURNS):
            scale, minimum = blocks.improved(scale, minimum)
        own = blocks.error(scale, minimum)
        is_better = own < error
        error = mx.where(is_better, own, error)
        best = mx.where(is_better, scale, best[0]), mx.where(is_better, minimum, best[1])
        mx.eval(best, error)
    return best


def _fitted(blocks: _Blocks) -> _Fit:
    """The fit that begins where the largest of the groups' own scales and minima have the largest integers."""
    scale, minimum = _lines(blocks)
    least, most = blocks.integers
    end = least if least < 0 else most  # the integer of the largest size
    largest = mx.take_along_axis(scale, mx.abs(scale).argmax(1, keepdims=True), axis=1)
    d, m = _half(largest / end), _half(minimum.max(1, keepdims=True) / most)
    fit = _with_error(blocks, d, m, _integers(scale, d, least, most), _integers(minimum, m, 0, most))
    for _ in range(LAST):
        fit = _better(_of_squares(blocks, fit), fit, whole=True)
        for step in NEIGHBOURS if most > 1 else ():
            S = mx.clip(fit.S + step, least, most)
            M = _integers(blocks.minimum_for(fit.d * S, fit.m * fit.M), fit.m, 0, most)
            fit = _better(_with_error(blocks, fit.d, fit.m, S, M), fit, whole=False)
        mx.eval(fit.d, fit.m, fit.S, fit.M, fit.error)
    return fit


def _integers(values: mx.array, unit: mx.array, least: float, most: float) -> mx.array:
    """The nearest multiples of `unit`."""
    return mx.clip(mx.round(_ratio(values * mx.sign(unit), mx.abs(unit), mx.zeros_like(values))), least, most)


def _of_squares(blocks: _Blocks, fit: _Fit) -> _Fit:
    """With d and m of least squares for the codes."""
    p = fit.S * blocks.steps(*fit.line)

    def total(terms: mx.array) -> mx.array:
        return terms.sum((1, 2), keepdims=True)

    pp, px = total(blocks.w * p * p), total(blocks.w * p * blocks.x)
    if not blocks.has_minima:
        return _with_error(blocks, _half(_ratio(px, pp, fit.d)), fit.m, fit.S, fit.M)
    pe, ee, ex = (total(blocks.w * fit.M * other) for other in (p, fit.M, blocks.x))  # x = d p - m M
    under = pp * ee - pe * pe
    d, m = _ratio(px * ee - ex * pe, under, fit.d), _ratio(px * pe - ex * pp, under, fit.m)
    return _with_error(blocks, _half(mx.maximum(d, 0)), _half(mx.maximum(m, 0)), fit.S, fit.M)


def _with_error(blocks: _Blocks, d: mx.array, m: mx.array, S: mx.array, M: mx.array) -> _Fit:
    return _Fit(d, m, S, M, blocks.error(d * S, m * M))


def _better(one: _Fit, other: _Fit, whole: bool) -> _Fit:
    """The fit with less error: of whole blocks, or of each group if only S and M differ."""
    errors = [fit.error.sum(1, keepdims=True) if whole else fit.error for fit in (one, other)]
    is_better = errors[0] < errors[1]
    d, m = (one.d, one.m) if not whole else (mx.where(is_better, one.d, other.d), mx.where(is_better, one.m, other.m))
    S, M, error = (mx.where(is_better, a, b) for a, b in ((one.S, other.S), (one.M, other.M), (one.error, other.error)))
    return _Fit(d, m, S, M, error)


def _parts(blocks: _Blocks, fit: _Fit) -> list[mx.array]:
    """The parts of the form, [blocks, values]."""
    codes = (blocks.steps(*fit.line) + blocks.quant.zero).astype(mx.uint8)
    words = packed(codes.reshape(len(codes), -1), blocks.quant.bits)
    d, m = (one[..., 0, 0].astype(mx.float16)[:, None] for one in (fit.d, fit.m))
    S, M = (one[..., 0] for one in (fit.S, fit.M))
    match blocks.quant.scale:
        case "q2_k":
            return [words, S.astype(mx.uint8) | M.astype(mx.uint8) << 4, mx.concatenate([d, m], axis=1)]
        case "q3_k":
            return [words, _sixes((S + 32).astype(mx.uint8)), d]
        case "q4_k":
            both = mx.concatenate([d, m], axis=1).view(mx.uint8)
            return [words, mx.concatenate([both, _pairs(S.astype(mx.uint8), M.astype(mx.uint8))], axis=1)]
        case "q6_k":
            return [words, S.astype(mx.int8).view(mx.uint8), d]
    return [words, d]


def _sixes(S: mx.array) -> mx.array:
    """16 scales of 6 bits as q3_k's 12 bytes (`ops/nested.py`)."""
    low = S[:, :8] & 15 | (S[:, 8:] & 15) << 4
    high = [(S[:, 4 * i : 4 * i + 4] >> 4) << 2 * i for i in range(4)]
    return mx.concatenate([low, high[0] | high[1] | high[2] | high[3]], axis=1)


def _pairs(S: mx.array, M: mx.array) -> mx.array:
    """8 scales and 8 minima of 6 bits as q4_k's 12 bytes (`ops/nested.py`)."""
    first, second = (one[:, :4] | (one[:, 4:] >> 4) << 6 for one in (S, M))
    return mx.concatenate([first, second, S[:, 4:] & 15 | (M[:, 4:] & 15) << 4], axis=1)
