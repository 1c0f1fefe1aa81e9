"""Records what a conversion shard by shard has done, so that it can continue after it was killed.

Two files beside the state file hold it until the directory is finished: the headers of all shards, which must outlive
the shards, written once; and the journal, replaced after each shard. A shard is entered in the journal only after every
byte made from it is on the disk and has been read back.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ModelFileError
from ..files import JsonObject, read_json
from ..formats.checkpoint import Tensor, header_tensors
from .writer import Output, begin_again, deletes_source

JOURNAL, SHARDS = "convert_journal.json", "convert_shards.json"


@dataclass(frozen=True)
class Shard:
    """A safetensors file of a checkpoint as it is, or was: `stamp` is its date, or its digest on the Hub."""

    name: str
    size: int
    stamp: str
    head: str

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """The tensors of the file in `folder`, which need not be there."""
        return header_tensors(folder / self.name, self.size, self.head.encode())

    @property
    def is_sound(self) -> bool:
        """Whether it can be a shard: a file may say anything, and what is named here may be deleted."""
        texts = self.name, self.stamp, self.head
        return (
            all(isinstance(one, str) for one in texts) and type(self.size) is int and Path(self.name).name == self.name
        )

    @property
    def identity(self) -> str:
        return f"{self.name} {self.size} {self.stamp}\n"


@dataclass(frozen=True)
class Listing:
    """The shards of a checkpoint, and the commit if it is a repository's."""

    shards: tuple[Shard, ...]
    commit: str = ""

    @classmethod
    def read(cls, path: Path, alone: bool) -> "Listing | None":
        """The listing that an earlier run stored in the directory `path`, or None. `alone` as for `begin_again`.

        Raises:
            ModelFileError: the file is damaged.
        """
        if not (path / SHARDS).exists():
            return None
        value = read_json(path / SHARDS)
        try:
            shards = tuple(Shard(**one) for one in value["shards"])
            if all(shard.is_sound for shard in shards):
                return cls(shards, str(value["commit"]))
        except (KeyError, TypeError):
            pass
        raise ModelFileError(f"{path / SHARDS} is damaged; {begin_again(path, alone)}")

    def write(self, output: Output) -> None:
        output.put(SHARDS, json.dumps(asdict(self)).encode())


class Journal:
    """The completely packed shards: name -> bytes made from it."""

    def __init__(self, output: Output):
        """Raises ModelFileError: the file is damaged."""
        self.output = output
        file = output.path / JOURNAL
        done: JsonObject = read_json(file) if file.exists() else {}
        if not all(isinstance(value, int) for value in done.values()):
            raise ModelFileError(f"{file} is damaged; {begin_again(output.path, deletes_source(output.origin))}")
        self.done: dict[str, int] = dict(done)

    def add(self, name: str, nbytes: int) -> None:
        self.done[name] = nbytes
        self._write()

    def forget(self, names: Iterable[str]) -> None:
        """Removes shards whose output no longer exists."""
        known = self.done.keys() & set(names)
        if known:
            self.done = {name: nbytes for name, nbytes in self.done.items() if name not in known}
            self._write()

    def close(self) -> None:
        """Deletes both files, because the directory is finished. The journal goes last: without it the listed shards
        would count as not packed.
        """
        for name in (SHARDS, JOURNAL):
            (self.output.path / name).unlink(missing_ok=True)

    def _write(self) -> None:
        self.output.put(JOURNAL, json.dumps(self.done, indent=1).encode())
