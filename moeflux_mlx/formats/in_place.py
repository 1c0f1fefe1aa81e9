"""Experts in place in a checkpoint's safetensors files: an expert is pieces of several tensors, at any offset. This
module knows which bytes of which file belong to which field of a record, and finds scales and biases that are NaN or
infinite: a single one would silently spoil every answer. Finding tensors in a checkpoint is the task of `packing`,
reading them that of the source of experts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ModelFileError
from ..quant import GRID, MODES, NAN
from .packed import PackedExperts
from .pieces import FilePiece
from .record import ExpertLayout, Field, Record

# Of a dtype, or of a kind of scale: the type of a value's bits, and those that are all set in NaN and infinity.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    **{scale: ("<u1", bits) for scale, bits in NAN.items()},
}


def not_finite(record: Record, rows: np.ndarray) -> tuple[int, Field] | None:
    """The first row and field of `rows`, uint8 [n, at least the record's size], that hold NaN or infinity, if any."""
    for projection in record.projections:
        for field in (one for one in projection.fields[1:] if one.part != GRID):
            is_nested = projection.quant.is_nested and field.dtype == "U8"
            small = "F16" if is_nested else projection.quant.scale
            kind, exponent = EXPONENTS[small if field.dtype == "U8" else field.dtype]
            bits = rows[:, field.offset : field.end].view(kind)
            if is_nested:
                mode = MODES[projection.quant.mode]
                bits = bits.reshape(len(rows), -1, mode.nested // 2)[..., : mode.header].reshape(len(rows), -1)
            spoilt = (bits & exponent == exponent).any(axis=1)
            if spoilt.any():
                return int(spoilt.argmax()), field
    return None


class Spread(NamedTuple):
    """One field of the records of a layer's experts: by expert its file and where in it its `length` bytes begin."""

    paths: Sequence[Path]
    offsets: Sequence[int]
    length: int
    place: int

    def piece(self, expert: int) -> FilePiece:
        return FilePiece(self.paths[expert], self.offsets[expert], self.length, self.place)


class InPlaceExperts:
    """Args:
    layout: of the records that are made in memory.
    fields: by layer, all fields of its records.
    sizes: bytes of each file, as its header was checked against them.
    """

    def __init__(self, layout: ExpertLayout, fields: Mapping[int, Sequence[Spread]], sizes: Mapping[Path, int]):
        self.layout, self.sizes = layout, sizes
        self._fields = fields

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The pieces of the expert's record, one for each of its fields."""
        return tuple([spread.piece(expert) for spread in self._fields[layer]])

    def check_scales(self, layer: int, first: int, rows: np.ndarray) -> None:
        """Checks the records [experts, words] from expert `first` on, because no conversion has checked them.

        Raises:
            ModelFileError: a scale or bias is NaN or infinite.
        """
        self._check(layer, first, rows.view(np.uint8))

    def check_record(self, layer: int, expert: int, memory: memoryview) -> None:
        """The same for the record of one expert, in `memory`."""
        self._check(layer, expert, np.frombuffer(memory, np.uint8)[None])

    def _check(self, layer: int, first: int, rows: np.ndarray) -> None:
        fault = not_finite(self.layout.records[layer], rows)
        if fault is not None:
            expert, field = first + fault[0], fault[1]
            before = (piece for piece in self.pieces(layer, expert) if piece.place <= field.offset)
            path = max(before, key=lambda piece: piece.place).path
            raise ModelFileError(
                f"{path}: {field.name} of {self.layout.named((layer, expert))} holds NaN or infinite values; "
                "download it again"
            )


ExpertFiles = PackedExperts | InPlaceExperts  # the files that hold one model's experts
