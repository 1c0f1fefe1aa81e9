"""Writes the files of a model directory so that an interruption never leaves half a file under its name.

A file is written as `.partial`, synced and renamed; then its length and SHA-256 go into a small state
file, so that the next run knows which files are finished and intact. This module does not know the contents of files.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import ModelFileError
from ..files import JsonDict, JsonObject, existing_parent, read_json, shown_gb, sync, sync_folder
from ..formats.packed import STATE
from .sources import Bytes, Unit

STATE_VERSION = 1
PARTIAL = ".partial"
BEGUN = {"source": "from another checkpoint", "options": "with other options", "version": "by another version"}
READ_BYTES = 1 << 22

Advance = Callable[[int], None]
ByteProgress = Callable[[int, int, str], None]  # called with the bytes that are done, all bytes, and what is done


def deletes_source(origin: object) -> bool:
    """Whether the conversion whose origin this is deletes files of its checkpoint."""
    return isinstance(origin, dict) and origin.get("delete_source") is True


def begin_again(path: Path, alone: bool) -> str:
    """The remedy if the conversion into `path` cannot continue; `alone`: its output may be all that is left of deleted
    files.
    """
    if not alone:
        return f"delete {path} and convert again"
    return (
        f"files of the checkpoint may have been packed into {path} and deleted: download what is missing of them, "
        "and convert again into an empty directory"
    )


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """A context manager that makes the directory and excludes other conversions. An empty directory is removed at the
    end.

    Raises:
        ModelFileError: another process is converting into it, or it cannot be made.
    """
    if path.exists() and not path.is_dir():
        raise ModelFileError(f"{path} exists and is not a directory")
    missing = [one for one in (path.absolute(), *path.absolute().parents) if not one.exists()]
    with contextlib.ExitStack() as stack:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDONLY)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), path.stat()):  # its creator has removed it meanwhile
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise ModelFileError(f"{path} is being written by another conversion") from None
        stack.callback(_remove_empty, missing)
        yield


class Output:
    """The directory that a conversion fills.

    Args:
        path: `reserved` for as long as this is used.
        identity: everything that determines the bytes; a directory begun with another one is refused.
        origin: stored with the output, for messages about an unfinished conversion.
    """

    def __init__(self, path: Path, identity: JsonObject, origin: JsonObject | None = None):
        self.path = path
        self.identity = {"version": STATE_VERSION, **identity}
        self.origin = dict(origin or {})
        self.files = self._read_state()
        self.linked = False

    def _read_state(self) -> JsonDict:
        """The finished files that the state file lists.

        Raises:
            ModelFileError: the directory belongs to something else.
        """
        if not (self.path / STATE).exists():
            if any(file.suffix != PARTIAL for file in self.path.iterdir()):
                raise ModelFileError(f"{self.path} is not empty and has no {STATE}; choose an empty directory")
            return {}
        state = read_json(self.path / STATE)
        files = state.pop("files", None)
        origin = state.pop("origin", None)
        alone = deletes_source(origin)
        remedy = "; this one may hold all that is left of deleted files" if alone else ", or delete this one"
        for key in self.identity.keys() | state.keys():
            if state.get(key) != self.identity.get(key):
                raise ModelFileError(
                    f"{self.path} was begun {BEGUN.get(key, 'otherwise')}; choose another directory{remedy}"
                )
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise ModelFileError(f"{self.path / STATE} is damaged; {begin_again(self.path, alone)}")
        return files

    def missing_bytes(self, units: Iterable[Unit]) -> int:
        """Bytes of disk still needed, by file lengths; the bytes of an interrupted file count as present."""
        missing = [unit for unit in units if not self._has_length(unit) and not self._can_link(unit)]
        begun = sum(file.stat().st_size for file in self.path.rglob(f"*{PARTIAL}"))
        return max(0, sum(unit.size for unit in missing) - begun)

    def _has_length(self, unit: Unit) -> bool:
        file = self.path / unit.name
        entry = self.files.get(unit.name, {})
        return entry.get("bytes") == unit.size and file.is_file() and file.stat().st_size == unit.size

    def _can_link(self, unit: Unit) -> bool:
        return unit.link is not None and _links_work(unit.link, existing_parent(self.path))

    def is_finished(self, unit: Unit) -> bool:
        """Whether an earlier run wrote the file and it still has the same bytes."""
        if not self._has_length(unit):
            return False
        return _sha256(self.path / unit.name) == self.files[unit.name].get("sha256")

    def write(self, unit: Unit, advance: Advance) -> None:
        """Writes (or links) one file; afterwards it counts as finished.

        Raises:
            ModelFileError: the disk is full or the file cannot be written.
        """
        file = self.path / unit.name
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            partial = self.partial(unit)
            partial.unlink(missing_ok=True)
            linked = unit.link is not None and _link(unit.link, partial)
            sha256 = digest_of(unit.chunks(), advance) if linked else _write_all(partial, unit, advance)
            _rename(partial, file)
        self.linked |= linked
        self.files[unit.name] = {"bytes": unit.size, "sha256": sha256}
        self.write_state()

    def partial(self, unit: Unit) -> Path:
        """The path of an unfinished file."""
        return self.path / f"{unit.name}{PARTIAL}"

    def adopt(self, unit: Unit) -> None:
        """Declares a partial file that others have filled and synced as finished. The state file is written first: a
        file that is not listed there would be made again, but its sources are gone.
        """
        file, partial = self.path / unit.name, self.partial(unit)
        self.files[unit.name] = {"bytes": unit.size, "sha256": _sha256(partial)}
        self.write_state()
        with writing(file):
            _rename(partial, file)

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        file = self.path / name
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            partial = file.with_name(file.name + PARTIAL)
            partial.write_bytes(data)
            with open(partial, "rb") as written:
                sync(written.fileno())
            _rename(partial, file)

    def write_state(self) -> None:
        """Writes the state file: whose directory it is, and which files are finished."""
        self.put(STATE, json.dumps({**self.identity, "origin": self.origin, "files": self.files}, indent=1).encode())

    def forget(self) -> None:
        """No file counts as finished any more."""
        self.files = {}
        self.write_state()

    def close(self) -> None:
        """Removes the state file: the directory is what others get, and says nothing of this machine."""
        with writing(self.path / STATE):
            (self.path / STATE).unlink()


def _slices(chunks: Iterable[Bytes], size: int = READ_BYTES) -> Iterator[memoryview]:
    """Slices of sizes that one read fills on every system."""
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), size):
            yield view[start : start + size]


def check_space(path: Path, needed: int) -> None:
    """Raises ModelFileError: the file system that will hold `path` has less than `needed` bytes free."""
    free = shutil.disk_usage(existing_parent(path)).free
    if needed > free:
        raise ModelFileError(
            f"{path} needs {needed} more bytes ({shown_gb(needed)}) and {free} ({shown_gb(free)}) "
            "are free; free some disk space or choose another disk"
        )


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"{file} cannot be written: {error.strerror}; run the same command to resume") from None


def _write_all(partial: Path, unit: Unit, advance: Advance) -> str:
    digest = hashlib.sha256()
    with open(partial, "wb") as opened:
        for chunk in _slices(unit.chunks()):
            opened.write(chunk)
            digest.update(chunk)
            advance(len(chunk))
        opened.flush()
        sync(opened.fileno())
        assert opened.tell() == unit.size, f"{unit.name}: {opened.tell()} bytes written, {unit.size} planned"
    return digest.hexdigest()


def digest_of(chunks: Iterable[Bytes], advance: Advance | None = None) -> str:
    """The SHA-256 of all chunks; `advance` is called with the length of each."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        if advance is not None:
            advance(len(chunk))
    return digest.hexdigest()


@functools.cache
def _links_work(source: Path, folder: Path) -> bool:
    """Whether `source` can have a second name in `folder`: tried, because some file systems have none."""
    trial = folder / f".link-{os.getpid()}{PARTIAL}"
    try:
        return _link(source, trial)
    finally:
        trial.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """A hard link; False where the file system has none or is another one."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes the empty ones of these nested directories."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _rename(partial: Path, file: Path) -> None:
    """Renames so that both the name and the contents survive a power failure."""
    os.replace(partial, file)
    sync_folder(file.parent)


def _sha256(file: Path) -> str:
    try:
        with open(file, "rb", buffering=0) as opened:
            return digest_of(iter(lambda: opened.read(READ_BYTES), b""))
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None
