"""Finds and checks the tables of n-grams in a checkpoint; they are packed row by row or used in place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..formats.checkpoint import Tensor
from ..formats.tables import NARROW, STEM, WIDE, FileRows, RowForm, TableFiles, read_token_map
from ..kinds import NGrams
from ..ops.forms import DTYPES
from ..quant import FLOAT, Quant
from ..spec import ModelArgs
from .gguf_tensors import GgufTensor, values_of_rows
from .lookup import find_matrix
from .matrix import Matrix, Rounding, finite
from .recipe import TABLES
from .resident import TensorFile, in_files
from .source_format import SourceFormat
from .sources import WrittenTensor
from .wanted import Wanted

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


def table_files(tables: list[Table]) -> list[TensorFile]:
    """The files that hold the rows of all tables."""
    return in_files([shard for table in tables for shard in table.shards], "tables", TableFile)
