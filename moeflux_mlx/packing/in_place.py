"""Opens a checkpoint as a model without converting it: finds and checks what a conversion would write, and the places
to read it from.

Resident tensors are those of the packed model, bit by bit; experts are pieces of the checkpoint's files. Only weights
that MLX has quantised can be used in place; others need a conversion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ..errors import NotPackedError
from ..files import JsonObject, read_json
from ..formats.checkpoint import Checkpoint, Tensor, safetensors_files
from ..formats.in_place import InPlaceExperts, Spread
from ..formats.record import Field, Record
from ..formats.tables import TableFiles
from ..quant import of_packed, unquantized
from ..spec import ModelArgs
from .expert_parts import SingleExperts
from .gguf_experts import GgufExperts, ranges_of
from .gguf_folder import described_files, open_source
from .layer_files import LayerFile
from .matrix import Matrix
from .plan import ConversionPlan, make_plan, read_args
from .resident import ResidentFile
from .source_format import MXFP4, MXFP8, SourceFormat
from .sources import DTYPES, Source
from .suggest import packing_command
from .unit import Unit
from .wanted import Wanted

AS_PUBLISHED = (MXFP4, MXFP8)  # forms with MLX's bytes in files of any tool


@dataclass(frozen=True)
class InPlace:
    """A checkpoint opened as a model."""

    path: Path
    args: ModelArgs
    experts: InPlaceExperts
    files: tuple[Path, ...]
    units: tuple[Unit, ...]  # the files that a conversion would write
    tables: Mapping[int, TableFiles]  # files of n-grams, by layer

    @property
    def _sources(self) -> list[Source]:
        files = (unit for unit in self.units if isinstance(unit, ResidentFile))
        return [source for file in files for source in file.sources]

    def shapes(self) -> dict[str, mx.array]:
        """The resident tensors by name, as from `read`, for callers that need only shapes and dtypes."""
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        written = (one for source in self._sources for one in source.written)
        return {one.name: mx.zeros(one.shape, dtypes[one.dtype]) for one in written}  # lazy

    def read(self) -> dict[str, mx.array]:
        """The resident tensors by name.

        Raises:
            ModelFileError: a file cannot be read, or a value is not finite.
        """
        tensors: dict[str, mx.array] = {}
        for source in self._sources:
            tensors.update(zip((one.name for one in source.written), source.arrays(), strict=True))
        return tensors


def runs_in_place(path: Path, shards_in: Sequence[Path] = ()) -> bool:
    """Whether `path` looks like a checkpoint that MLX quantised, or describes a GGUF.

    Args:
        shards_in: other directories of its safetensors files.

    Raises:
        ModelFileError: config.json cannot be read. ConfigError: it is of a model that does not run.
    """
    if described_files(path):
        return True
    if any(path.glob("resident*.safetensors")) or not safetensors_files(path, shards_in):  # half a packed model
        return False
    return states_mlx(read_json(path / "config.json"))


def states_mlx(config: JsonObject) -> bool:
    """Whether config.json says that everything is quantised by MLX, or in MLX's mxfp4 or mxfp8.

    Raises:
        ConfigError: it is of a model that does not run.
    """
    ModelArgs.from_dict(unquantized(config))
    form = SourceFormat(config)
    return form.mlx or form.stated is not None and form.stated.default in AS_PUBLISHED


def open_in_place(path: Path, shards_in: Sequence[Path] = (), without_correction_bias: bool = False) -> InPlace:
    """Reads all headers, and no tensor.

    Args:
        shards_in: as for `open_checkpoint`.
        without_correction_bias: as for `Wanted`.

    Raises:
        ConfigError, ModelFileError: the checkpoint is damaged.
    NotPackedError: it cannot be used in place; the message has the command.
    """
    checkpoint = open_source(path, shards_in)
    args = read_args(checkpoint)
    wanted = Wanted(keeps_floats=True, without_correction_bias=without_correction_bias)
    plan = make_plan(checkpoint, args, wanted)
    args = replace(args, quantization=of_packed({"quantization": plan.quantization}))
    tables = {table.layer: table.in_place() for table in plan.tables}
    return InPlace(path, args, _experts(checkpoint, plan), checkpoint.files, plan.units, tables)


def _experts(checkpoint: Checkpoint, plan: ConversionPlan) -> InPlaceExperts:
    files = [unit for unit in plan.units if isinstance(unit, LayerFile)]
    if described_files(checkpoint.folder):
        ranges = {file.layer: ranges_of(file, plan.layout.num_experts) for file in files}
        return GgufExperts(plan.layout, ranges, {path: path.stat().st_size for path in checkpoint.files})
    fields = {file.layer: _spreads(file, plan.layout.num_experts) for file in files}
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
    """
    tensors: list[Tensor] = []
    geometry = file.geometry
    for one, projection in zip(file.experts.parts(expert), geometry.projections, strict=True):
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
