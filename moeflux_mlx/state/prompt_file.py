"""One saved prompt: a snapshot in a container that says which tokens and which model it belongs to.

Little-endian:

    magic "MOEFLXPC" | u32 version | u32 bytes of metadata | u64 tokens | u64 bytes of body
    metadata  JSON, padded with spaces: {"fingerprint": {...}, "extra": {...}, "shifts": [...]}
    tokens    u32 each; the rows of an image have keys from 2^31 on, which its digest gives
    u32       CRC-32 of everything so far
    body      the snapshot, and behind it what a draft head knows of the text, or nothing
    u32       CRC-32 of the body

If rotary positions differ from places, as after an image, "shifts" has [place, difference of the positions from there
on], ascending.

A file appears under its name complete or not at all, whenever the writer dies. Every length in a file is checked
against the file's own size before it is used.

`Fingerprint` says whether a saved state belongs to a model directory, by its contents, so a copied model keeps its
saved states. Weights are too large to hash, so sizes and evenly spaced samples of every file represent them. Two models
of the same shape differ in nearly every sample; a wrong match is possible only if just a few tensors differ. A
checkpoint has another fingerprint than the packed model that is made from it.
"""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import LayerCache, Shifts
from ..errors import FingerprintError, ModelFileError, MoefluxError, PromptCacheError, SnapshotError
from ..files import JsonDict, JsonObject, replace_file, that_ends
from ..ops import native
from ..spec import ModelArgs
from .snapshot import MAX_LENGTH, Stateful, load_state, snapshot_length, state_parts, state_size

SAMPLE_BYTES = 4096
RESIDENT_SAMPLES, EXPERT_SAMPLES = 256, 8  # per file; an expert layer is one of dozens of files
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
TEKKEN = "tekken.json"


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that a saved state depends on besides its tokens; `model` and `tokenizer` are hexadecimal digests.

    `dtype` is that of caches; after a slash follow the bits to which activations were rounded, if they were, and after
    another one "kv8" if caches keep keys and values in 8 bits.
    """

    model: str
    tokenizer: str
    dtype: str

    @property
    def key(self) -> str:
        """All of it in 16 hexadecimal digits, for names of files."""
        return _digest(json.dumps(dataclasses.astuple(self)).encode())[:16]

    def keeping(self, kv_bits: int | None) -> "Fingerprint":
        """The same for caches that keep keys and values in `kv_bits` bits; None: unchanged."""
        return self if kv_bits is None else dataclasses.replace(self, dtype=f"{self.dtype}/kv{kv_bits}")

    def difference(self, other: "Fingerprint") -> str | None:
        """The first part that differs, in words, or None."""
        ours, theirs = self.dtype.split("/"), other.dtype.split("/")
        kept = [[part for part in parts if part.startswith("kv")] for parts in (ours, theirs)]
        parts = {
            "another model": (self.model, other.model),
            "another tokenizer": (self.tokenizer, other.tokenizer),
            "another cache dtype": (ours[0], theirs[0]),
            "another --kv-bits": (kept[0], kept[1]),
            "another --set cpu_activations": (ours, theirs),
        }
        return next((words for words, (one, two) in parts.items() if one != two), None)


def fingerprint_of(
    args: ModelArgs, samples: Mapping[Path, int], folder: Path, dtype: mx.Dtype, bits: int = native.EXACT
) -> Fingerprint:
    """The fingerprint of a model.

    Args:
        samples: how many are taken of each file of weights.
        folder: of the tokenizer.
        dtype: that caches hold, `model.activation_dtype`.
        bits: to which products round activations, `model.cpu_activations`.

    Raises:
        ModelFileError: a file cannot be read.
    """
    try:
        parts = [json.dumps(shape_of(args), sort_keys=True, default=str).encode()]
        parts += [_samples(file, count) for file, count in samples.items()]
        rounded = "" if bits == native.EXACT else f"/{bits}"
        return Fingerprint(_digest(*parts), tokenizer_digest(folder), str(dtype).rpartition(".")[2] + rounded)
    except OSError as error:
        raise ModelFileError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None


def shape_of(args: ModelArgs) -> JsonDict:
    """What determines the arithmetic, independent of the spelling in config.json.

    Saved prompts hold a digest of this, so it never changes for a model: every switch that has not its default.
    """
    shape: JsonDict = _set_fields(dataclasses.replace(args, eos_token_ids=()))
    return shape


def _set_fields(part: Any) -> Any:
    """A part as nested dicts, without the fields that have their default: a new switch changes no old model."""
    if isinstance(part, tuple):
        return [_set_fields(one) for one in part]
    if not dataclasses.is_dataclass(part):
        return part
    values = {field.name: (getattr(part, field.name), field.default) for field in dataclasses.fields(part)}
    kept = {name: _set_fields(value) for name, (value, default) in values.items() if value != default}
    return {"kind": type(part).__name__, **kept}


def _samples(file: Path, count: int) -> bytes:
    """The digest of size and evenly spaced pieces, the first and the last bytes included. A name may change."""
    with file.open("rb", buffering=0) as opened:
        size = opened.seek(0, os.SEEK_END)
        parts = (os.pread(opened.fileno(), SAMPLE_BYTES, offset) for offset in offsets_of(size, count))
        return _digest(str(size).encode(), *parts).encode()


def offsets_of(size: int, count: int) -> list[int]:
    """The offsets of `count` samples in a file of `size` bytes."""
    last = max(size - SAMPLE_BYTES, 0)
    return sorted({last * i // (count - 1) for i in range(count)})


def tokenizer_digest(path: Path) -> str:
    """The digest of a folder's tokenizer files, in hexadecimal."""
    files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not any(file.name in TOKENIZER_FILES[:3] for file in files) and (path / TEKKEN).is_file():
        files.append(path / TEKKEN)  # it is not read if there is another vocabulary
    return _digest(*(part for file in files for part in (file.name.encode(), file.read_bytes())))


def _digest(*parts: bytes) -> str:
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


MAGIC, VERSION = b"MOEFLXPC", 3
START = struct.Struct("<8sIIQQ")
# zlib's CRC-32 runs at 2.4 GB/s, hashlib's fastest digest at 0.6. It is against damage, not malice.
CRC = struct.Struct("<I")
MAX_METADATA = 64 << 20
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class PromptHeader:
    """The header of a file; `tokens` is uint32 [N], `extra` what its writer added, `shifts` as in `LayerCache`,
    `behind` what follows the snapshot, if the body was read.
    """

    fingerprint: Fingerprint
    tokens: np.ndarray
    body_start: int
    body_bytes: int
    extra: JsonObject = field(default_factory=dict)
    behind: bytes = b""
    shifts: Shifts = ()


def prompt_file_size(model: Stateful, tokens: Sequence[int]) -> int:
    """Bytes of a file for these tokens, but for the metadata."""
    return START.size + 4 * len(tokens) + 2 * CRC.size + state_size(model, len(tokens))


def save_prompt(
    path: Path,
    model: Stateful,
    cache: Sequence[LayerCache],
    tokens: Sequence[int],
    fingerprint: Fingerprint,
    extra: JsonObject | None = None,
    behind: bytes = b"",
) -> None:
    """Writes the state of `cache`, which has absorbed exactly `tokens`, and `behind` it, replacing `path` in one step.

    Raises:
        PromptCacheError: the file cannot be written; an older file of that name is still there.
        SnapshotError: the state cannot be expressed.
    """
    size = state_size(model, cache) + len(behind)
    parts = {"fingerprint": dataclasses.asdict(fingerprint), "extra": dict(extra or {}), "shifts": cache[0].shifts}
    metadata = json.dumps(parts).encode()
    metadata += b" " * (-len(metadata) % 8)  # so that the body's floats are aligned
    start = START.pack(MAGIC, VERSION, len(metadata), len(tokens), size)
    head = start + metadata + np.asarray(tokens, "<u4").tobytes()
    _replace(path, _with_checksums(head, chain(state_parts(model, cache), [memoryview(behind)])))


def load_prompt(path: Path, model: Stateful, cache: Sequence[LayerCache], fingerprint: Fingerprint) -> PromptHeader:
    """Replaces the state of `cache` by the file's, after checking all of it; after an error it is as it was.

    Raises:
        FingerprintError: the file belongs to another model, tokenizer or dtype.
        PromptCacheError: the file cannot be read or is damaged.
    """
    with _opened(path) as file:
        header = read_header(path, file)
        difference = header.fingerprint.difference(fingerprint)
        if difference:
            raise FingerprintError(f"{path} was made with {difference}; choose another file")
        # Never closed here: the frames of an error refer to the mapping, which ends with the last reference.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    end = header.body_start + header.body_bytes
    body = whole[header.body_start : end]
    try:
        _check(path, "body", zlib.crc32(body) == CRC.unpack_from(whole, end)[0])
        _check(path, "token count", snapshot_length(model, body) == len(header.tokens))
        load_state(model, cache, body)
    except SnapshotError as error:
        raise PromptCacheError(f"{path} is damaged: {error}; delete it") from error
    for layer in cache:
        layer.shifts = header.shifts
    return dataclasses.replace(header, behind=bytes(body[state_size(model, len(header.tokens)) :]))


def read_prompt_header(path: Path) -> PromptHeader:
    """The part before the body, checked; the body may still turn out to be damaged.

    Raises:
        PromptCacheError: the file cannot be read or is damaged.
    """
    with _opened(path) as file:
        return read_header(path, file)


def read_header(path: Path, file: BinaryIO) -> PromptHeader:
    """`read_prompt_header` of a file that is open at its beginning."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(START.size)
    if not start or not MAGIC.startswith(start[: len(MAGIC)]):
        raise PromptCacheError(f"{path} is not a prompt cache file; choose another name")
    _check(path, "header", len(start) == START.size)
    _, version, metadata_bytes, count, body_bytes = START.unpack(start)
    if version != VERSION:
        raise PromptCacheError(f"{path} has version {version}; only version {VERSION} is known; delete it")
    body_start = START.size + metadata_bytes + 4 * count + CRC.size
    _check(path, "header", metadata_bytes <= MAX_METADATA and count <= MAX_LENGTH)
    _check(path, "length", body_start + body_bytes + CRC.size == size)
    rest = file.read(body_start - START.size)
    head, checksum = start + rest[: -CRC.size], rest[-CRC.size :]
    _check(path, "header", len(rest) == body_start - START.size and CRC.pack(zlib.crc32(head)) == checksum)
    metadata = _metadata(path, head[START.size : START.size + metadata_bytes])
    shifts = _shifts(path, metadata.get("shifts"), count)
    tokens = np.frombuffer(head, "<u4", count, START.size + metadata_bytes)
    fingerprint = Fingerprint(**metadata["fingerprint"])
    return PromptHeader(fingerprint, tokens, body_start, body_bytes, metadata["extra"], shifts=shifts)


def _metadata(path: Path, text: bytes) -> JsonDict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    parts = value.get("fingerprint") if isinstance(value, dict) else None
    names = {part.name for part in dataclasses.fields(Fingerprint)}
    known = isinstance(parts, dict) and set(parts) == names and all(isinstance(v, str) for v in parts.values())
    if not isinstance(value, dict) or not known or not isinstance(value.get("extra"), dict):
        raise PromptCacheError(f"{path} is damaged: its metadata is not understood; delete it")
    return value


def _shifts(path: Path, pairs: Any, length: int) -> Shifts:
    """Reads the shifts of the metadata; they must be ascending and within the text."""
    known = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs
    )
    _check(path, "metadata", known and all(-place <= by <= MAX_LENGTH for place, by in pairs))
    _check(path, "metadata", [0, *sorted(place for place, _ in pairs)][-1] <= length)
    return tuple((place, by) for place, by in pairs)


def _check(path: Path, part: str, right: bool) -> None:
    if not right:
        raise PromptCacheError(f"{path} is damaged: its {part} is wrong; delete it")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with that_ends(path).open("rb") as file:
            yield file
    except OSError as error:
        if isinstance(error, MoefluxError):
            raise
        raise PromptCacheError(f"{path} cannot be read: {error.strerror or error}") from error


def _with_checksums(head: bytes, body: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield head + CRC.pack(zlib.crc32(head))
    checksum = 0
    for part in body:
        checksum = zlib.crc32(part, checksum)
        yield part
    yield CRC.pack(checksum)


def _replace(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """`replace_file` for a prompt, which is private: nobody else may read it."""
    if not path.name:
        raise PromptCacheError(f"{path} cannot be the name of a file; choose another")
    try:
        replace_file(path, parts, TEMPORARY, 0o600)
    except OSError as error:
        raise PromptCacheError(
            f"{path} cannot be written: {error.strerror or error}; make room or choose another place"
        ) from error
