"""Safetensors files of a run: written beside their names, made durable, renamed, so that each is whole or not there."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError, RequestError
from ..files import replace_file, sync, sync_folder
from ..formats.checkpoint import Tensor
from ..packing.resident import TensorFile, array_bytes
from ..packing.sources import DTYPES, Written


@dataclass(frozen=True)
class Held:
    """A tensor to write, which is in memory."""

    name: str
    array: mx.array

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def written(self) -> tuple[Written, ...]:
        return (Written(self.name, DTYPES[self.array.dtype], tuple(self.array.shape)),)

    def arrays(self) -> Iterator[mx.array]:
        yield self.array


def write_tensors(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Writes tensors that are in memory, in the order of their names.

    Raises:
        RequestError: the system refuses.
    """
    file = TensorFile(path.name, tuple(Held(name, tensors[name]) for name in sorted(tensors)))
    _replace(path, (memoryview(chunk) for chunk in file.chunks()))


def write_rows(path: Path, form: Mapping[str, Written], rows: Iterable[mx.array]) -> None:
    """Writes tensors one after the other as `rows` yields them, so that they need not be in memory together.

    Args:
        form: the name, dtype and shape of each, in the order of `rows`.

    Raises:
        RequestError: the system refuses. Errors of `rows`.
    """
    header = TensorFile(path.name, tuple(_Promised(one) for one in form.values())).header

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        for array, one in zip(rows, form.values(), strict=True):
            assert array.nbytes == one.nbytes, one.name
            yield array_bytes(array)

    _replace(path, chunks())


@dataclass(frozen=True)
class _Promised:
    """A tensor of which only the form is known yet."""

    one: Written
    tensors: tuple[Tensor, ...] = ()

    @property
    def written(self) -> tuple[Written, ...]:
        return (self.one,)

    def arrays(self) -> Iterator[mx.array]:
        raise NotImplementedError


def _replace(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    try:
        replace_file(path, chunks)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from None


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a file, lazily. Raises ModelFileError: it cannot be read."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Raises RequestError: the system refuses."""
    _replace(path, [json.dumps(content, indent=2, sort_keys=True).encode()])


class SumsFile:
    """float32 tensors that are summed on the disk, because they may be larger than memory; zeros at first.

    Until `finish` the file has another name, and one that is left over from an interrupted run is begun anew.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]):
        self._path, self._beside = path, path.with_name(f".{path.name}.unfinished")
        forms = {name: Written(name, "F32", shape) for name, shape in shapes.items()}
        file = TensorFile(path.name, tuple(_Promised(one) for one in forms.values()))
        try:
            with open(self._beside, "wb") as opened:
                opened.write(file.header)
                opened.truncate(file.size)
        except OSError as error:
            raise RequestError(f"{self._beside} cannot be written: {error.strerror or error}") from None
        self._sums, offset = dict[str, np.memmap](), len(file.header)
        for name, one in forms.items():
            self._sums[name] = np.memmap(self._beside, np.float32, "r+", offset, one.shape)
            offset += one.nbytes

    def add(self, name: str, index: int, values: np.ndarray) -> None:
        """Adds to one entry of a tensor's leading axis."""
        self._sums[name][index] += values

    def finish(self) -> None:
        """Makes the file durable and gives it its name."""
        for sums in self._sums.values():
            sums.flush()
        self._sums.clear()
        with open(self._beside, "rb+") as opened:
            sync(opened.fileno())
        os.replace(self._beside, self._path)
        sync_folder(self._path.parent)
