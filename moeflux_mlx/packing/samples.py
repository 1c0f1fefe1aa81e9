"""Computes samples of the files that a conversion would write, without writing them, to distinguish models. Unchanged
bytes are read from the checkpoint; only changed ones are made.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Protocol

from ..formats.checkpoint import Tensor, read_bytes
from ..formats.pieces import ExpertFiles
from .layer_files import LayerFile
from .matrix import Matrix
from .resident import ResidentFile, array_bytes
from .sources import MatrixSource, PlainSource, Source


class FileBytes(Protocol):
    """Neighbouring bytes of such a file."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...


@dataclass(frozen=True)
class StoredBytes:
    """A tensor that is written unchanged."""

    tensor: Tensor

    @property
    def size(self) -> int:
        return self.tensor.nbytes

    def read(self, offset: int, length: int) -> bytes:
        return bytes(read_bytes(self.tensor.file, self.tensor.offset + offset, length))


@dataclass(frozen=True)
class MadeBytes:
    """A tensor that a conversion changes, the `index`-th that its source makes."""

    source: Source
    index: int

    @property
    def size(self) -> int:
        return self.source.written[self.index].nbytes

    def read(self, offset: int, length: int) -> bytes:
        array = next(array for i, array in enumerate(self.source.arrays()) if i == self.index)
        return bytes(array_bytes(array)[offset : offset + length])


@dataclass(frozen=True)
class Header:
    """Bytes that are known."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


class ResidentSamples:
    """A file of resident tensors."""

    def __init__(self, file: ResidentFile):
        self.name, self.size = file.name, file.size
        self._parts: list[FileBytes] = [Header(file.header), *(part for one in file.sources for part in _parts(one))]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for part in self._parts:
            starts.append(starts[-1] + part.size)
        return starts

    def read(self, offset: int, length: int) -> bytes:
        """Reads up to `length` bytes from `offset` on."""
        data, stop = b"", min(offset + length, self.size)
        while offset < stop:
            index = bisect_right(self._starts, offset) - 1
            until = min(stop, self._starts[index + 1])
            data += self._parts[index].read(offset - self._starts[index], until - offset)
            offset = until
        return data


def _parts(source: Source) -> Iterator[FileBytes]:
    for index, (written, tensor) in enumerate(zip(source.written, _as_they_lie(source), strict=True)):
        same = type(tensor) is Tensor and (tensor.dtype, tensor.shape) == (written.dtype, written.shape)
        yield StoredBytes(tensor) if tensor is not None and same else MadeBytes(source, index)


def _as_they_lie(source: Source) -> list[Tensor | None]:
    """For each tensor that the source writes, the tensor that it copies, or None."""
    copied: list[Tensor | None] = [None] * len(source.written)
    if isinstance(source, MatrixSource) and _is_copied(source):
        copied[:] = source.matrix.tensors[: len(copied)]
    if isinstance(source, PlainSource) and not source.centred and not source.convolution and source.rows is None:
        copied[:] = [source.tensor]
    return copied


def _is_copied(source: MatrixSource) -> bool:
    """Whether the matrix is written whole, in the form that it has; the codes of other tools are changed."""
    return type(source.matrix) is Matrix and source.made is None and source.pieces[0][1] is None


class MadeSamples:
    """A file of one layer's experts, which are made for it."""

    def __init__(self, file: LayerFile):
        self.name, self.size = PurePosixPath(file.name).name, file.size
        self._file, self._stride = file, file.geometry.stride

    def read(self, offset: int, length: int) -> bytes:
        """Reads up to `length` bytes from `offset` on."""
        stop = min(offset + length, self.size)
        experts = range(offset // self._stride, -(-stop // self._stride))
        records = b"".join(map(self._file.record, experts))
        start = experts.start * self._stride
        return records[offset - start : stop - start]


class LayerSamples:
    """A file of one layer's experts.

    Args:
        name: of the file, with its folder.
    """

    def __init__(self, name: str, experts: ExpertFiles, layer: int):
        self.name = PurePosixPath(name).name
        self.size = experts.layout.layer_bytes(layer)
        self._experts, self._layer, self._stride = experts, layer, experts.layout.records[layer].stride

    def read(self, offset: int, length: int) -> bytes:
        """Reads up to `length` bytes from `offset` on."""
        stop = min(offset + length, self.size)
        data = bytearray(max(stop - offset, 0))
        for expert in range(offset // self._stride, -(-stop // self._stride)):
            for piece in self._experts.pieces(self._layer, expert):
                place = expert * self._stride + piece.place - offset
                first, last = max(place, 0), min(place + piece.length, len(data))
                if first < last:
                    data[first:last] = read_bytes(piece.path, piece.offset + first - place, last - first)
        return bytes(data)
