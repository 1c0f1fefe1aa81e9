"""Products with a stored matrix, dense or quantised, for few rows or many, on a GPU or on the CPU.

The GPU kernels take up to `MAX_TOKENS` rows of x and sum in float32. Like the native kernels they read every form of
`forms`. Up to that number of rows each row has the bits that it has alone, in every implementation.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ..quant import FLOAT, Quant
from . import backend, native
from .backend import FLOATS, AnyArray, Array, kernels_take, view
from .elementwise import split
from .forms import MULTIPLE, Form, factors, is_read, matmul_float32, settings, unpacked, unpacked_float32
from .launch import LEAST_ELEMENTS, NO_KERNELS, Kernel, Launch, Reason, Shape, Template, ceildiv, count, require
from .matrix import Weights, dequantized, each_part, inputs_of, part_of_heads, parts_of, rows_of
from .norm import Norm
from .observe import observe
from .tiles import MAX_TOKENS, lanes_of, planned, split_of, tile_of

# Rows of x from which CUDA dequantises a matrix: the dense product is faster from 256 rows (results.tsv, "prompt"), and
# for fewer MLX would first compile its quantised product for half a minute. Metal's product is compiled beforehand.
DENSE_ROWS = MAX_TOKENS + 1
# Weights of a matrix: below the first, MLX's own product is as fast on an H200; the second fills a GPU by itself.
PAYS_FROM, LARGE = 4_000_000, 100_000_000
ROWS_AT_ONCE = 8  # rows of x (even) that a thread of the kernel for several rows has room for


def linear(x: Array, w: Weights, norm: Norm | None = None, residual: Array | None = None) -> Array:
    """norm(x) [..., I] @ W.T + residual [..., O]; for the rows of a step on a GPU in one launch, if `qmv` is faster."""
    observe(w, x, norm)
    if isinstance(x, np.ndarray):
        return _linear_native(x, w, norm, residual)
    y = _linear_kernel(x, w, norm, residual)
    if y is not None:
        return y
    x = x if norm is None else norm(x)
    y = _by_mlx(lambda rows: multiply(rows, w, transpose=True), x)
    return y if residual is None else residual + y


def _by_mlx(product: Callable[..., mx.array], x: mx.array) -> mx.array:
    """MLX's own `product` with x [..., I]: a lone row's and a prompt's as they are."""
    count = x.size // x.shape[-1]
    if not 1 < count <= MAX_TOKENS:
        return product(x)
    return row_by_row(product, x.reshape(count, -1)).reshape(*x.shape[:-1], -1)


def row_by_row(operation: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """`operation` on each row of the `arrays`, if they are as many as a step has, else on all at once.

    For MLX's own products, whose order of summation depends on the number of rows.
    """
    count = len(arrays[0])
    if not 1 < count <= MAX_TOKENS:
        return operation(*arrays)
    return mx.concatenate([operation(*(rows[t : t + 1] for rows in arrays)) for t in range(count)])


def grouped_linear(x: Array, w: Weights, groups: int) -> Array:
    """[..., groups * rows] of x [..., groups * columns]: each group's columns times the transpose of its own rows of w
    [groups * rows, columns]. On a GPU all groups are one product."""
    observe(w, x.reshape(-1, w.shape[1]))
    if isinstance(x, mx.array):
        return _by_mlx(lambda rows: _groups_at_once(rows, w, groups), x)
    rows, columns = w.shape[0] // groups, w.shape[1]
    columns_of = split(x, *range(columns, groups * columns, columns))
    made = [linear(part, rows_of(w, slice(i * rows, (i + 1) * rows))) for i, part in enumerate(columns_of)]
    return np.concatenate(made, axis=-1)


def _groups_at_once(x: mx.array, w: Weights, groups: int) -> mx.array:
    parts = x.reshape(-1, groups, w.shape[1]).swapaxes(0, 1)
    made = multiply(parts, part_of_heads(w, groups, slice(None)), transpose=True)
    return made.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def _linear_kernel(x: mx.array, w: Weights, norm: Norm | None, residual: mx.array | None) -> mx.array | None:
    """`linear` by the kernels for few rows; None if they cannot compute it or are not faster."""
    return qmv(x, w, norm, residual) if pays(x, w) else None


def pays(x: Array, w: Weights) -> bool:
    """Whether the kernels for few rows multiply x with the matrix."""
    count = x.size // x.shape[-1]
    return kernels_take(x, refusal, min(count, MAX_TOKENS + 1), w.shape, w.quant, PAYS_FROM)


def _linear_native(x: np.ndarray, w: Weights, norm: Norm | None, residual: np.ndarray | None) -> np.ndarray:
    """norm(x) @ W.T + residual on the CPU."""
    shape = (*x.shape[:-1], w.shape[0])
    if _is_native(w):
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        around: Any = {} if norm is None else {"norm": (norm.weight, norm.eps)}
        if residual is not None:
            around["residual"] = np.ascontiguousarray(residual).reshape(-1, shape[-1])
        return native.linear(rows, w.quant, *parts_of(w), **around).reshape(shape)
    y = (x if norm is None else norm(x)).reshape(-1, x.shape[-1]) @ _dense(w).T
    return y.reshape(shape) if residual is None else residual + y.reshape(shape)


def multiply(x: mx.array, w: Weights, transpose: bool) -> mx.array:
    """x @ W.T (`transpose`) or x @ W by MLX's own product; leading axes broadcast."""
    if w.quant is None or _pays_dense(x, w):
        weight = dequantized(w, x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)
    biases, has_factors, dtype = w.third if w.quant.has_biases else None, w.quant.has_global_scale, x.dtype
    of_rows = factors(w.third).swapaxes(-1, -2) if has_factors else None
    if of_rows is not None and not transpose:
        x = (x * of_rows).astype(dtype)
    y = mx.quantized_matmul(x, w.weight, w.second, biases, transpose=transpose, **settings(w.quant))
    return y if of_rows is None or not transpose else (y * of_rows).astype(dtype)


def dequantises() -> bool:
    """Whether a prompt's rows are multiplied by dequantised matrices."""
    return backend.name() == "cuda"


def _pays_dense(x: mx.array, w: Weights) -> bool:
    """Whether to dequantise a matrix first: where MLX does not take the form, for many rows, and where MLX 0.32.4's
    CUDA product does not write its output: for 1 bit, and if a row is a single group.
    """
    quant = cast(Quant, w.quant)
    few = x.shape[-2] < DENSE_ROWS and w.second.shape[-1] > 1 and quant.bits > 1
    return not quant.is_of_mlx or dequantises() and not few


def embed(ids: Array, w: Weights) -> Array:
    """Rows of W by id: [...] -> [..., I]."""
    if isinstance(ids, mx.array):
        rows = each_part(w, lambda part: part[ids])
        return rows[0] if w.quant is None else unpacked(w.quant, *rows)
    flat = ids.reshape(-1)
    parts = each_part(w, lambda part: view(part)[flat])
    if w.quant is None:
        out = parts[0]
    elif _is_native(w):
        out = native.dequantize(w.quant, *parts)
    else:
        out = view(unpacked_float32(w.quant, *map(mx.array, parts)))
    return out.reshape(*ids.shape, -1)


def by_head(w: Weights, heads: int, rows: slice) -> Iterator[np.ndarray]:
    """The `rows` of each head's matrix [..., columns] in turn, in float32; the memory is used again for the next."""
    if w.quant is None or not _is_native(w):
        dense = _dense(w)
        yield from dense.reshape(heads, -1, dense.shape[-1])[:, rows]
        return
    into: Any = {"out": np.empty((len(range(prod(w.shape[:-1]) // heads)[rows]), w.shape[-1]), np.float32)}
    for head in range(heads):
        yield native.dequantize(w.quant, *_of_head(w, heads, head, rows), **into)


def _of_head(w: Weights, heads: int, head: int, rows: slice) -> list[AnyArray]:
    """The parts of the `rows` of one head's matrix."""
    return each_part(w, lambda part: view(part).reshape(heads, -1, part.shape[-1])[head, rows])


def linear_by_head(x: np.ndarray, w: Weights, heads: int, rows: slice) -> np.ndarray | None:
    """x [T, heads, columns] of a few tokens times the transposed `rows` of each head's matrix: [T, heads, rows]; None:
    the native kernels do not read the matrix as it is stored, or there are more tokens. Activations are not rounded."""
    if w.quant is None or w.quant.has_global_scale or not _is_native(w) or len(x) > MAX_TOKENS:
        return None
    x = np.ascontiguousarray(x.swapaxes(0, 1))
    with native.activations(native.EXACT):
        made = [native.linear(x[head], w.quant, *_of_head(w, heads, head, rows)) for head in range(heads)]
    return np.stack(made, axis=1)


def _is_native(w: Weights) -> bool:
    return not native_refusal(w.quant, w.shape[-1])


@planned("linear")
def native_refusal(quant: Quant | None, columns: int) -> Reason | None:
    """Why the native kernels do not read a matrix of this form."""
    return None if quant is None or is_read(quant, columns) else _unread(quant, columns)


def _dense(w: Weights) -> np.ndarray:
    """A matrix in a form that the native kernels do not read, in float32."""
    return view(w.weight if w.quant is None else unpacked_float32(w.quant, *parts_of(w)))


# ---- the kernels for the rows of a step


class Around(NamedTuple):
    """What the kernels do besides the product, as far as their text depends on it."""

    norm: mx.Dtype | None = None  # dtype of the norm's weight
    adds: bool = False

    def template(self, x: mx.Dtype) -> Template:
        return {"W": self.norm or x, "NORM": int(self.norm is not None), "ADD": int(self.adds)}


PLAIN = Around()


def qmv(x: mx.array, w: Weights, norm: Norm | None = None, residual: mx.array | None = None) -> mx.array:
    """norm(x) times the transpose of a quantised matrix, plus `residual`.

    Args:
        x: [..., I] float32, bfloat16 or float16, 1 to 16 rows. Each starts at a multiple of 16 bytes, as in a whole
            array and in slices of its leading axes.
        w: in a form that `forms.is_read`.
        residual: [..., O] in x's dtype.

    Returns:
        [..., O] in x's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    assert w.quant is not None
    around = Around(None if norm is None else norm.weight.dtype, residual is not None)
    shapes = w.weight.shape, w.second.shape
    launch = plan(backend.name(), x.shape, x.dtype, *shapes, Form(w.quant, w.second.dtype), around)
    if isinstance(launch, Reason):
        x, quant = x if norm is None else norm(x), w.quant
        y = _by_mlx(lambda rows: matmul_float32(rows, quant, *parts_of(w)), x).astype(x.dtype)
        return y if residual is None else residual + y
    weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    rows = x.size // x.shape[-1]
    lengths = () if rows == 1 else (count(rows),)
    return launch(x, *inputs_of(w), weight, eps, x if residual is None else residual, *lengths)[0]


@planned("linear")
def refusal(target: str, tokens: int, shape: Shape, quant: Quant | None, least: int) -> Reason | None:
    """Why `qmv` does not multiply this number of rows with a matrix of this shape, or with one of fewer than `least`
    weights.
    """
    if quant is None or len(shape) > 2:
        return Reason("the matrix holds floats" if quant is None else f"the matrix has {len(shape)} axes")
    if not is_read(quant, shape[1]):
        return _unread(quant, shape[1])
    if tokens > MAX_TOKENS:
        return Reason(f"there are more than {MAX_TOKENS} rows")
    size = prod(shape)
    return Reason(f"{size:,} weights are fewer than {least:,}, from which it pays") if size < least else None


def _unread(quant: Quant, columns: int) -> Reason:
    return Reason(f"no kernel reads {quant} in rows of {columns} columns")


def check_activations(name: str, shape: Shape, dtype: mx.Dtype, axes: int = 2) -> None:
    """Raises RequestError: the kernels for few tokens do not take such an array."""
    require(dtype in FLOATS, f"{name} is {dtype}; the kernels take float32, bfloat16 or float16")
    good = len(shape) == axes and shape[-1] % MULTIPLE == 0 and shape[-1] > 0
    require(good, f"{name} is {shape}; expected {axes} axes, the last a multiple of {MULTIPLE}")
    require(1 <= shape[0] <= MAX_TOKENS, f"{name} has {shape[0]} tokens; the kernels take 1 to {MAX_TOKENS}")


@planned("linear", everywhere=True)
def plan(
    target: str, x: Shape, x_dtype: mx.Dtype, w: Shape, scales: Shape, form: Form, around: Around = PLAIN
) -> Launch | Reason:
    tokens, columns = prod(x[:-1]), x[-1]
    check_activations("x", (tokens, columns), x_dtype)
    rows, quant = w[0], form.quant
    require(is_read(quant, columns), f"w is stored in {quant}, which does not divide {columns} columns")
    codes, values = quant.words(columns), quant.of_part(quant.parts[1], columns, FLOAT)[0]
    good = w == (rows, codes) and scales == (rows, values)
    require(good, f"w is {w}, scales {scales}; expected [O, {codes}] and [O, {values}]")
    if target == "ops":
        return NO_KERNELS
    if rows * quant.fewest(columns) < LEAST_ELEMENTS:
        return Reason(f"{rows * quant.fewest(columns)} scales are fewer than {LEAST_ELEMENTS}")
    chunks = form.chunks(columns)
    tile = tile_of(target, "qmv_large" if rows * columns >= LARGE else "qmv")  # it decides the bits of every row
    lanes = lanes_of(chunks, tile.lanes)
    blocks = ceildiv(rows * lanes, tile.rows * 32)
    split = split_of(tile, blocks, chunks, lanes)
    template = {"X": x_dtype, "O": rows, "I": columns, "R": tile.rows, "L": lanes, **form.template}
    template |= {"SG": tile.simdgroups, "SPLIT": split}
    name, turns = "qmv", ceildiv(tokens, ROWS_AT_ONCE)
    template["AHEAD"] = form.ahead(tile.ahead) if tokens <= 3 else 1  # for more rows there are too few registers
    if tokens > 1:  # as many rows of the matrix as suit several rows of x
        name, template["R"] = "qmv_tokens", tile_of(target, "qmv_tokens").rows
        blocks = ceildiv(rows * lanes, template["R"] * 32)
        template["T"] = 3 if tokens == 3 else 2 * ceildiv(tokens, 2 * turns)  # above 3 a text for every two numbers
    grid = (ceildiv(blocks * split, tile.simdgroups), turns)
    inputs = "x w scales biases norm eps residual"
    kernel = Kernel(name, inputs if tokens == 1 else f"{inputs} count", "y", form.header_of(tile))
    outputs = [((*x[:-1], rows), x_dtype)]
    return Launch(target, kernel, template | around.template(x_dtype), grid, 32 * tile.simdgroups, outputs)
