"""Experts in place in GGUF files: each matrix of an expert is one range of a file, of blocks that become ours when they
have been read.

The blocks of a matrix are read to the place of its fields in the record, where they always fit, and are then replaced
by codes, scales and biases. So a record in memory has the bytes of a converted one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import NotPackedError
from ..formats.in_place import InPlaceExperts, Spread
from ..formats.record import ExpertLayout, Projection
from .gguf_forms import repacked
from .gguf_tensors import GgufMatrix, GgufTensor
from .layer_files import LayerFile
from .suggest import packing_command


class Ranges(NamedTuple):
    """The blocks of one matrix of every expert of a layer: their type, bytes of a row, and where they are."""

    projection: Projection
    type: str
    row_bytes: int
    spread: Spread


class GgufExperts(InPlaceExperts):
    """Args:
    layout: of the records that are made in memory.
    ranges: by layer, of gate, up and down.
    sizes: bytes of each file.
    """

    def __init__(self, layout: ExpertLayout, ranges: Mapping[int, Sequence[Ranges]], sizes: Mapping[Path, int]):
        super().__init__(layout, {layer: [one.spread for one in some] for layer, some in ranges.items()}, sizes)
        self._ranges = ranges

    def arrange(self, layer: int, expert: int, memory: memoryview) -> None:
        """Brings the record in `memory`, which has just been read, from blocks to our form."""
        record = np.frombuffer(memory, np.uint8)
        for projection, kind, row_bytes, spread in self._ranges[layer]:
            start = projection.fields[0].offset
            blocks = record[start : start + spread.length].reshape(-1, row_bytes)
            for field, part in zip(projection.fields, repacked(kind, blocks), strict=True):
                record[field.offset : field.end] = part.reshape(-1).view(np.uint8)

    def arrange_all(self, layer: int, first: int, rows: np.ndarray) -> None:
        """The same for the records [experts, words] from expert `first` on."""
        for i, row in enumerate(rows):
            self.arrange(layer, first + i, row.view(np.uint8).data)


def ranges_of(file: LayerFile, count: int) -> tuple[Ranges, ...]:
    """Where the matrices of a layer's `count` experts are.

    Raises:
        NotPackedError: they are floats, or have scales of several dtypes.
    """
    geometry, ranges = file.geometry, list[Ranges]()
    experts = [file.experts.parts(expert) for expert in range(count)]
    for projection, *parts in zip(geometry.projections, *experts, strict=True):
        matrix, bias = parts[0].matrix, projection.bias
        if not isinstance(matrix, GgufMatrix) or matrix.quant != projection.quant or bias is not None:
            raise NotPackedError(
                f"{matrix.weight.file}: tensor {matrix.weight.name} cannot be used in place; "
                f"run: {packing_command(matrix.weight.file)}"
            )
        raw = [part.matrix.rows(part.start, part.stop).weight for part in parts]
        blocks = [one.blocks for one in raw if isinstance(one, GgufTensor)]
        spread = Spread(
            tuple(one.file for one in blocks),
            tuple(one.offset for one in blocks),
            blocks[0].nbytes,
            projection.fields[0].offset,
        )
        ranges.append(Ranges(projection, matrix.type, blocks[0].row_bytes, spread))
    return tuple(ranges)
