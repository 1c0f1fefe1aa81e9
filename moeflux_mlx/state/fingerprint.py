"""Determines whether a saved state belongs to a model directory, by its contents, so a copied model keeps its saved
states.

Weights are too large to hash, so sizes and evenly spaced samples of every file represent them. Two models of the same
shape differ in nearly every sample; a wrong match is possible only if just a few tensors differ. A checkpoint has
another fingerprint than the packed model that is made from it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelFileError
from ..files import JsonDict
from ..ops import native
from ..spec import ModelArgs

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
