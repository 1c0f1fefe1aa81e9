"""Safetensors files of a run: written beside their names, made durable, renamed, so that each is whole or not there."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from ..errors import ExpertIOError, ModelFileError, RequestError
from ..files import replace_file
from ..formats.checkpoint import Tensor
from ..ops.forms import NAMES
from ..packing.resident import TensorFile, array_bytes
from ..packing.sources import WrittenTensor


@dataclass(frozen=True)
class HeldTensor:
    """A tensor to write, which is in memory."""

    name: str
    array: mx.array

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.name, NAMES[self.array.dtype], tuple(self.array.shape)),)

    def arrays(self) -> Iterator[mx.array]:
        yield self.array


def write_tensors(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Writes tensors that are in memory, in the order of their names.

    Raises:
        RequestError: the system refuses.
    """
    file = TensorFile(path.name, tuple(HeldTensor(name, tensors[name]) for name in sorted(tensors)))
    _replace(path, (memoryview(chunk) for chunk in file.chunks()))


def write_rows(path: Path, form: Mapping[str, WrittenTensor], rows: Iterable[mx.array]) -> None:
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

    one: WrittenTensor
    tensors: tuple[Tensor, ...] = ()

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (self.one,)

    def arrays(self) -> Iterator[mx.array]:
        raise NotImplementedError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises RequestError: the system refuses to write there."""
    try:
        yield
    except ExpertIOError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"{path} cannot be written: {reason}; choose a place that can be") from None


def _replace(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    with writing(path):
        replace_file(path, chunks)


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a file, lazily. Raises ModelFileError: it cannot be read."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Raises RequestError: the system refuses."""
    _replace(path, [json.dumps(content, indent=2, sort_keys=True).encode()])
