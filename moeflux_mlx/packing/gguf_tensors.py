"""Tensors of a GGUF as tensors of a checkpoint: of any type as float32, of types with a form of ours also as its parts.

A value is the one that `gguf.dequantize` gives, brought to the model's form (`families/gguf.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..families.gguf import Change
from ..formats.checkpoint import FLOATS, ITEM_BYTES, Tensor, read_bytes
from ..formats.gguf_file import Blocks
from ..ops.forms import float_scales
from ..quant import E4M3
from .gguf_forms import FORMS, grids, repacked
from .matrix import CHUNK_VALUES, Matrix, finite, shaped, typed
from .small_floats import ScaledMatrix

READ = ", ".join((*FORMS, *FLOATS))  # types that experts may have


@dataclass(frozen=True)
class GgufTensor(Tensor):
    """A tensor of blocks, or one that llama.cpp has changed; `read` gives its values, and so it is float32.

    Args:
        stored: as the file has it.
        change: what undoes llama.cpp's change; None: nothing.
        part: rows [start, stop) of the leading axis, if it is read whole and cut then; None: all.
    """

    stored: Blocks | None = None
    change: Change | None = None
    part: tuple[int, int] | None = None

    @property
    def blocks(self) -> Blocks:
        assert self.stored is not None
        return self.stored

    def rows(self, start: int, stop: int) -> "GgufTensor":
        shape = (stop - start, *self.shape[1:])
        if self.change is not None or len(self.shape) == 1:
            first = self.part[0] if self.part else 0
            return replace(self, shape=shape, part=(first + start, first + stop))
        step = math.prod(self.shape[1:-1]) * self.blocks.row_bytes
        stored = replace(self.blocks, offset=self.blocks.offset + start * step, shape=shape)
        return replace(self, offset=stored.offset, shape=shape, stored=stored)

    def __getitem__(self, index: int) -> "GgufTensor":
        assert self.change is None, "no stack of matrices is changed"
        row = self.rows(index, index + 1)
        return replace(row, shape=row.shape[1:], stored=replace(row.blocks, shape=row.shape[1:]))

    def read(self) -> mx.array:
        """The values, float32."""
        values = dequantized(self.blocks)
        change = self.change or Change()
        if change.rows is not None:
            values = values[change.rows]
        if change.columns is not None:
            values = values[..., change.columns]
        if change.values is not None:
            values = change.values(values)
        values = values.reshape(change.shape or values.shape)
        return mx.array(np.ascontiguousarray(values if self.part is None else values[slice(*self.part)]))

    def codes(self) -> tuple[mx.array, ...]:
        """The parts of the form that `FORMS` has; only rows may have been moved."""
        arrays = repacked(self.blocks.type, raw_rows(self.blocks))
        if self.change is not None and self.change.rows is not None:
            arrays = tuple(part[self.change.rows] for part in arrays)
        if self.part is not None:
            arrays = tuple(part[slice(*self.part)] for part in arrays)
        return tuple(map(mx.array, arrays))

    @property
    def keeps_form(self) -> bool:
        """Whether the tensor has a form of ours, with its values unchanged."""
        change = self.change or Change()
        is_moved = change.columns is not None or change.values is not None or change.shape is not None
        return self.blocks.type in FORMS and not is_moved


@dataclass(frozen=True)
class JoinedTensor(Tensor):
    """The rows of several tensors, one after another, as float32. `cut`: of these, rows [start, stop); None: all."""

    parts: tuple[Tensor, ...] = ()
    cut: tuple[int, int] | None = None

    def rows(self, start: int, stop: int) -> "JoinedTensor":
        first = self.cut[0] if self.cut else 0
        return replace(self, shape=(stop - start, *self.shape[1:]), cut=(first + start, first + stop))

    def read(self) -> mx.array:
        """The values, float32."""
        whole = mx.concatenate([part.read().astype(mx.float32) for part in self.parts])
        return whole if self.cut is None else whole[slice(*self.cut)]


def joined(name: str, parts: Sequence[Tensor]) -> JoinedTensor:
    """The tensor of the rows of `parts`.

    Raises:
        ModelFileError: their rows differ in length.
    """
    first = parts[0]
    if any(len(one.shape) != 2 or one.shape[1] != first.shape[-1] for one in parts):
        raise ModelFileError(f"{first.file}: tensors {', '.join(one.name for one in parts)} are not rows of one matrix")
    shape = (sum(one.shape[0] for one in parts), first.shape[1])
    return JoinedTensor(name, first.file, first.offset, "F32", shape, parts=tuple(parts))


def raw_rows(blocks: Blocks) -> np.ndarray:
    """The bytes of all rows, uint8 [..., bytes of a row]."""
    data = np.frombuffer(read_bytes(blocks.file, blocks.offset, blocks.nbytes), np.uint8)
    return data.reshape(*blocks.shape[:-1], blocks.row_bytes)


def values_of_rows(kind: str, rows: np.ndarray) -> np.ndarray:
    """The values of `gguf.dequantize`, float32, of rows of bytes uint8 [..., bytes].

    Raises:
        NotImplementedError: the package has no formula for the type.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: np.ndarray = dequantize(rows, GGMLQuantizationType[kind])
    return values


def dequantized(blocks: Blocks) -> np.ndarray:
    """The values of `gguf.dequantize`, float32.

    Raises:
        ModelFileError: the package has no formula for the type.
    """
    columns = blocks.shape[-1]
    values = np.empty((math.prod(blocks.shape) // columns, columns), np.float32)
    step = max(1, CHUNK_VALUES // columns)
    try:
        for first in range(0, len(values), step):
            part = values[first : first + step]
            rows = replace(blocks, offset=blocks.offset + first * blocks.row_bytes, shape=part.shape)
            part[:] = values_of_rows(blocks.type, raw_rows(rows))
    except NotImplementedError:
        raise ModelFileError(
            f"{blocks.file}: tensor {blocks.name} has type {blocks.type}, which the package gguf cannot read"
        ) from None
    return values.reshape(blocks.shape)


def as_tensor(blocks: Blocks, name: str, change: Change | None = None) -> Tensor:
    """The tensor under its name in a checkpoint."""
    if change is None and blocks.type in ITEM_BYTES:
        return Tensor(name, blocks.file, blocks.offset, blocks.type, blocks.shape)
    shape = blocks.shape if change is None or change.shape is None else change.shape
    return GgufTensor(name, blocks.file, blocks.offset, "F32", shape, None, blocks, change)


def has_blocks(tensor: Tensor) -> bool:
    """Whether the tensor is stored in blocks that a GGUF's writer has quantised."""
    return isinstance(tensor, GgufTensor) and tensor.blocks.block[0] > 1


@dataclass(frozen=True)
class GgufMatrix(ScaledMatrix):
    """Blocks of a type of `FORMS`, as the parts of our form, and for NVFP4 what multiplies its scales."""

    @property
    def _weight(self) -> GgufTensor:
        assert isinstance(self.weight, GgufTensor)
        return self.weight

    @property
    def type(self) -> str:
        """Of the blocks."""
        return self._weight.blocks.type

    @property
    def row_bytes(self) -> int:
        """Bytes of the blocks of a row."""
        return self._weight.blocks.row_bytes

    @property
    def dtypes(self) -> tuple[str, ...]:
        assert self.quant is not None
        return tuple(self.quant.of_part(part, 0, "")[1] for part in self.quant.parts)

    def codes(self) -> tuple[mx.array, ...]:
        words, *others = self._weight.codes()
        quant = FORMS[self.type].quant
        for part in float_scales(quant, *others):
            finite(self.weight, part, quant.scale)
        factor = () if self.global_scale is None else self.factor()
        return words, *others, *factor, *map(mx.array, grids(self.type))


def find_blocks(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Matrix | None:
    """The matrix of a tensor that has blocks of a type of `FORMS`; None: it has not.

    Raises:
        ModelFileError: it has another shape than the model needs.
    """
    weight = tensors.get(name)
    if not isinstance(weight, GgufTensor) or not weight.keeps_form:
        return None
    shaped(weight, shape)
    quant = FORMS[weight.blocks.type].quant
    factor = tensors.get(f"{name.removesuffix('.weight')}.scale") if quant.scale == E4M3 else None
    if factor is None:
        return GgufMatrix(shape, weight, quant=quant)
    shaped(typed(factor, ("F32",)), shape[:-2] or (1,))
    return GgufMatrix(shape, weight, quant=replace(quant, has_global_scale=True), global_scale=factor)


def check_experts_type(matrix: Matrix) -> Matrix:
    """`matrix`, of experts, whose type must be one that is read without a loss.

    Raises:
        ModelFileError: it has a type that has no form of ours yet.
    """
    weight = matrix.weight
    if isinstance(weight, GgufTensor) and has_blocks(weight) and matrix.quant is None:
        raise ModelFileError(
            f"{weight.file}: tensor {weight.blocks.name} has type {weight.blocks.type}, in which experts are not read "
            f"yet; read are {READ}"
        )
    return matrix
