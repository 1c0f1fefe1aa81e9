"""Experts in place in GGUF files: each matrix of an expert is one range of a file, of blocks that become ours when they
have been read.

The blocks of a matrix are read to the place of its fields in the record, where they always fit, and are then replaced
by codes, scales and biases. So a record in memory has the bytes of a converted one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import NotPackedError
from ..formats.checkpoint import Tensor
from ..formats.in_place import InPlaceExperts, Spread
from ..formats.record import ExpertLayout, Field, Projection
from ..quant import GLOBAL_SCALE, GRID
from .expert_parts import ExpertPart
from .gguf_forms import grids, rearrange
from .gguf_tensors import GgufMatrix
from .layer_files import LayerFile
from .located import packing_command


class Ranges(NamedTuple):
    """The blocks of one matrix of every expert of a layer: their type, and where they are; where the biases of products
    are, which are stored as they are kept; and the global scale of each expert, if the form has one."""

    projection: Projection
    type: str
    spread: Spread
    bias: Spread | None = None
    factors: np.ndarray | None = None


class GgufExperts(InPlaceExperts):
    """Args:
    layout: of the records that are made in memory.
    ranges: by layer, of gate, up and down.
    sizes: bytes of each file.
    """

    def __init__(self, layout: ExpertLayout, ranges: Mapping[int, Sequence[Ranges]], sizes: Mapping[Path, int]):
        fields = {
            layer: [part for one in some for part in (one.spread, one.bias) if part] for layer, some in ranges.items()
        }
        super().__init__(layout, fields, sizes)
        self._ranges = ranges

    def arrange(self, layer: int, expert: int, memory: memoryview) -> None:
        """Brings the record in `memory`, which has just been read, from blocks to our form."""
        record = np.frombuffer(memory, np.uint8)
        for projection, kind, spread, _, factors in self._ranges[layer]:
            fields = {field.part: field for field in projection.codes}
            others = [(GRID, one) for one in grids(kind)]
            if factors is not None:
                others.append((GLOBAL_SCALE, factors[expert]))
            for part, values in others:
                field = fields.pop(part)
                record[field.offset : field.end] = values.reshape(-1).view(np.uint8)
            rearrange(kind, record, [field.offset for field in fields.values()], spread.place, spread.length)

    def arrange_all(self, layer: int, first: int, rows: np.ndarray) -> None:
        """The same for the records [experts, words] from expert `first` on."""
        for i, row in enumerate(rows):
            self.arrange(layer, first + i, row.view(np.uint8).data)


def ranges_of(file: LayerFile, count: int) -> tuple[Ranges, ...]:
    """Where the matrices of a layer's `count` experts are.

    Raises:
        NotPackedError: they are floats, or biases of products have another dtype than scales.
    """
    experts = [file.experts.parts(expert) for expert in range(count)]
    return tuple(map(_ranges, file.geometry.projections, zip(*experts, strict=True)))


def _ranges(projection: Projection, parts: Sequence[ExpertPart]) -> Ranges:
    matrix, bias = parts[0].matrix, projection.bias
    biases = [part.bias.rows(part.start, part.stop) for part in parts if part.bias is not None]
    is_stored = bias is None or all(type(one) is Tensor and one.dtype == bias.dtype for one in biases)
    if not isinstance(matrix, GgufMatrix) or matrix.quant != projection.quant or not is_stored:
        raise NotPackedError(
            f"{matrix.weight.file}: tensor {matrix.weight.name} cannot be used in place; "
            f"run: {packing_command(matrix.weight.file)}"
        )
    blocks = [part.matrix.rows(part.start, part.stop).weight for part in parts]
    spread = _spread(blocks, projection.rows * matrix.row_bytes, projection.fields[0])
    factors = [one for part in parts for one in part.matrix.factor()] if matrix.quant.has_global_scale else None
    return Ranges(
        projection,
        matrix.type,
        spread,
        _spread(biases, bias.size, bias) if bias else None,
        None if factors is None else np.array(mx.concatenate(factors)),
    )


def _spread(tensors: Sequence[Tensor], length: int, field: Field) -> Spread:
    return Spread(tuple(one.file for one in tensors), tuple(one.offset for one in tensors), length, field.offset)
