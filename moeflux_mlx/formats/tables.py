"""Where the rows of n-gram tables lie on disk.

In a packed directory `tables*.safetensors` hold them, in as many tensors as the checkpoint had shards, uint8 [rows,
bytes of a row]: `model.layers.N.ple.table.S`, S from 0 on. A row is its codes, scales and biases one after another, so
that one read brings it, or its floats. In a checkpoint that is used as it lies these are rows of tensors of their own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ModelFileError
from ..files import read_any_json
from ..kinds import NGrams
from ..quant import Quant
from ..spec import ModelArgs
from .checkpoint import ITEM_BYTES, Tensor, merge_tensors, read_header

TOKEN_MAP = "engram_token_map.json"
PATTERN = "tables*.safetensors"
NAME = re.compile(r"model\.layers\.(\d+)\.ple\.table\.(\d+)")
STEM = "model.layers.{}.ple.ple_embedding.ngram_embedding"  # the module's path in checkpoints
WIDE, NARROW = "F32", "BF16"  # dtypes of floats in packed rows


@dataclass(frozen=True)
class RowForm:
    """How a row of `width` values is stored: as floats, or as `quant` says, with `floating` scales and biases."""

    width: int
    quant: Quant | None
    floating: str

    @cached_property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Values and dtype of each part of a row."""
        if self.quant is None:
            return ((self.width, self.floating),)
        return tuple(self.quant.of_part(part, self.width, self.floating) for part in self.quant.parts)

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        return tuple(values * ITEM_BYTES[dtype] for values, dtype in self.parts)

    @property
    def row_bytes(self) -> int:
        return sum(self.part_bytes)


class FileRows(NamedTuple):
    """The place of consecutive rows in a file, and the number of bytes of each."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TableFiles:
    """The rows of a layer's table: shards of it, each with its places, which give a row's bytes in order. The parts of
    a row have as many bytes in every shard.

    `starts`: the first row of each shard. `token_map`: int64, the number of each token that is hashed; None: itself.
    `values`: what makes float32 [n, width] of rows of bytes [n, bytes], if the form does not say it.
    """

    form: RowForm
    starts: Sequence[int]
    shards: Sequence[Sequence[FileRows]]
    rows: int
    token_map: np.ndarray | None = field(default=None, compare=False)
    values: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys(place.path for shard in self.shards for place in shard))

    @property
    def nbytes(self) -> int:
        return self.rows * self.form.row_bytes

    def places(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """For each part of the rows int64 [n], in the order of a row's bytes: the number in `paths` of the file that
        holds it and its offset there, both int64 [n], and the number of its bytes.
        """
        starts, parts = self._arrays
        shards = np.searchsorted(starts, rows, side="right") - 1
        inside = rows - starts[shards]
        return [(files[shards], offsets[shards] + inside * nbytes, nbytes) for files, offsets, nbytes in parts]

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, int]]]:
        """`starts`, and for each part of a row the files and offsets of all shards, as `places` has them of rows."""
        numbers, parts = {path: i for i, path in enumerate(self.paths)}, []
        for part in zip(*self.shards, strict=True):
            files, offsets = np.array([(numbers[place.path], place.offset) for place in part]).T
            parts.append((files, offsets, part[0].nbytes))
        return np.array(self.starts), parts


def open_tables(path: Path, args: ModelArgs) -> Mapping[int, TableFiles]:
    """The tables of a packed directory, by layer.

    Raises:
        ModelFileError: one is missing or misshapen.
    """
    if not args.ngrams:
        return {}
    tensors = merge_tensors(map(read_header, sorted(path.glob(PATTERN))))
    return {layer: _opened(path, args, layer, part, tensors) for layer, part in args.ngrams.items()}


def _opened(path: Path, args: ModelArgs, layer: int, part: NGrams, tensors: Mapping[str, Tensor]) -> TableFiles:
    named = ((NAME.fullmatch(name), tensor) for name, tensor in tensors.items())
    shards = [tensor for _, tensor in sorted((int(m[2]), t) for m, t in named if m and int(m[1]) == layer)]
    quant = args.quantization.of(STEM.format(layer)) if args.quantization else None
    forms = {form.row_bytes: form for form in (RowForm(part.width, quant, dtype) for dtype in (WIDE, NARROW))}
    widths = {tensor.shape[-1] if tensor.shape else 0 for tensor in shards}
    rows = sum(tensor.shape[0] for tensor in shards if tensor.shape)
    if rows != part.rows or len(widths) != 1 or not widths <= forms.keys():
        raise ModelFileError(
            f"{path}: the table of layer {layer} has {rows} rows of {sorted(widths)} bytes; the model needs "
            f"{part.rows} of {sorted(forms)}; convert the checkpoint again"
        )
    starts = [sum(tensor.shape[0] for tensor in shards[:i]) for i in range(len(shards))]
    places = [(FileRows(tensor.file, tensor.offset, tensor.shape[-1]),) for tensor in shards]
    return TableFiles(forms[widths.pop()], starts, places, rows, read_token_map(path, args, part))


def read_token_map(path: Path, args: ModelArgs, part: NGrams) -> np.ndarray | None:
    """The numbers int64 [vocab_size] of tokens, from the file of a checkpoint; None: tokens are hashed themselves.

    Raises:
        ModelFileError: the file is missing, or has other numbers than the configuration says.
    """
    if not part.compressed:
        return None
    numbers = read_any_json(path / TOKEN_MAP)
    is_list = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    if not is_list or len(numbers) < args.vocab_size or (min(numbers), max(numbers)) != (0, part.compressed - 1):
        raise ModelFileError(
            f"{path / TOKEN_MAP}: expected numbers from 0 to {part.compressed - 1} for {args.vocab_size} tokens"
        )
    return np.array(numbers, np.int64)
