"""Open files of expert records, read past the page cache where the system allows it.

A read is complete or raises, and old and new bytes of a file never mix: `Stamps` notices that a file of a loaded model
is written to, because answers would then come from two models at once. A file that another one has replaced under its
name does no harm: whoever has it open reads the old bytes. Up to a second of answers may have used new bytes before
they are noticed, and a model that reads no more does not look. The caller decides which thread reads what.
"""

import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ExpertIOError
from ..formats.packed import GAP_BYTES, RUN_BYTES, Run
from ..formats.record import BLOCK_BYTES
from . import batch
from .memory import private_pages

LOOK_SECONDS = 1.0  # seconds between two looks at the files


class Stamps:
    """The identity, length and time of change that each file had at first."""

    def __init__(self) -> None:
        self._first: dict[Path, tuple[int, ...]] = {}
        self._looked_at = time.monotonic()
        self._error = ""

    def add(self, path: Path, stat: os.stat_result) -> None:
        """Keeps the stamp of a file. Raises ExpertIOError: the path has another one already."""
        if self._first.setdefault(path, _stamp(stat)) != _stamp(stat):
            raise ExpertIOError(_changed(path))

    def look(self, files: Mapping[Path, int | Path]) -> None:
        """Looks at the files, at most once a second; they are open descriptors, or paths.

        Raises:
            ExpertIOError: one of them has changed, now or before.
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._error = self._error or next((_changed(path) for path in files if self._differs(path, files)), "")
        if self._error:
            raise ExpertIOError(self._error)

    def _differs(self, path: Path, files: Mapping[Path, int | Path]) -> bool:
        first = self._first[path]
        try:
            stamp = _stamp(os.stat(files[path]))
        except OSError:  # it was removed, or its drive is gone, the next read reports that
            return False
        return stamp != first and stamp[:2] == first[:2]


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _changed(path: Path) -> str:
    return f"{path} was changed while in use; start again, so that the model is loaded as it is now"


F_NOCACHE, F_RDAHEAD = 48, 45  # macOS <fcntl.h>; Python defines only the first, and only on macOS
IN_BLOCKS = hasattr(os, "O_DIRECT")  # a Mac's F_NOCACHE takes any offset, length and address
HUGE_BYTES = 2 << 20  # memory begins at a large page only if its size is a multiple of this (results.tsv, "in place")
# Bytes of each thread's scratch memory: room for a run with the rest of its first and last block, or for a gap.
SCRATCH_BYTES = -(-(RUN_BYTES + 2 * BLOCK_BYTES) // HUGE_BYTES) * HUGE_BYTES
QUEUED_BYTES = 1 << 20  # bytes of a run if a thread reads several at once, so that scratch memory holds three
assert GAP_BYTES <= SCRATCH_BYTES

Preadv = Callable[[int, list[memoryview], int], int]
DriveOf = Callable[[Path, os.stat_result], Hashable]  # equal for files of one drive
ReadShare = bytes | Sequence[Run]  # some of a record's runs; runs that are read at once are encoded by `batch.encode`


def device_of(path: Path, stat: os.stat_result) -> Hashable:
    """The device number of the file's file system, which identifies its drive."""
    return stat.st_dev


class _Opened(NamedTuple):
    """Open descriptors, by file and by file number, and whether they bypass the page cache."""

    files: dict[Path, int]
    descriptors: "array[int]"
    direct: bool


class OpenFiles:
    """Args:
        sizes: bytes of each file.
        direct: bypass the page cache (O_DIRECT, F_NOCACHE), because the caller keeps its own cache. If a file system
            refuses this, `direct` becomes False and `note` says why.
        preadv: the system call. If a test replaces it, it makes all reads.
        drive_of: returns a file's drive; replaceable in tests.

    Raises:
        ExpertIOError: a file cannot be opened, or has another length.
    """

    def __init__(
        self,
        sizes: Mapping[Path, int],
        *,
        direct: bool = True,
        preadv: Preadv = os.preadv,
        drive_of: DriveOf = device_of,
    ):
        self.note = ""
        self._sizes, self._preadv = sizes, preadv
        self._opening = threading.Lock()
        self._memory = threading.local()
        self._may_batch = IN_BLOCKS and preadv is os.preadv and batch.available()
        self._paths = list(sizes)
        self._numbers = {path: i for i, path in enumerate(self._paths)}
        self._descriptors: list[int] = []
        self._drive_of, self._drives = drive_of, dict[Path, Hashable]()
        self._stamps = Stamps()
        try:
            self._opened = self._open(direct)
        except ExpertIOError:
            self.close()
            raise
        numbers = {drive: i for i, drive in enumerate(dict.fromkeys(self._drives.values()))}
        self._drive_numbers = {path: numbers[drive] for path, drive in self._drives.items()}
        self.drives = max(len(numbers), 1)

    def drive(self, path: Path) -> int:
        """The number of the drive that holds the file: 0 to `drives` - 1."""
        return self._drive_numbers[path]

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._opened.direct

    @property
    def reads_at_once(self) -> bool:
        """Whether `read_all` can make several reads at once."""
        return self._may_batch and self.direct

    @property
    def run_bytes(self) -> int:
        """The most bytes that a run should have, apart from the rest of a block."""
        return QUEUED_BYTES if self.reads_at_once else RUN_BYTES

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def cost(self, run: Run) -> int:
        """Bytes that reading `run` takes from the drive."""
        first, last = run.window if self.direct and IN_BLOCKS else (run.start, run.stop)
        return min(last, self._sizes[run.path]) - first

    def share(self, runs: Sequence[Run]) -> ReadShare:
        """Converts `runs` to the form that `read_all` reads fastest."""
        is_simple = len(runs) == 1 and runs[0].is_aligned
        return batch.encode(runs, self._numbers) if self.reads_at_once and not is_simple else runs

    def read_all(self, share: ReadShare, target: memoryview) -> int:
        """As `read`, for several runs, at once if possible. Runs that fail are read again one by one.

        Raises:
            ExpertIOError: also, a file has changed.
        """
        self._stamps.look(self._opened.files)
        if not isinstance(share, bytes):
            return sum([self.read(run, target) for run in share])
        queue = self._queue() if self.reads_at_once else None
        if queue is None:
            return sum([self.read(run, target) for run in batch.decode(share, self._paths)])
        came, missed = queue.read(self._opened.descriptors, share, target, self._scratch())
        if missed:
            runs = batch.decode(share, self._paths)
            came += sum([self.read(runs[i], target) for i in missed])
        return came

    def read(self, run: Run, target: memoryview) -> int:
        """Reads the pieces of `run` into their places in `target`; returns the bytes that the drive delivered.

        Args:
            target: writable bytes, aligned to a block.

        Raises:
            ExpertIOError: the file ends early or was replaced. OSError: the system refuses the read.
        """
        files, _, direct = self._opened  # another thread may reopen the files in the meantime
        if not (direct and IN_BLOCKS):
            return self._fill(files[run.path], self._places(run, target), run.start, run.stop - run.start, step=1)
        try:
            return self._read_direct(files[run.path], run, target)
        except OSError as error:
            if isinstance(error, ExpertIOError) or error.errno != errno.EINVAL:
                raise
            self._give_up_direct(error)
            return self.read(run, target)

    def _read_direct(self, file: int, run: Run, target: memoryview) -> int:
        """Reads whole blocks, directly into place if the alignment allows it, else through scratch memory."""
        first, last = run.window
        if run.is_aligned:
            place = run.pieces[0].place
            window = target[place : place + last - first]
            return self._fill(file, [window], first, run.stop - first, step=BLOCK_BYTES)
        scratch = self._scratch()
        got = self._fill(file, [scratch[: last - first]], first, run.stop - first, step=BLOCK_BYTES)
        source, goal = np.frombuffer(scratch, np.uint8), np.frombuffer(target, np.uint8)
        for piece in run.pieces:  # numpy releases the GIL while it copies
            start = piece.offset - first
            goal[piece.place : piece.place + piece.length] = source[start : start + piece.length]
        return got

    def _places(self, run: Run, target: memoryview) -> list[memoryview]:
        """The destinations of the bytes of `run`, in order; gaps go to scratch memory."""
        places = []
        for gap, piece in run.with_gaps():
            places += [self._scratch()[:gap]] if gap else []
            places.append(target[piece.place : piece.place + piece.length])
        return places

    def _scratch(self) -> memoryview:
        """This thread's scratch memory, aligned to a page."""
        scratch: memoryview | None = getattr(self._memory, "scratch", None)
        if scratch is None:
            scratch = self._memory.scratch = memoryview(private_pages(SCRATCH_BYTES))
        return scratch

    def _queue(self) -> batch.Queue | None:
        """This thread's queue; None if the system refuses one."""
        if not hasattr(self._memory, "queue"):
            self._memory.queue = None
            with contextlib.suppress(OSError):
                self._memory.queue = batch.Queue()
        queue: batch.Queue | None = self._memory.queue
        return queue

    def _fill(self, file: int, places: list[memoryview], start: int, needed: int, step: int) -> int:
        """Reads at least `needed` bytes from `start` on into `places`; returns the number of bytes read.

        A short read continues at the last multiple of `step`, as direct I/O requires.
        """
        done = came = 0
        while done < needed:
            try:
                got = self._preadv(file, _rest(places, done), start + done)
            except InterruptedError:
                continue
            reached, came = done + got, came + got
            if reached < needed:
                reached -= reached % step
            if reached <= done:
                raise ExpertIOError(f"the file ended {needed - done} bytes early; was it replaced while open?")
            done = reached
        return came

    def _open(self, direct: bool) -> _Opened:
        files: dict[Path, int] = {}
        try:
            for path in self._sizes:
                files[path] = open_file(path, direct)
                self._descriptors.append(files[path])
                self._check(path, os.fstat(files[path]))
        except ExpertIOError:
            raise
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise ExpertIOError(f"cannot open expert files: {error}") from error
            return self._open_buffered(error)
        return _Opened(files, array("i", files.values()), direct)

    def _check(self, path: Path, stat: os.stat_result) -> None:
        """Checks that the file has its length and is still the one that was opened first."""
        wanted, self._drives[path] = self._sizes[path], self._drive_of(path, stat)
        if stat.st_size != wanted:
            raise ExpertIOError(f"{path} has {stat.st_size} bytes; the layout needs {wanted}")
        self._stamps.add(path, stat)

    def _give_up_direct(self, error: OSError) -> None:
        """Reopens the files with the page cache. Other threads may still read from the old descriptors."""
        with self._opening:
            if self.direct:
                self._opened = self._open_buffered(error)

    def _open_buffered(self, error: OSError) -> _Opened:
        self.note = f"direct I/O is refused here ({error.strerror}); reading through the page cache"
        return self._open(False)


def _rest(places: list[memoryview], done: int) -> list[memoryview]:
    """The part of `places` after the first `done` bytes."""
    left = []
    for place in places:
        if done < len(place):
            left.append(place[done:])
        done = max(done - len(place), 0)
    return left


def open_file(path: os.PathLike[str], direct: bool) -> int:
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    fd = os.open(path, flags)
    if direct and sys.platform == "darwin":
        fcntl.fcntl(fd, F_NOCACHE, 1)
        fcntl.fcntl(fd, F_RDAHEAD, 0)
    elif hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd
