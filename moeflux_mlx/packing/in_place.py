"""Opens a checkpoint as a model without converting it: finds and checks what a conversion would write, and the places
to read it from.

Resident tensors are those of the packed model, bit by bit; experts are pieces of the checkpoint's files. Only weights
that MLX has quantised can be used in place; others need a conversion.

In GGUF files each matrix of an expert is one range of a file, of blocks. They are read to the place of the matrix's
fields in the record, where they always fit, and are then replaced by codes, scales and biases. So a record in memory
has the bytes of a converted one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import NotPackedError
from ..formats.checkpoint import Checkpoint, Tensor
from ..formats.packed import InPlaceExperts, Spread
from ..formats.record import ExpertLayout, Field, Projection, Record
from ..quant import GLOBAL_SCALE, GRID
from ..spec import ModelArgs
from .expert_parts import ExpertPart, SingleExperts
from .gguf_forms import grids, rearrange
from .gguf_tensors import GgufMatrix
from .layer_files import LayerFile
from .located import Located, open_source, packing_command
from .matrix import Matrix, Wanted
from .plan import ConversionPlan, make_plan


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


@dataclass(frozen=True)
class InPlace:
    """A checkpoint opened as a model.

    Attributes:
        files: all of the checkpoint.
        plan: what a conversion would write.
    """

    args: ModelArgs
    experts: InPlaceExperts
    files: tuple[Path, ...]
    plan: ConversionPlan


def plan_in_place(
    checkpoint: Checkpoint, args: ModelArgs, without_correction_bias: bool
) -> tuple[ModelArgs, ConversionPlan]:
    """The model as it is stored, and what a conversion of the checkpoint would write."""
    plan = make_plan(checkpoint, args, Wanted(keeps_floats=True, without_correction_bias=without_correction_bias))
    return plan.stored(args), plan


def open_in_place(located: Located, without_correction_bias: bool = False) -> InPlace:
    """Reads all headers, and no tensor.

    Args:
        without_correction_bias: as for `Wanted`.

    Raises:
        ConfigError, ModelFileError: the checkpoint is damaged.
    NotPackedError: it cannot be used in place; the message has the command.
    """
    checkpoint = open_source(located)
    args, plan = plan_in_place(checkpoint, located.args, without_correction_bias)
    return InPlace(args, _experts(checkpoint, plan, bool(located.gguf)), checkpoint.files, plan)


def _experts(checkpoint: Checkpoint, plan: ConversionPlan, is_gguf: bool) -> InPlaceExperts:
    files = [unit for unit in plan.units if isinstance(unit, LayerFile)]
    if is_gguf:
        ranges = {file.layer: ranges_of(file, plan.layout.count(file.layer)) for file in files}
        return GgufExperts(plan.layout, ranges, {path: path.stat().st_size for path in checkpoint.files})
    fields = {file.layer: _spreads(file, plan.layout.count(file.layer)) for file in files}
    used = {path for spreads in fields.values() for spread in spreads for path in spread.paths}
    sizes = {path: path.stat().st_size for path in checkpoint.files if path in used}
    return InPlaceExperts(replace(plan.layout, records=dict(map(_record, files))), fields, sizes)


def _record(file: LayerFile) -> tuple[int, Record]:
    """A layer and the geometry of its records, as made from the files."""
    alternate = any(part.step > 1 for part in file.experts.parts(0))
    return file.layer, file.geometry.in_turns() if alternate else file.geometry


def _spreads(file: LayerFile, count: int) -> tuple[Spread, ...]:
    """The place of each field of the layer's records. In stacks experts are evenly spaced."""
    one_by_one = isinstance(file.experts, SingleExperts)
    known = [_tensors(file, expert) for expert in range(count if one_by_one else min(count, 2))]
    spreads = []
    for field, *tensors in zip(file.geometry.fields, *known, strict=True):
        assert all(tensor.nbytes == field.size for tensor in tensors), field.name
        spreads.append(_spread(tensors, field.size, field) if one_by_one else _stacked(field, tensors, count))
    return tuple(spreads)


def _stacked(field: Field, tensors: Sequence[Tensor], count: int) -> Spread:
    first, step = tensors[0], tensors[-1].offset - tensors[0].offset or 1
    offsets = range(first.offset, first.offset + count * step, step)
    return Spread((first.file,) * count, offsets, field.size, field.offset)


def _tensors(file: LayerFile, expert: int) -> list[Tensor]:
    """The tensors that the expert's record is made of, as they lie.

    Raises:
        NotPackedError: they are floats, or codes of another kind.
        ModelFileError: a factor beside them is not 1.
    """
    tensors: list[Tensor] = []
    for one, projection in zip(file.experts.parts(expert), file.geometry.projections, strict=True):
        one.check()
        part, matrix = one.in_place, one.matrix
        wanted = [field.dtype for field in projection.fields]
        stored = part.by_field if type(matrix) is Matrix and matrix.quant == projection.quant else {}
        if [stored[field.part].dtype for field in projection.fields if field.part in stored] != wanted:
            weight, dtypes = matrix.weight, [tensor.dtype for tensor in part.tensors]
            raise NotPackedError(
                f"{weight.file}: tensor {weight.name} has {matrix.quant or 'floats'}, {', '.join(dtypes)}; "
                f"to be used in place it needs {projection.quant}, {', '.join(wanted)}; "
                f"run: {packing_command(weight.file.parent)}"
            )
        bias = None if part.bias is None else part.bias.rows(part.start, part.stop)
        stored = replace(part, matrix=matrix.rows(part.start, part.stop), bias=bias).by_field
        tensors += [stored[field.part] for field in projection.fields]
    return tensors
