"""Plans a conversion: finds and checks every file and its tensors before a byte is written. Opening a checkpoint in
place and planning a download use this too, so nothing in this module writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, ModelFileError
from ..families.registry import FAMILIES
from ..files import JsonDict, JsonObject
from ..formats.checkpoint import Checkpoint, Tensor
from ..formats.record import ExpertLayout, Record, set_path
from ..formats.tables import STEM
from ..quant import Quant, of_packed, parse, unquantized
from ..spec import ModelArgs
from .expert_parts import find_experts
from .layer_files import LayerFile, PackedLayerFile, StripedLayerFile, packed_layers, plan_experts
from .mlx_layout import MlxLayout, mlx_layout
from .recipe import Recipe
from .resident import ResidentFile, ResidentPlan, aside_files, override, plan_resident
from .sanitize import canonical_tensors
from .source_format import SourceFormat
from .sources import MatrixSource, Source, Unit
from .tables import Table, find_tables, table_files
from .wanted import Wanted


@dataclass(frozen=True)
class Fallback:
    """A matrix whose columns do not suit the form `named` by a recipe, and which is stored in `made`."""

    path: str
    columns: int
    named: Quant
    made: Quant


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What becomes of a checkpoint's tensors.

    Attributes:
        lossy: tensors that were already quantised and have to be quantised again.
        fallbacks: matrices whose columns do not suit the form that was asked for, and what they get.
        quantized: number of resident matrices that come as floats and are quantised.
        made_experts: whether routed experts are quantised, from floats or again.
        recipe: the forms that floats get; None: there are none.
        left_out: number of tensors of image encoders and draft heads that mlx-lm's layout has no place for.
    """

    lossy: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    quantized: int
    made_experts: bool
    recipe: Recipe | None
    left_out: int = 0


@dataclass(frozen=True)
class ConversionPlan:
    """The files to write, in order, and what goes into config.json. `rounds`: whether floats, or codes anew, are
    rounded. `index`: of mlx-lm's shards; None: the files are those of a packed model.
    """

    layout: ExpertLayout
    units: tuple[Unit, ...]
    quantization: JsonObject
    outcome: Outcome
    rounds: bool
    also: tuple[Path, ...] = ()
    tables: tuple[Table, ...] = ()
    index: bytes | None = None

    @property
    def total_bytes(self) -> int:
        return sum(unit.size for unit in self.units)

    @property
    def sources(self) -> list[Source]:
        """Those of the resident tensors."""
        return [source for unit in self.units if isinstance(unit, ResidentFile) for source in unit.sources]

    def stored(self, args: ModelArgs) -> ModelArgs:
        """The model with the forms of its tensors."""
        return replace(args, quantization=of_packed({"quantization": self.quantization}))


def read_args(checkpoint: Checkpoint) -> ModelArgs:
    """The model of a checkpoint."""
    return ModelArgs.from_file(checkpoint.folder, unquantized(checkpoint.config))


def make_plan(
    checkpoint: Checkpoint,
    args: ModelArgs,
    wanted: Wanted,
    also: Sequence[Path] = (),
    as_mlx: bool = False,
) -> ConversionPlan:
    """Finds and checks every tensor. `also`: directories among which experts are distributed. `as_mlx`: the files are
    to be mlx-lm's.

    Raises:
        ConfigError, ModelFileError: as `convert`.
    """
    form = SourceFormat(checkpoint.config, checkpoint.tensors, FAMILIES[args.model_type].renames_of(args.layers))
    tensors = canonical_tensors(checkpoint.tensors.values(), args)
    wanted.recipe.check(args.num_hidden_layers)
    used, layers, lossy, made = set[str](), list[LayerFile | PackedLayerFile](), list[str](), False
    fallbacks = list[Fallback]()
    if checkpoint.packed is not None:
        layout = ExpertLayout.from_args(args)
        layers += packed_layers(layout, checkpoint.packed, args)
    else:
        sets = {number: find_experts(args, tensors, number, form) for number in args.record_sets}
        stored = {i: plan_experts(one, wanted, wanted.recipe.of_experts(args, i)) for i, one in sets.items()}
        quants = {number: one.quants for number, one in stored.items()}
        layout = ExpertLayout.from_args(args, quants, {number: one.dtype for number, one in stored.items()})
        layers += [LayerFile(layout, number, experts, wanted.rounding) for number, experts in sets.items()]
        used = used.union(*(one.used for one in stored.values()))
        lossy += [name for one in stored.values() for name in one.lossy]
        made = any(one.is_made for one in stored.values())
        fallbacks += [
            one
            for layer, record in layout.records.items()
            for one in _expert_fallbacks(args, wanted.recipe, layer, record)
        ]
        wanted = wanted if made else wanted.beside_codes()
    resident = plan_resident(args, tensors, form, wanted)
    used = used.union(tensor.name for source in resident.sources for tensor in source.tensors)
    tables = find_tables(checkpoint.folder, args, tensors, form, wanted)
    used = used.union(*(table.used for table in tables))
    _check_all_used(tensors, used)
    fallbacks += [one for source in resident.sources for one in _resident_fallbacks(args, wanted.recipe, source)]
    rounds = made or resident.rounds or any(table.rounds for table in tables)
    outcome = Outcome(
        lossy=tuple(lossy),
        fallbacks=tuple(fallbacks),
        quantized=resident.quantized,
        made_experts=made,
        recipe=wanted.recipe if made or resident.quantized else None,
    )
    if as_mlx:
        mlx = _mlx_layout(args, resident, layers, checkpoint)
        outcome = replace(outcome, left_out=mlx.left_out)
        return ConversionPlan(layout, tuple(mlx.files), mlx.quantization, outcome, rounds, index=mlx.index())
    units: tuple[Unit, ...] = (
        *resident.files(),
        *(table_files(tables) if tables else ()),
        *aside_files(checkpoint.tensors.values(), args.num_hidden_layers),
        *_experts_files(layers, also),
    )
    stored_rows = {STEM.format(table.layer): override(table.shards[0].form.quant) for table in tables}
    quantization = resident.quantization() | stored_rows
    if not layout.is_uniform or also:  # layout.json of version 1 implies the form of experts
        quantization |= _of_experts(args, quantization, layout)
    return ConversionPlan(layout, units, quantization, outcome, rounds, tuple(also), tuple(tables))


def _expert_fallbacks(args: ModelArgs, recipe: Recipe, layer: int, record: Record) -> Iterator[Fallback]:
    forms = zip(recipe.named_of_experts(args, layer), recipe.of_experts(args, layer), strict=True)
    for one, (named, fitted) in zip(record.projections, forms, strict=True):
        if named != fitted == one.quant:
            yield Fallback(set_path(args, layer, one.name), one.columns, named, fitted)


def _resident_fallbacks(args: ModelArgs, recipe: Recipe, source: Source) -> Iterator[Fallback]:
    if isinstance(source, MatrixSource) and source.made is not None:
        path = source.pieces[0][0]
        named = recipe.of_matrix(args, path)
        if named is not None and named != source.made:
            yield Fallback(path, source.matrix.shape[-1], named, source.made)


def _mlx_layout(
    args: ModelArgs, resident: ResidentPlan, layers: Sequence[LayerFile | PackedLayerFile], checkpoint: Checkpoint
) -> MlxLayout:
    """Raises ConfigError: mlx-lm has no such model, or its experts are packed."""
    fresh = [layer for layer in layers if isinstance(layer, LayerFile)]
    if len(fresh) < len(layers):
        raise ConfigError("--layout mlx cannot unpack experts; give the checkpoint that they were made from")
    return mlx_layout(args, resident, fresh, checkpoint.tensors.values())


def _experts_files(layers: Sequence[LayerFile | PackedLayerFile], also: Sequence[Path]) -> Sequence[Unit]:
    if not also:
        return layers
    folders = (None, *also)
    return [StripedLayerFile(layer, i, len(folders), one) for layer in layers for i, one in enumerate(folders)]


def _of_experts(args: ModelArgs, quantization: JsonObject, layout: ExpertLayout) -> JsonDict:
    """The entries of the experts' matrices in config.json beside `quantization`."""
    usual = parse("the model", quantization)
    return {
        set_path(args, number, projection.name): override(projection.quant)
        for number, record in layout.records.items()
        for projection in record.projections
        if projection.quant != usual
    }


def _check_all_used(tensors: Mapping[str, Tensor], used: set[str]) -> None:
    left = sorted(tensor.name for tensor in tensors.values() if tensor.name not in used)
    if left:
        others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise ModelFileError(f"tensor {left[0]}{others} does not belong to this model; is config.json the right one?")
