"""Products with a stored matrix: dense or quantised, a few rows or many, on a GPU or on the CPU.

The GPU kernels take up to 8 rows of x and 4-bit codes in groups of 64 columns (weight = scale * code + bias, eight
codes to a uint32, low nibble first), and sum in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..quant import Quant
from . import backend, native
from .backend import FLOATS, Array, view
from .launch import LEAST_ELEMENTS, Kernel, Launch, Shape, ceildiv, require
from .tiles import FORM, MAX_TOKENS, TILES, Tile, lanes_of, split_of

ONE = Kernel("qmv4", "x w scales biases", "y")
SEVERAL = Kernel("qmv4_tokens", "x w scales biases", "y")
GROUP = FORM.group_size
# Rows of x from which CUDA's dense product beats its quantised one, though the matrix is taken apart first
# (results.tsv, "prompt"). Metal: not measured, MLX's quantised product is left alone.
DENSE_ROWS = 256
# Weights of a matrix: below the first, MLX's own product is as fast on an H200; the second fills a GPU by itself.
PAYS_FROM, LARGE = 4_000_000, 100_000_000


class Weights(Protocol):
    """A stored matrix [..., rows, cols]: `weight` holds values, or with `quant` codes, beside `scales` and `biases`."""

    @property
    def quant(self) -> Quant | None: ...

    @property
    def weight(self) -> Any: ...

    @property
    def scales(self) -> Any: ...

    @property
    def biases(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, however the matrix is stored."""
        ...


@dataclass(frozen=True)
class Part:
    """`Weights` that are a part of another matrix."""

    quant: Quant | None
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        columns = self.weight.shape[-1]
        return (*self.weight.shape[:-1], columns if self.quant is None else columns * 32 // self.quant.bits)


def linear(x: Array, w: Weights) -> Array:
    """x [..., I] @ W.T -> [..., O]."""
    if isinstance(x, np.ndarray):
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        out = native.linear(rows, *_parts(w)) if _is_native(w) else rows @ _dense(w).T
        return out.reshape(*x.shape[:-1], -1)
    count = x.size // x.shape[-1]
    if w.quant == FORM and qmv4_pays(count, *w.shape):
        y = qmv4(x.reshape(count, -1), w.weight, w.scales, w.biases)
        return y.reshape(*x.shape[:-1], -1)
    return multiply(x, w, transpose=True)


def multiply(x: mx.array, w: Weights, transpose: bool) -> mx.array:
    """x @ W.T (`transpose`) or x @ W by MLX's own product; leading axes broadcast."""
    if w.quant is None or _pays_dense(x, w):
        weight = dequantized(w)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)
    return mx.quantized_matmul(x, w.weight, w.scales, w.biases, transpose, w.quant.group_size, w.quant.bits)


def _pays_dense(x: mx.array, w: Weights) -> bool:
    """Whether a quantised matrix is taken apart first: for many rows, and where a row is a single group, because MLX
    0.32.4's CUDA product leaves its output unwritten there."""
    return backend.name() == "cuda" and (x.shape[-2] >= DENSE_ROWS or w.scales.shape[-1] == 1)


def embed(ids: Array, w: Weights) -> Array:
    """Rows of W by id: [...] -> [..., I]."""
    if isinstance(ids, mx.array):
        if w.quant is None:
            return w.weight[ids]
        return mx.dequantize(w.weight[ids], w.scales[ids], w.biases[ids], w.quant.group_size, w.quant.bits)
    flat = ids.reshape(-1)
    if _is_native(w):
        rows = [view(part)[flat] for part in _parts(w)]
        out = rows[0] if w.quant is None else native.dequantize(*rows)
    else:
        out = _dense(w)[flat]
    return out.reshape(*ids.shape, -1)


def dequantized(w: Weights) -> mx.array:
    """The matrix in floats."""
    if w.quant is None:
        return w.weight
    return mx.dequantize(w.weight, w.scales, w.biases, w.quant.group_size, w.quant.bits)


def by_head(w: Weights, heads: int, rows: slice) -> Iterator[np.ndarray]:
    """The `rows` of each head's matrix [..., columns] in turn, in float32; the memory is used again for the next."""
    if w.quant is None or not _is_native(w):
        dense = _dense(w)
        yield from dense.reshape(heads, -1, dense.shape[-1])[:, rows]
        return
    parts = [view(part) for part in _parts(w)]
    codes, scales, biases = (part.reshape(heads, -1, part.shape[-1])[:, rows] for part in parts)
    out = np.empty((codes.shape[1], GROUP * scales.shape[2]), np.float32)
    for head in range(heads):
        yield native.dequantize(codes[head], scales[head], biases[head], out)


def part_of_heads(w: Weights, heads: int, rows: slice) -> Part:
    """The `rows` of each head's matrix, [heads, rows, columns], as views."""
    return Part(w.quant, *(part.reshape(heads, -1, part.shape[-1])[:, rows] for part in _parts(w)))


def _is_native(w: Weights) -> bool:
    """Whether the native kernels read the form."""
    return w.quant is None or (w.quant.bits in (4, 8) and w.quant.group_size == GROUP)


def _dense(w: Weights) -> np.ndarray:
    """A matrix in a form that the native kernels do not read, in float32 whatever its scales are."""
    if w.quant is None:
        return view(w.weight)
    scales, biases = w.scales.astype(mx.float32), w.biases.astype(mx.float32)
    return view(mx.dequantize(w.weight, scales, biases, w.quant.group_size, w.quant.bits))


def _parts(w: Weights) -> list[Any]:
    """The arrays that hold it."""
    return [w.weight] if w.quant is None else [w.weight, w.scales, w.biases]


# ---- the kernel for 4-bit matrices


def qmv4(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """x times the transpose of a 4-bit matrix.

    Args:
        x: [T, I] float32, bfloat16 or float16, T from 1 to 8. Each row starts at a multiple of 16 bytes, as in a
            whole array and in slices of its leading axes.
        w: [O, I / 8] uint32 codes.
        scales, biases: [O, I / 64], both of one floating dtype.

    Returns:
        [T, O] in x's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    launch = _plan(backend.name(), x.shape, x.dtype, w.shape, scales.shape, scales.dtype)
    return launch(x, w, scales, biases)[0] if launch else _qmv4_ops(x, w, scales, biases)


def qmv4_pays(tokens: int, rows: int, columns: int) -> bool:
    """Whether `qmv4` runs as a kernel here and beats `mx.quantized_matmul` for a [rows, columns] matrix."""
    return backend.has_kernels() and tokens <= MAX_TOKENS and rows * columns >= PAYS_FROM


def check_activations(name: str, shape: Shape, dtype: mx.Dtype, rank: int = 2) -> None:
    """Raises RequestError: the kernels for few tokens do not take such an array."""
    require(dtype in FLOATS, f"{name} is {dtype}; the kernels take float32, bfloat16 or float16")
    good = len(shape) == rank and shape[-1] % GROUP == 0 and shape[-1] > 0
    require(good, f"{name} is {shape}; expected {rank} axes, the last a multiple of {GROUP}")
    require(1 <= shape[0] <= MAX_TOKENS, f"{name} has {shape[0]} tokens; the kernels take 1 to {MAX_TOKENS}")


def _choose(target: str, tokens: int, rows: int, columns: int) -> tuple[Kernel, Tile]:
    """The kernel and tile for a [rows, columns] matrix."""
    tiles = TILES[target]
    if tokens > 1:
        return SEVERAL, tiles["qmv4_tokens"]
    return ONE, tiles["qmv4_large" if rows * columns >= LARGE else "qmv4"]


@cache
def _plan(target: str, x: Shape, x_dtype: mx.Dtype, w: Shape, scales: Shape, scales_dtype: mx.Dtype) -> Launch | None:
    check_activations("x", x, x_dtype)
    tokens, columns = x
    rows = w[0]
    codes, groups = FORM.words(columns), FORM.groups(columns)
    good = w == (rows, codes) and scales == (rows, groups)
    require(good, f"w is {w}, scales {scales}; expected [O, {codes}] and [O, {groups}]")
    if target == "ops" or rows * groups < LEAST_ELEMENTS:
        return None
    kernel, tile = _choose(target, tokens, rows, columns)
    lanes = lanes_of(columns, tile.lanes)
    blocks = ceildiv(rows * lanes, tile.rows * 32)
    split = split_of(tile, blocks, columns, lanes)
    template = {"X": x_dtype, "S": scales_dtype, "O": rows, "I": columns, "R": tile.rows, "L": lanes}
    template |= {"SG": tile.simdgroups, "SPLIT": split}
    template |= {"T": tokens} if tokens > 1 else {"AHEAD": tile.ahead}
    grid = (ceildiv(blocks * split, tile.simdgroups), 1)
    return Launch(target, kernel, template, grid, 32 * tile.simdgroups, [((tokens, rows), x_dtype)])


def _qmv4_ops(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    return matmul_float32(x, FORM, w, scales, biases).astype(x.dtype)


def matmul_float32(x: mx.array, quant: Quant, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """x @ W.T in float32: MLX's CPU build sums bfloat16 in bfloat16, at an eighth of the speed."""
    x, scales, biases = (a.astype(mx.float32) for a in (x, scales, biases))
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=quant.group_size, bits=quant.bits)
