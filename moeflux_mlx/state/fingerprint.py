"""Determines whether a saved state belongs to a model directory, by its contents, so a copied model keeps its saved
states.

Weights are too large to hash, so sizes and evenly spaced samples of every file represent them. Two models of the same
shape differ in nearly every sample; a wrong match is possible only if just a few tensors differ.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..errors import ModelFileError
from ..files import JsonDict
from ..formats.packed import FOLDER
from ..ops import native
from ..spec import ModelArgs
from . import flat_fields

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


class Sampled(Protocol):
    """A file of a packed model, on disk or as a conversion would write it."""

    @property
    def name(self) -> str:
        """Without its folder."""
        ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Reads up to `length` bytes from `offset` on."""
        ...


@dataclasses.dataclass(frozen=True)
class SampledFile:
    """One that is there."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb", buffering=0) as opened:
            opened.seek(offset)
            return opened.read(length)


def fingerprint_of(
    args: ModelArgs,
    resident: Iterable[Sampled],
    layers: Iterable[Sampled],
    folder: Path,
    dtype: mx.Dtype,
    bits: int = native.EXACT,
) -> Fingerprint:
    """The fingerprint of a model.

    Args:
        args: of the model, as its packed directory has them.
        resident, layers: the files of resident tensors and of experts, by name.
        folder: of the tokenizer.
        dtype: that caches hold, `model.activation_dtype`.
        bits: to which products round activations, `model.cpu_activations`.

    Raises:
        ModelFileError: a file cannot be read.
    """
    try:
        parts = [json.dumps(_shape(args), sort_keys=True, default=str).encode()]
        parts += [_samples(file, RESIDENT_SAMPLES) for file in resident]
        parts += [_samples(file, EXPERT_SAMPLES) for file in layers]
        rounded = "" if bits == native.EXACT else f"/{bits}"
        return Fingerprint(_digest(*parts), tokenizer_digest(folder), str(dtype).rpartition(".")[2] + rounded)
    except OSError as error:
        raise ModelFileError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None


def packed_fingerprint(
    path: Path, args: ModelArgs, dtype: mx.Dtype, bits: int = native.EXACT, layers: Sequence[Sampled] | None = None
) -> Fingerprint:
    """The fingerprint of a packed model; as `fingerprint_of`. `layers`: its files of experts, if some are elsewhere."""
    resident = map(SampledFile, sorted(path.glob("resident*.safetensors")))
    if layers is None:
        layers = [SampledFile(file) for file in sorted(path.glob(f"{FOLDER}/*.bin"))]
    return fingerprint_of(args, resident, layers, path, dtype, bits)


def _shape(args: ModelArgs) -> JsonDict:
    """What determines the arithmetic, independent of the spelling in config.json.

    Saved prompts hold a digest of this, so it never changes for a model: the families of the first release are
    described by its flat fields, all others by every switch that has not its default, but for the axes of rotations,
    which show in images alone.
    """
    if args.model_type in flat_fields.FAMILIES:
        return flat_fields.of(args)
    return _set_fields(dataclasses.replace(args, eos_token_ids=()))


def _set_fields(part: Any) -> Any:
    """A part as nested dicts, without the fields that have their default: a new switch changes no old model."""
    if isinstance(part, tuple):
        return [_set_fields(one) for one in part]
    if not dataclasses.is_dataclass(part):
        return part
    values = {field.name: (getattr(part, field.name), field.default) for field in dataclasses.fields(part)}
    kept = {name: _set_fields(value) for name, (value, default) in values.items() if value != default}
    kept.pop("axes", None)
    return {"kind": type(part).__name__, **kept}


def _samples(file: Sampled, count: int) -> bytes:
    """Name, size and evenly spaced pieces, the first and the last bytes included."""
    parts = (file.read(offset, SAMPLE_BYTES) for offset in offsets_of(file.size, count))
    return _digest(f"{file.name} {file.size}".encode(), *parts).encode()


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
