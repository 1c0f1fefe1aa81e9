"""A stored matrix, dense or quantised: its arrays, views of some of its rows, and its values. It does not multiply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..quant import GRID, TABLE, Quant
from .backend import AnyArray
from .forms import StoredForm, code_number, scale_type, third_type, unpacked, unpacked_float32
from .launch import ArrayPiece, Input


class Weights(Protocol):
    """A stored matrix [..., rows, cols]: `weight` holds values, or with `quant` codes, beside the other `quant.parts`:
    `second`, and `third`, which is ignored if the form has only two.
    """

    @property
    def quant(self) -> Quant | None: ...

    @property
    def weight(self) -> mx.array: ...

    @property
    def second(self) -> AnyArray: ...

    @property
    def third(self) -> AnyArray: ...

    @property
    def pieces(self) -> list[ArrayPiece] | None:
        """The pieces of the same arrays in a single one, if they are joined."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, however the matrix is stored."""


@dataclass(frozen=True)
class Part:
    """`Weights` that are a part of another matrix."""

    quant: Quant | None
    weight: mx.array
    second: mx.array | None = None
    third: mx.array | None = None
    pieces: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        columns = self.weight.shape[-1]
        return (*self.weight.shape[:-1], columns if self.quant is None else columns * 32 // self.quant.bits)


def parts_of(w: Weights) -> list[AnyArray]:
    """The arrays of the matrix: its values, or those of its form."""
    if w.quant is None:
        return [w.weight]
    return [w.weight, w.second, w.third][: len(w.quant.parts)]


def each_part(w: Weights, of_rows: Callable[[AnyArray], AnyArray]) -> list[AnyArray]:
    """`of_rows` of each array of the matrix; a grid, which is not a row's, stays."""
    names = ("weight",) if w.quant is None else w.quant.parts
    return [part if name == GRID else of_rows(part) for name, part in zip(names, parts_of(w), strict=True)]


def inputs_of(w: Weights) -> list[Input]:
    """A kernel's inputs: none may be missing, so the second part stands for a third that the form lacks."""
    parts: list[Input] = [*(parts_of(w) if w.pieces is None else w.pieces)]
    return [*parts, parts[-1]] if len(parts) == 2 else parts


def stored(w: Weights) -> tuple[list[AnyArray], StoredForm]:
    """A matrix for metal/stored.h.metal: codes, scales and biases, or values instead of all three; and its form. With a
    global scale or codes of a table, which that text does not read, it is dequantised.
    """
    if w.quant is not None and (w.quant.has_global_scale or w.quant.codes == TABLE):
        w = Part(None, dequantized(w, mx.float32))
    if w.quant is None:
        return [w.weight] * 3, (0, 1, 0, w.weight.dtype, w.weight.dtype)
    scale = scale_type(w.quant, w.second.dtype)
    return inputs_of(w), (w.quant.bits, w.quant.group_size, code_number(w.quant), scale, third_type(w.quant, scale))


def dequantized(w: Weights, dtype: mx.Dtype) -> mx.array:
    """The matrix in floats for activations in `dtype`: float32 is not rounded to the scales' dtype on the way."""
    if w.quant is None:
        return w.weight
    if w.quant.has_global_scale or not w.quant.is_of_mlx:
        return unpacked_float32(w.quant, *parts_of(w)).astype(dtype)
    return (unpacked_float32 if dtype == mx.float32 else unpacked)(w.quant, *parts_of(w))


def part_of_heads(w: Weights, heads: int, rows: slice, some: slice = slice(None)) -> Part:
    """The `rows` of the matrices of `some` heads, [heads, rows, columns], as views."""
    return Part(w.quant, *each_part(w, lambda part: part.reshape(heads, -1, part.shape[-1])[some, rows]))


def rows_of(w: Weights, rows: slice) -> Part:
    """Some rows of a matrix, as views."""
    return Part(w.quant, *each_part(w, lambda part: part[rows]))
