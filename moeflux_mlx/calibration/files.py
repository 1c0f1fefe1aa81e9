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
from ..packing.resident import TensorFile
from ..packing.sources import WrittenTensor


@dataclass(frozen=True)
class _Given:
    """Tensors that are given as arrays, one after the other."""

    written: tuple[WrittenTensor, ...]
    rows: Iterable[mx.array]
    tensors: tuple[Tensor, ...] = ()

    def arrays(self) -> Iterator[mx.array]:
        return iter(self.rows)


def write_tensors(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Writes tensors that are in memory, in the order of their names.

    Raises:
        RequestError: the system refuses.
    """
    names = sorted(tensors)
    form = {name: WrittenTensor(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names}
    write_rows(path, form, map(tensors.__getitem__, names))


def write_rows(path: Path, form: Mapping[str, WrittenTensor], rows: Iterable[mx.array]) -> None:
    """Writes tensors one after the other as `rows` yields them, so that they need not be in memory together.

    Args:
        form: the name, dtype and shape of each, in the order of `rows`.

    Raises:
        RequestError: the system refuses. Errors of `rows`.
    """
    file = TensorFile(path.name, (_Given(tuple(form.values()), rows),))
    _replace(path, map(memoryview, file.chunks()))


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
