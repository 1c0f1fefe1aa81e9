"""Provides the shards of a conversion one after the other, and disposes of them once they are packed.

From a repository: downloaded into a folder of the output, checked, and deleted. From a directory: read in place, and
deleted if requested, but never a file that another name or another program may still need.

A conversion that was killed continues from two files beside the state file, which stay until the directory is finished:
the headers of all shards, which must outlive the shards, written once; and the journal, replaced after each shard. A
shard is entered in the journal only after every byte made from it is on the disk and has been read back.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ModelFileError, RequestError
from ..files import JsonDict, JsonObject, read_json, sync_folder, user_path
from ..formats.checkpoint import (
    COPIED,
    INDEX,
    QUANT_CONFIG,
    Checkpoint,
    Tensor,
    header_tensors,
    merge_tensors,
    read_config,
    read_head,
    safetensors_files,
    shard_names,
)
from ..formats.hub import Repository, cached_snapshot, looks_like_repo
from ..formats.packed import FINISHED, is_packed
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

    def checkpoint(self, folder: Path, small: Path) -> Checkpoint:
        """The checkpoint with its shards in `folder`, where they need not be, and its other files in `small`."""
        tensors = merge_tensors(shard.tensors(folder) for shard in self.shards)
        return Checkpoint(small, read_config(small), tensors, tuple(folder / shard.name for shard in self.shards))

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


INCOMING = ".shards"  # in the output
CHANGED = "is not the file that this conversion began with"
CHECKPOINT = ["*.safetensors", INDEX, "config.json", QUANT_CONFIG, *COPIED]

Config = JsonDict


def find_supply(
    hf_path: str | Path, output: Path, revision: str | None, delete_source: bool, check: Callable[[Config], None]
) -> "Downloads | OwnFiles | Path":
    """The supply of a checkpoint's shards for a conversion into `output`, or the directory if it has all files already.

    Args:
        check: raises for a config.json that cannot be converted, before anything large is downloaded.

    Raises:
        ModelFileError: the checkpoint is not available. RequestError: `delete_source` of a repository.
    """
    local = user_path(hf_path)
    if local.exists() or not looks_like_repo(str(hf_path)):
        return _own_files(local, output) if delete_source else local
    if delete_source:
        raise RequestError(f"{hf_path} is a repository, whose shards are never kept; leave --delete-source out")
    listing = Listing.read(output, alone=False)
    cached = None if listing else cached_snapshot(str(hf_path), revision, CHECKPOINT)
    if cached is not None and _is_whole(cached):
        return cached
    repository = Repository.look_up(str(hf_path), listing.commit if listing else revision)
    return Downloads(repository, output, listing, check)


def _is_whole(folder: Path) -> bool:
    try:
        return bool(safetensors_files(folder))
    except ModelFileError:
        return False


def _own_files(folder: Path, output: Path) -> "OwnFiles":
    """The shards of a directory that go as they are packed.

    Raises:
        ModelFileError: there are none, or they may not go.
    """
    listing = Listing.read(output, alone=True)
    if folder.is_file():
        raise ModelFileError(
            f"{folder} is a file; --delete-source deletes the safetensors files of a directory: leave it out"
        )
    if listing is None and not folder.is_dir():
        raise ModelFileError(f"{folder} does not exist")
    if listing is None and is_packed(folder):
        raise ModelFileError(f"{folder} is already packed and has no shards to delete: leave --delete-source out")
    if listing is None and not any(folder.glob("*.safetensors")):
        if is_packed(output):
            raise ModelFileError(f"{output} is finished, and {folder} has no shards any more: there is nothing to do")
        raise ModelFileError(f"{folder} holds no *.safetensors, and nothing else is deleted: leave --delete-source out")
    return OwnFiles(folder, listing)


class Downloads:
    """The shards of a repository, in the folder `.shards` of the output while they are needed."""

    takes_disk = True

    def __init__(self, repository: Repository, output: Path, listing: Listing | None, check: Callable[[Config], None]):
        """Brings the small files, at once; the rest as `find_supply`."""
        if FINISHED in repository.files:
            raise ModelFileError(f"{repository.name} is already packed; run it with --model {repository.name}")
        self.repository, self.folder = repository, output / INCOMING
        check(read_json(repository.snapshot(["config.json"]) / "config.json"))
        self.small = repository.snapshot([INDEX, "config.json", QUANT_CONFIG, *COPIED])
        self.listing = listing or self._listed()

    def _listed(self) -> Listing:
        files = self.repository.files
        names = shard_names(self.small, [name for name in files if Path(name).name == name])
        missing = [name for name in names if name not in files]
        if missing or not names:
            raise ModelFileError(f"{self.repository.name} has no {missing[0] if missing else '*.safetensors'}")
        shards = (
            Shard(name, files[name].size, files[name].digest, self.repository.head(name).decode("utf-8", "replace"))
            for name in names
        )
        return Listing(tuple(shards), self.repository.commit)

    def bring(self, name: str, advance: Callable[[int], None]) -> None:
        self.folder.mkdir(exist_ok=True)
        self.repository.download(name, self.folder, advance)

    def check(self, name: str) -> None:
        """Does nothing: nobody else writes in this folder."""

    def let_go(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def present(self) -> set[str]:
        """Shards that an earlier run has left; they are checked when they are needed."""
        return set()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class OwnFiles:
    """The shards of a directory, each deleted once it is packed."""

    takes_disk = False

    def __init__(self, folder: Path, listing: Listing | None):
        """Raises ModelFileError: a file is not the directory's alone, or not what it was when this began."""
        if folder.is_symlink():
            raise ModelFileError(
                f"{folder} is a link to {folder.resolve()}; --delete-source deletes only what lies in the directory "
                "that it is given: give that one, or leave --delete-source out"
            )
        self.folder = self.small = folder
        self.listing = listing or Listing(tuple(map(_shard, safetensors_files(folder))))
        for name in self.present():
            why = self._why_kept(name)
            if why:
                raise ModelFileError(f"{folder / name} {why}; nothing was deleted: leave --delete-source out")

    def _why_kept(self, name: str) -> str:
        """Why a file must not be deleted; empty if it may."""
        status = (self.folder / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is a link or not a regular file, so others may share its contents"
        if status.st_nlink > 1:
            return "has a second name (a hard link), so that others share it"
        return "" if self._is_same(name, status) else CHANGED

    def _is_same(self, name: str, status: os.stat_result) -> bool:
        wanted = next(shard for shard in self.listing.shards if shard.name == name)
        return (status.st_size, str(status.st_mtime_ns)) == (wanted.size, wanted.stamp)

    def bring(self, name: str, advance: Callable[[int], None]) -> None:
        if name not in self.present():
            raise ModelFileError(
                f"{self.folder / name} was packed and deleted, but its converted form is gone; "
                "download the checkpoint again, and convert it into an empty directory"
            )

    def check(self, name: str) -> None:
        """Raises ModelFileError: the file is gone, or another one."""
        file = self.folder / name
        if not file.exists() or not self._is_same(name, file.stat()):
            raise ModelFileError(f"{file} {CHANGED}; restore it and run the same command, or download it again")

    def let_go(self, name: str) -> None:
        if name in self.present() and not self._why_kept(name):
            (self.folder / name).unlink()
            sync_folder(self.folder)

    def present(self) -> set[str]:
        return {shard.name for shard in self.listing.shards if os.path.lexists(self.folder / shard.name)}

    def close(self) -> None:
        """Does nothing: the remaining small files may belong to others."""


def _shard(file: Path) -> Shard:
    status = file.stat()
    return Shard(file.name, status.st_size, str(status.st_mtime_ns), read_head(file).decode("utf-8", "replace"))


# The shards of a checkpoint, in the order of their names, in `folder`, and its other files in `small`. `bring` makes a
# shard readable, `check` raises if it has changed since, `let_go` says that it has been packed; `present` are those
# that need no bringing. With `takes_disk`, a shard takes disk space of its own from `bring` to `let_go`.
Supply = Downloads | OwnFiles
