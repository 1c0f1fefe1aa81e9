"""Tells whether a saved state belongs to a model directory, by contents: a copied model keeps its caches.

Weights are far too large to hash; sizes and evenly spaced samples of every file stand for them. Two models
of one shape differ in nearly every sample, so a wrong match would take a change to a few tensors only.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelFileError
from ..formats.packed import FOLDER
from ..spec import ModelArgs

SAMPLE_BYTES = 4096
RESIDENT_SAMPLES, EXPERT_SAMPLES = 256, 8  # per file; an expert layer is one of dozens of files
# Fields that follow from the model's type, and the end of a text, which decides none.
IMPLIED = ("scoring_func", "correction_bias", "shared_expert_gate", "rope_interleave", "eos_token_ids")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What a saved state depends on besides its tokens; `model` and `tokenizer` are hexadecimal digests."""

    model: str
    tokenizer: str
    dtype: str

    @property
    def key(self) -> str:
        """All of it in 16 hexadecimal digits, for names of files."""
        return _digest(json.dumps(dataclasses.astuple(self)).encode())[:16]

    def difference(self, other: "Fingerprint") -> str | None:
        """The first part that differs, in words, or None."""
        words = {"model": "another model", "tokenizer": "another tokenizer", "dtype": "another cache dtype"}
        parts = (name for name in words if getattr(self, name) != getattr(other, name))
        return next((words[name] for name in parts), None)


def model_fingerprint(path: str | Path, dtype: mx.Dtype) -> Fingerprint:
    """The fingerprint of a packed model directory whose caches hold `dtype` (`model.activation_dtype`).

    Raises:
        ModelFileError: a file cannot be read. ConfigError: config.json is not usable.
    """
    path = Path(path)
    try:
        model, tokenizer = _model_digest(path), _tokenizer_digest(path)
    except OSError as error:
        raise ModelFileError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    return Fingerprint(model, tokenizer, str(dtype).rpartition(".")[2])


def _model_digest(path: Path) -> str:
    parts = [json.dumps(_shape(path), sort_keys=True, default=str).encode()]
    for pattern, samples in (
        ("resident*.safetensors", RESIDENT_SAMPLES),
        (f"{FOLDER}/*.bin", EXPERT_SAMPLES),
    ):
        parts += [_sampled(file, samples) for file in sorted(path.glob(pattern))]
    return _digest(*parts)


def _shape(path: Path) -> dict[str, Any]:
    """What decides the arithmetic, however config.json spells it."""
    fields = dataclasses.asdict(ModelArgs.from_file(path))
    return {name: value for name, value in fields.items() if name not in IMPLIED}


def _sampled(file: Path, samples: int) -> bytes:
    """Name, size and evenly spaced pieces, the first and the last bytes included."""
    size = file.stat().st_size
    last = max(size - SAMPLE_BYTES, 0)
    offsets = sorted({last * i // (samples - 1) for i in range(samples)})
    pieces = [f"{file.name} {size}".encode()]
    with file.open("rb", buffering=0) as opened:
        for offset in offsets:
            opened.seek(offset)
            pieces.append(opened.read(SAMPLE_BYTES))
    return _digest(*pieces).encode()


def _tokenizer_digest(path: Path) -> str:
    found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    return _digest(*(part for file in found for part in (file.name.encode(), file.read_bytes())))


def _digest(*parts: bytes) -> str:
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()
