"""The files of a checkpoint as a conversion found them: another program may replace one while the conversion reads."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelFileError
from ..formats.checkpoint import COPIED, INDEX, QUANT_CONFIG, Checkpoint

SMALL = ("config.json", INDEX, QUANT_CONFIG, *COPIED)

Stamp = Mapping[str, int]


@dataclass(frozen=True)
class FoundFiles:
    """Args:
    stamps: size, time and identity of files by path; None: there is no such file.
    """

    stamps: Mapping[Path, Stamp | None]

    @classmethod
    def of(cls, checkpoint: Checkpoint, with_weights: bool = True) -> "FoundFiles":
        """The files as they are now. What is to be compared later is read after this, headers included.

        Args:
            with_weights: whether the files of tensors belong to them; else they come and go.
        """
        small = (checkpoint.folder / name for name in SMALL)
        return cls({file: _stamp(file) for file in (*small, *(checkpoint.files if with_weights else ()))})

    def check(self) -> None:
        """Raises ModelFileError: a file has changed, or is another one."""
        for file, old in self.stamps.items():
            new = _stamp(file)
            if new != old:
                raise ModelFileError(
                    f"{file} {_change(old, new)} while it was read, so the result would be of two checkpoints; "
                    "convert again when nothing changes the checkpoint any more"
                )


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return {"size": status.st_size, "time": status.st_mtime_ns, "device": status.st_dev, "inode": status.st_ino}


def _change(old: Stamp | None, new: Stamp | None) -> str:
    if old is None or new is None:
        return "appeared" if old is None else "was removed"
    return f"was changed or replaced (another {', '.join(name for name in old if old[name] != new[name])})"


def checkpoint_digest(checkpoint: Checkpoint, stamps: Iterable[str] | None = None) -> str:
    """Changes when config.json, a tensor's place, or a file's length or date changes, or one of `stamps` instead."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for stamp in map(_line, checkpoint.files) if stamps is None else stamps:
        digest.update(stamp.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.offset}\n".encode())
    return digest.hexdigest()


def _line(file: Path) -> str:
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}\n"
