"""The sources of resident tensors: what is read from a checkpoint for each, and what is written.

A source is described by shapes alone; `arrays` reads and converts its tensors.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..formats.checkpoint import ITEM_BYTES, Tensor
from ..ops.forms import DTYPES
from ..quant import GLOBAL_SCALE, GRID, Quant
from ..rounding.methods import FIT
from .ggml import tables
from .matrix import Matrix, Rounding, finite

MatrixPieces = tuple[tuple[str, np.ndarray | None], ...]


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Bytes = bytes | bytearray | memoryview


class Unit(Protocol):
    """One file to write: `name` relative to the directory, `size` in bytes, and its bytes in order.

    `link` is an existing file with the same bytes, which may be linked to instead of written.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def link(self) -> Path | None: ...

    def chunks(self) -> Iterator[Bytes]: ...


class Source(Protocol):
    """Tensors that are made together; `arrays` yields them in the order of `written`."""

    @property
    def written(self) -> tuple[WrittenTensor, ...]: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def arrays(self) -> Iterator[mx.array]: ...


def shapes_of(sources: Iterable[Source]) -> dict[str, mx.array]:
    """The tensors of sources by name, as lazy zeros: for callers that need only shapes and dtypes."""
    return {one.name: mx.zeros(one.shape, DTYPES[one.dtype]) for source in sources for one in source.written}


def read_all(sources: Iterable[Source]) -> dict[str, mx.array]:
    """The tensors of sources by name. Raises ModelFileError: a file cannot be read, or a value is not finite."""
    return {one.name: array for source in sources for one, array in zip(source.written, source.arrays(), strict=True)}


@dataclass(frozen=True)
class PlainSource:
    """A tensor that is never quantised: norm, convolution, decay rate, router bias; `rows` are its own if it is stored
    with others. `temperature`: it is stored as what the sigmoid of a quotient with this number makes; None: as it is.
    `keeps_dtype`: it has the checkpoint's dtype; else what is computed of it is F32.
    """

    name: str
    tensor: Tensor
    centred: bool = False
    convolution: bool = False
    rows: np.ndarray | None = None
    temperature: float | None = None
    keeps_dtype: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        shape = self.tensor.shape
        if self.rows is not None:
            shape = (len(self.rows), *shape[1:])
        if self.convolution:
            shape = (shape[0], shape[2], shape[1])
        widens = (self.centred or self.temperature is not None) and not self.keeps_dtype
        return (WrittenTensor(self.name, "F32" if widens else self.tensor.dtype, shape),)

    def arrays(self) -> Iterator[mx.array]:
        values = finite(self.tensor, self.tensor.read())
        if self.rows is not None:
            values = values[mx.array(self.rows)]
        if self.centred:
            values = values.astype(mx.float32) + 1.0  # next to 1, bfloat16 would round away most of a small weight
        if self.temperature is not None:
            values = mx.sigmoid(values.astype(mx.float32) / self.temperature)
        if self.convolution:
            values = mx.contiguous(values.swapaxes(1, 2))  # [channels, 1, taps] -> [channels, taps, 1]
        yield values.astype(DTYPES[self.written[0].dtype])


@dataclass(frozen=True)
class ZeroSource:
    """Zeros in place of a tensor that the checkpoint lacks."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...] = ()

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.name, "F32", self.shape),)

    def arrays(self) -> Iterator[mx.array]:
        yield mx.zeros(self.shape)


@dataclass(frozen=True)
class TableSource:
    """A table of ids, in any integer dtype."""

    name: str
    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.name, "U32", self.tensor.shape),)

    def arrays(self) -> Iterator[mx.array]:
        yield self.tensor.read().astype(mx.uint32)


@dataclass(frozen=True)
class MatrixSource:
    """A matrix, kept as stored (`made` None, `dense` empty), rounded to `made` by `rounding`, or kept in floats
    `dense`.

    `pieces` are the module paths that it is split into, each with its rows; one path without rows is all. `one_scale`:
    its global scale, if it has one, is a single number, not one for each row.
    """

    matrix: Matrix
    pieces: MatrixPieces
    made: Quant | None = None
    rounding: Rounding = Rounding(FIT)
    dense: str = ""
    one_scale: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.tensors

    @property
    def quant(self) -> Quant | None:
        """The form of the output; None: floats."""
        return None if self.dense else self.made or self.matrix.quant

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return tuple(
            WrittenTensor(
                f"{path}.{suffix}", dtype, shape if rows is None or suffix == GRID else (len(rows), *shape[1:])
            )
            for path, rows in self.pieces
            for suffix, dtype, shape in self._parts()
        )

    def _parts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        *lead, cols = self.matrix.shape
        if self.quant is None:
            return [("weight", self.dense, self.matrix.shape)]
        floating = "BF16" if self.made else self.matrix.dtypes[1]
        each = ((part, *self.quant.shape_of(part, lead, cols, floating)) for part in self.quant.parts)
        return [(part, dtype, () if self.one_scale and part == GLOBAL_SCALE else shape) for part, shape, dtype in each]

    def arrays(self) -> Iterator[mx.array]:
        parts = dict(zip((name for name, *_ in self._parts()), self._make(), strict=True))
        for _, rows in self.pieces:
            for name, part in parts.items():
                yield part if rows is None or name == GRID else part[mx.array(rows)]

    def _make(self) -> tuple[mx.array, ...]:
        if self.made:
            return *self.rounding.codes(self.pieces[0][0], self.matrix, self.made), *tables(self.made)
        if not self.dense:
            weight, scales, *third = self.matrix.codes()
            if self.matrix.quant is None or not self.matrix.quant.has_global_scale:
                return weight, scales, *third
            if self.one_scale:
                return weight, scales, third[0].reshape(-1)[:1]
            return weight, scales, *(mx.broadcast_to(part, (*self.matrix.shape[:-1], part.shape[-1])) for part in third)
        return (finite(self.matrix.weight, self.matrix.values().astype(DTYPES[self.dense])),)
