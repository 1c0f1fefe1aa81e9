"""Opens a checkpoint as a model without converting it: finds and checks what a conversion would write, and the places
to read it from.

Resident tensors are those of the packed model, bit by bit; experts are pieces of the checkpoint's files. Only weights
that MLX has quantised can be used in place; others need a conversion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import NotPackedError
from ..formats.checkpoint import Checkpoint, Tensor
from ..formats.in_place import InPlaceExperts, Spread
from ..formats.record import Field, Record
from ..spec import ModelArgs
from .expert_parts import SingleExperts
from .gguf_experts import GgufExperts, ranges_of
from .layer_files import LayerFile
from .located import Located, open_source, packing_command
from .matrix import Matrix
from .plan import ConversionPlan, make_plan
from .wanted import Wanted


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
        spreads.append(_single(field, tensors) if one_by_one else _stacked(field, tensors, count))
    return tuple(spreads)


def _single(field: Field, tensors: Sequence[Tensor]) -> Spread:
    return Spread(tuple(t.file for t in tensors), tuple(t.offset for t in tensors), field.size, field.offset)


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
    geometry = file.geometry
    for one, projection in zip(file.experts.parts(expert), geometry.projections, strict=True):
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
