"""Plans a conversion: finds and checks every file, its tensors and the tables of n-grams, which are packed row by row,
before a byte is written. Opening a checkpoint in place and planning a download use this too, so nothing in this module
writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, ModelFileError
from ..families.registry import FAMILIES
from ..files import JsonDict, JsonObject
from ..formats.checkpoint import Checkpoint, Tensor
from ..formats.record import ExpertLayout, Record, set_path
from ..formats.tables import NARROW, STEM, WIDE, FileRows, RowForm, TableFiles, read_token_map
from ..kinds import NGrams
from ..ops.forms import DTYPES
from ..quant import FLOAT, Quant, of_packed, parse, unquantized
from ..spec import ModelArgs
from .expert_parts import find_experts, find_matrix
from .gguf_tensors import GgufTensor, values_of_rows
from .layer_files import LayerFile, PackedLayerFile, StripedLayerFile, packed_layers, plan_experts
from .matrix import Matrix, Rounding, Wanted, finite
from .mlx_layout import MlxLayout, mlx_layout
from .recipe import TABLES, Recipe
from .resident import ResidentFile, ResidentPlan, TensorFile, aside_files, in_files, override, plan_resident
from .sanitize import canonical_tensors
from .source_format import SourceFormat
from .sources import MatrixSource, Source, Unit, WrittenTensor

HASHES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
SMALL_GROUP = 32  # for rows that are not a multiple of the usual group


@dataclass(frozen=True)
class TableShard:
    """Rows of a table that a checkpoint has in one matrix; they are packed rounded to the form `made`, or as stored."""

    name: str
    matrix: Matrix
    made: Quant | None
    rounding: Rounding

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.tensors

    @property
    def form(self) -> RowForm:
        """The form of a packed row."""
        if self.made is not None:
            return RowForm(self.matrix.shape[1], self.made, NARROW)
        dtypes = self.matrix.dtypes[1:] if self.matrix.quant else (self.matrix.weight.dtype,)
        is_narrow = self.matrix.inverse is not None or dtypes[0] == NARROW
        return RowForm(self.matrix.shape[1], self.matrix.quant, NARROW if is_narrow else WIDE)

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.name, "U8", (self.matrix.shape[0], self.form.row_bytes)),)

    def arrays(self) -> Iterator[mx.array]:
        """Rows of bytes."""
        if self.made is not None:
            parts = self.rounding.codes(self.name, self.matrix, self.made)
        elif self.matrix.quant is not None:
            parts = self.matrix.codes()
        else:
            parts = (finite(self.matrix.weight, self.matrix.values()),)
        kinds = zip(parts, self.form.parts, strict=True)
        rows = [mx.contiguous(part.astype(DTYPES[dtype])).view(mx.uint8) for part, (_, dtype) in kinds]
        yield mx.concatenate(rows, axis=1)


@dataclass(frozen=True)
class Table:
    """A layer's, of its shards in order; `hashes` are tensors that say what the configuration implies. `token_map` as
    in `TableFiles`.
    """

    layer: int
    shards: tuple[TableShard, ...]
    hashes: tuple[Tensor, ...]
    token_map: np.ndarray | None = field(default=None, compare=False)

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded."""
        return any(shard.made for shard in self.shards)

    @property
    def used(self) -> set[str]:
        """Names of the checkpoint's tensors."""
        return {tensor.name for tensor in (*self.hashes, *(one for shard in self.shards for one in shard.tensors))}

    def in_place(self) -> TableFiles:
        """The places of the rows in the checkpoint.

        Raises:
            ModelFileError: they are stored in a form that is packed first.
        """
        first = self.shards[0].matrix
        if isinstance(first.weight, GgufTensor):
            return self._of_blocks(first.weight)
        if any(one.matrix.inverse or one.matrix.dtypes != first.dtypes or one.made for one in self.shards):
            name = f"{first.weight.file}: tensor {first.weight.name}"
            raise ModelFileError(f"{name} and the other shards are stored in several forms: convert the checkpoint")
        dtype = first.dtypes[1] if first.quant and first.quant.scale == FLOAT else first.weight.dtype
        form = RowForm(first.shape[1], first.quant, NARROW if dtype == "U32" else dtype)
        lengths = [shard.matrix.shape[0] for shard in self.shards]
        starts = [0, *accumulate(lengths)][:-1]
        places = [_places(shard.matrix, form) for shard in self.shards]
        return TableFiles(form, starts, places, sum(lengths), self.token_map)

    def _of_blocks(self, tensor: GgufTensor) -> TableFiles:
        """As `in_place`, of a GGUF, which has a table in one tensor."""
        blocks = tensor.blocks
        rows = ((FileRows(blocks.file, blocks.offset, blocks.row_bytes),),)
        values = partial(values_of_rows, blocks.type)
        form = RowForm(blocks.row_bytes, None, "U8")
        return TableFiles(form, (0,), rows, tensor.shape[0], self.token_map, values)


def _places(matrix: Matrix, form: RowForm) -> tuple[FileRows, ...]:
    tensors = zip(matrix.tensors, form.part_bytes, strict=True)
    return tuple(FileRows(tensor.file, tensor.offset, nbytes) for tensor, nbytes in tensors)


class TableFile(TensorFile):
    """One that a model reads rows from."""


def find_tables(
    folder: Path, args: ModelArgs, tensors: Mapping[str, Tensor], form: SourceFormat, wanted: Wanted
) -> list[Table]:
    """The tables of the checkpoint in `folder`.

    Raises:
        ModelFileError: a shard or the map of tokens is missing or misshapen, or the hashes are others than the
            configuration's.
    """
    return [
        replace(_find(layer, part, tensors, form, wanted), token_map=read_token_map(folder, args, part))
        for layer, part in args.ngrams.items()
    ]


def _find(layer: int, part: NGrams, tensors: Mapping[str, Tensor], form: SourceFormat, wanted: Wanted) -> Table:
    stem = STEM.format(layer)
    factor = tensors.get(f"{stem}.weight_scale")  # the scale of all shards, if they are fp8
    paths = (f"{stem}.shards.{i}" for i in count())
    shards = []
    for i, path in enumerate(paths):
        if f"{path}.weight" not in tensors:
            break
        known = tensors if factor is None else {**_below(tensors, path), f"{path}.weight_scale": factor}
        matrix = find_matrix(known, path, (tensors[f"{path}.weight"].shape[0], part.width), form)
        shards.append(TableShard(f"model.layers.{layer}.ple.table.{i}", matrix, _made(matrix, wanted), wanted.rounding))
    rows = sum(shard.matrix.shape[0] for shard in shards)
    if rows != part.rows:
        raise ModelFileError(f"tensors {stem}.shards have {rows} rows in all; the model needs {part.rows}")
    return Table(layer, tuple(shards), tuple(_hashes(layer, part, tensors)))


def _below(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    names = (f"{path}.{end}" for end in ("weight", "scales", "biases"))
    return {name: tensors[name] for name in names if name in tensors}


def _made(matrix: Matrix, wanted: Wanted) -> Quant | None:
    """The form in which rows that come as floats are packed; None: as they are."""
    quant, width = wanted.recipe.form(TABLES), matrix.shape[1]
    if quant is None or matrix.quant is not None or wanted.keeps_floats:
        return None
    if width % quant.group_size and quant.mode == "affine":
        quant = replace(quant, group_size=SMALL_GROUP)
    quant = quant.fitted(width)
    return None if width % quant.multiple else quant


def _hashes(layer: int, part: NGrams, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The hashes in the checkpoint, which must agree with the configuration."""
    offsets = [0, *accumulate(part.sizes)][:-1]
    for name, values in zip(HASHES, (part.multipliers, part.sizes, offsets), strict=True):
        tensor = tensors.get(f"model.layers.{layer}.ple.ple_embedding.{name}")
        if tensor is None:
            continue
        is_here = tensor.file.exists()  # else it is yet to be downloaded
        if tensor.dtype != "I64" or is_here and tensor.read().tolist() != list(values):
            raise ModelFileError(f"{tensor.file}: tensor {tensor.name} is not what config.json implies")
        yield tensor


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
        *(in_files([shard for table in tables for shard in table.shards], "tables", TableFile) if tables else ()),
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
