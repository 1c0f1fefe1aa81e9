"""The container GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), read by our own few lines.

A file is little-endian: "GGUF", the version (uint32, 2 or 3), the numbers of tensors and of metadata entries (uint64),
the entries (a key, a type as uint32, a value), then for each tensor its name, the number of its axes (uint32), their
lengths (uint64, the last axis of a row-major array first), its type (uint32) and its offset (uint64). The data begins
at the next multiple of `general.alignment`; offsets count from there. A string is its length (uint64) and UTF-8. A
model may be split into files NAME-00001-of-0000N.gguf, each with tensors of its own and the first with all metadata.

No number in a file is believed: whatever reaches beyond the file is an error, so a damaged or hostile file leads to
neither a read at a wrong place nor an endless loop. (The reader of the `gguf` package loops as often as a count says.)
Nothing here knows what an entry or a tensor is for; the package `gguf` knows the sizes of blocks.
"""

import importlib.util
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelFileError
from ..files import that_ends
from ..installation import install_command
from .checkpoint import find_file, merge_tensors
from .gguf_names import SPLIT_NAME, SUFFIX, models_in

VERSIONS = (2, 3)
USUAL_ALIGNMENT, LARGEST_ALIGNMENT = 32, 1 << 20
MOST_AXES = 4
MOST_NESTED = 4  # arrays in arrays
HEADER_BYTES = 1 << 26  # three times the largest vocabulary; only this much is read into memory
FETCHED_BYTES = 1 << 22  # of a remote file's header at a time
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Blocks:
    """A tensor as a file has it: rows of blocks, each of which stores some weights.

    Args:
        type: its name, such as "Q4_K".
        shape: row-major: [..., rows, columns].
        block: weights of a block, and its bytes.
    """

    name: str
    file: Path
    offset: int
    type: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block[0] * self.block[1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """The header of one file, or of all files of a split model: metadata by key, and tensors by name."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Blocks]


def check_installed() -> None:
    """Raises ModelFileError: the package `gguf` is missing; the message has the command that installs it."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelFileError(f"GGUF files need the package gguf, an extra of this one; run: {install_command('gguf')}")


@cache
def block_sizes() -> Mapping[int, tuple[str, tuple[int, int]]]:
    """Name, and weights and bytes of a block, of every type by its number."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def is_gguf(path: Path) -> bool:
    """Whether the path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def gguf_file(path: Path) -> Path | None:
    """The GGUF that `path` is, or that it holds, if it is a directory without a checkpoint; None: there is none. Of a
    split model it is the first file.

    Raises:
        ModelFileError: the directory holds several models.
    """
    if is_gguf(path):
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    first = [files[0] for files in models_in(file.name for file in path.iterdir()).values()]
    if len(first) > 1:
        raise ModelFileError(f"{path} holds several models: {', '.join(first)}; give the file of one of them")
    return path / first[0] if first else None


def header_bytes(name: Path, size: int, fetch: Callable[[int, int], bytes]) -> bytes:
    """The header of a file elsewhere that has `size` bytes.

    Args:
        fetch: returns as many bytes of the file as the second number says, from the first one on.

    Raises:
        ModelFileError: as `open_gguf`.
    """
    check_installed()
    file = _Fetched(size, fetch)
    header = _Header(name, file, size)
    _parsed(header)
    return bytes(file.data[: header.at])


class _Fetched:
    """A file that is fetched in large pieces as it is read.

    Attributes:
        data: all that has been fetched.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]):
        self.data, self._size, self._fetch, self._at = bytearray(), size, fetch, 0

    def read(self, count: int) -> bytes:
        while len(self.data) < min(self._at + count, self._size):
            self.data += self._fetch(len(self.data), min(FETCHED_BYTES, self._size - len(self.data)))
        self._at += count
        return bytes(self.data[self._at - count : self._at])


def open_gguf(path: Path, elsewhere: Sequence[Path] = ()) -> GgufFile:
    """Reads the header of a file, or those of all files of the split model that it belongs to.

    Args:
        elsewhere: directories in which parts may lie that are not beside the file.

    Raises:
        ModelFileError: the package `gguf` is missing; a file is missing, damaged or of a kind that is not read.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None and elsewhere:
        raise ModelFileError(
            f"--shards-in is for safetensors files, and for the parts of a split GGUF; {path} is whole, so leave it out"
        )
    if match is None:
        return open_parts([path])
    count = int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise ModelFileError(f"{path}: the name is that of no part of {count}")
    names = [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, count + 1)]
    places, remedy = (path.parent, *elsewhere), "download it, or name its directory with --shards-in"
    return open_parts(
        [find_file(name, places, f"it is part {i} of {count}: {remedy}") for i, name in enumerate(names, start=1)]
    )


def open_parts(paths: Sequence[Path]) -> GgufFile:
    """Reads the headers of all files of a model; as `open_gguf`."""
    check_installed()
    parts = [_read(path) for path in paths]
    return _joined(parts) if SPLIT_NAME.fullmatch(paths[0].name) else _alone(parts[0])


def _alone(whole: GgufFile) -> GgufFile:
    count = whole.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise ModelFileError(
            f"{whole.files[0]} is one of {count!r} files of a split model; their names must end in -00001-of-{count}"
        )
    return whole


def _joined(parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    usual = (1, 0) if len(parts) == 1 else (None, None)  # a whole file need not say so
    for number, part in enumerate(parts):
        stated = part.metadata.get("split.count") or usual[0], part.metadata.get("split.no", usual[1])
        if stated != (len(parts), number):
            raise ModelFileError(
                f"{part.files[0]} says that it is file {stated[1]} of {stated[0]}, counted from 0; its name says "
                f"{number} of {len(parts)}"
            )
    tensors = merge_tensors(part.tensors for part in parts)
    wanted = first.metadata.get("split.tensors.count", len(tensors) if len(parts) == 1 else None)
    if wanted != len(tensors):
        raise ModelFileError(f"{first.files[0]}: the files have {len(tensors)} tensors; the first says {wanted}")
    return GgufFile(tuple(part.files[0] for part in parts), first.metadata, tensors)


class _Header:
    """Reads a header from its beginning on; whatever reaches beyond the file is an error. Everything that a count
    counts takes bytes, so a count that lies ends there too.
    """

    def __init__(self, path: Path, file: "BinaryIO | _Fetched", size: int):
        self.path, self.file, self.size, self.at = path, file, size, 0

    def fault(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {text}; download it again")

    def take(self, count: int) -> bytes:
        if count > min(self.size, HEADER_BYTES) - self.at:
            raise self.fault(f"{count} bytes at byte {self.at} reach beyond the {self.size} bytes of the file's header")
        data = self.file.read(count)
        if len(data) != count:
            raise self.fault(f"it ends at byte {self.at + len(data)}")
        self.at += count
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        start = self.at
        data = self.take(self.number("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int, nested: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or nested == MOST_NESTED:
            raise self.fault(f"the metadata before byte {self.at} has the type {kind}, nested {nested} times")
        return self._array(nested)

    def _array(self, nested: int) -> list[Any]:
        kind = self.number("<I")
        if kind not in SCALARS:
            return [self.value(kind, nested + 1) for _ in range(self.number("<Q"))]
        count, form = self.number("<Q"), SCALARS[kind]
        return list(struct.unpack(f"<{count}{form[1:]}", self.take(count * struct.calcsize(form))))


def _read(path: Path) -> GgufFile:
    try:
        size = path.stat().st_size
        with open(that_ends(path), "rb") as file:
            return _parsed(_Header(path, file, size))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(header: _Header) -> GgufFile:
    if header.size < 24 or header.take(4) != b"GGUF":
        raise ModelFileError(f"{header.path} is not a GGUF file")
    version = header.number("<I")
    if version not in VERSIONS:
        swapped = " (big-endian)" if version & 0xFFFF == 0 else ""
        raise ModelFileError(f"{header.path}: version {version}{swapped} of GGUF is not read; versions 2 and 3 are")
    tensor_count = header.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(header.number("<Q")):
        key, kind = header.string(), header.number("<I")
        if key in metadata:
            raise header.fault(f"the key {key!a} occurs twice")
        metadata[key] = header.value(kind)
    tensors: dict[str, Blocks] = {}
    for _ in range(tensor_count):
        tensor = _tensor(header)
        if tensor.name in tensors:
            raise header.fault(f"the tensor {tensor.name!a} occurs twice")
        tensors[tensor.name] = tensor
    return GgufFile((header.path,), metadata, _placed(header, _alignment(header, metadata), tensors))


def _alignment(header: _Header, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", USUAL_ALIGNMENT)
    if type(value) is not int or not 0 < value <= LARGEST_ALIGNMENT or value & (value - 1):
        raise header.fault(f"general.alignment is {value!r}; it must be a power of two up to {LARGEST_ALIGNMENT}")
    return value


def _tensor(header: _Header) -> Blocks:
    """One entry of the list of tensors; its offset still counts from the data's beginning."""
    name, axes = header.string(), header.number("<I")
    if not 1 <= axes <= MOST_AXES:
        raise header.fault(f"tensor {name!a} has {axes} axes")
    lengths = [header.number("<Q") for _ in range(axes)]
    number, offset = header.number("<I"), header.number("<Q")
    if number not in block_sizes():
        raise ModelFileError(f"{header.path}: tensor {name!a} has type {number}, which the package gguf does not know")
    kind, block = block_sizes()[number]
    if min(lengths) < 1 or math.prod(lengths) // block[0] * block[1] > header.size or lengths[0] % block[0]:
        raise header.fault(f"tensor {name!a} of type {kind} has the impossible shape {lengths[::-1]}")
    return Blocks(name, header.path, offset, kind, tuple(lengths[::-1]), block)


def _placed(header: _Header, alignment: int, tensors: Mapping[str, Blocks]) -> dict[str, Blocks]:
    """The tensors with their offsets in the file."""
    start = -(-header.at // alignment) * alignment
    end, placed = start, dict[str, Blocks]()
    for tensor in sorted(tensors.values(), key=lambda one: one.offset):
        offset = start + tensor.offset
        if tensor.offset % alignment or offset < end or offset + tensor.nbytes > header.size:
            raise header.fault(
                f"tensor {tensor.name!a} takes bytes {offset} to {offset + tensor.nbytes} of {header.size}; it must "
                f"begin at a multiple of {alignment} after byte {end}, and end in the file"
            )
        end = offset + tensor.nbytes
        placed[tensor.name] = replace(tensor, offset=offset)
    return {name: placed[name] for name in tensors}
