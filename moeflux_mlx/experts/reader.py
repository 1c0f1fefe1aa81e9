"""Reads expert records from files into caller's memory, on a few threads, past the page cache if asked.

Reads that somebody waits for overtake speculative ones in the queue. It knows files and offsets; what is
worth keeping is the pool's business.
"""

import contextlib
import errno
import fcntl
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ..errors import ExpertIOError
from ..formats.packed import PackedExperts
from ..process import check_process

ALIGNMENT = 4096  # what O_DIRECT wants of offsets, lengths and addresses on every common device
F_NOCACHE, F_RDAHEAD = 48, 45  # macOS <fcntl.h>; Python names only the first, and only there
DEFAULT_WORKERS = 8  # reads at once: from eight on, records of megabytes reach the ceiling of every drive seen

Preadv = Callable[[int, list[memoryview], int], int]


@dataclass
class _Read:
    layer: int
    expert: int
    target: memoryview
    future: "Future[int]"


class ExpertReader:
    """Worker threads over the open layer files of one model.

    Args:
        packed: the opened files.
        direct: bypass the page cache (O_DIRECT, F_NOCACHE), which is right when the caller keeps a cache
            of its own. Refused by some file systems; then `direct` becomes False and `note` says why.
        workers: threads.
        preadv: the system call, replaceable in tests.
    """

    def __init__(
        self,
        packed: PackedExperts,
        *,
        direct: bool = True,
        workers: int = DEFAULT_WORKERS,
        preadv: Preadv = os.preadv,
    ):
        self.layout = packed.layout
        self.note = ""
        self._paths, self._preadv = packed.paths, preadv
        self._opening = threading.Lock()
        self._descriptors: list[int] = []
        self._identity: dict[int, tuple[int, ...]] = {}
        try:
            aligned = all(record.stride % ALIGNMENT == 0 for record in self.layout.records.values())
            self._opened = self._open(direct and aligned)
        except ExpertIOError:
            self._close_files()
            raise
        self._queue: tuple[deque[_Read], deque[_Read]] = (deque(), deque())  # wanted now, speculative
        self._wake = threading.Condition()
        self._closed = False
        self._process = os.getpid()
        self._active, self._busy, self._busy_since = 0, 0.0, 0.0
        names = [f"expert-reader-{i}" for i in range(workers)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._opened[1]

    @property
    def record_bytes(self) -> int:
        """Bytes of one read: whole blocks of the disk past the page cache, only the expert through it."""
        return max(self._bytes_of(layer, self.direct) for layer in self.layout.moe_layers)

    def _bytes_of(self, layer: int, direct: bool) -> int:
        record = self.layout.records[layer]
        return min(record.held_bytes, record.stride) if direct else record.size

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one read was under way."""
        with self._wake:
            return self._busy + (time.perf_counter() - self._busy_since if self._active else 0.0)

    def submit(self, layer: int, expert: int, target: memoryview, speculative: bool = False) -> "Future[int]":
        """Queues one record; the future gives the bytes read, or an ExpertIOError.

        Args:
            target: writable bytes, as many as are held of a record, page-aligned when `direct`.

        Raises:
            ExpertIOError: the reader is closed, or this is a forked child, which has no threads.
        """
        check_process(self._process)
        read = _Read(layer, expert, target, Future())
        with self._wake:
            if self._closed:
                raise ExpertIOError("the expert loader is closed; load the model again")
            self._queue[speculative].append(read)
            self._wake.notify()
        return read.future

    def promote(self, future: "Future[int]") -> None:
        """Moves a queued speculative read to those that somebody waits for."""
        with self._wake:
            for read in self._queue[True]:
                if read.future is future:
                    self._queue[True].remove(read)
                    self._queue[False].append(read)
                    return

    def close(self) -> None:
        """Cancels what is queued, waits for what is running, closes the files. More than once does no harm."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._closed = True
            for queue in self._queue:
                for read in queue:
                    if read.future.cancel():
                        read.future.set_running_or_notify_cancel()  # tells those who wait for the first of several
                queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call from anywhere
                thread.join()
        self._close_files()

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._queue[False] or self._queue[True]):
                    self._wake.wait()
                if self._closed:
                    return
                read = (self._queue[False] or self._queue[True]).popleft()
            if read.future.set_running_or_notify_cancel():
                self._begin()
                outcome = self._attempt(read)
                self._end()
                if isinstance(outcome, ExpertIOError):
                    read.future.set_exception(outcome)
                else:
                    read.future.set_result(outcome)

    def _begin(self) -> None:
        with self._wake:
            self._active += 1
            if self._active == 1:
                self._busy_since = time.perf_counter()

    def _end(self) -> None:
        with self._wake:
            self._active -= 1
            if self._active == 0:
                self._busy += time.perf_counter() - self._busy_since

    def _attempt(self, read: _Read) -> int | ExpertIOError:
        """Bytes read, or what went wrong: whoever waits must hear of it, whatever it is."""
        try:
            return self._read(read)
        except Exception as error:
            return ExpertIOError(f"reading expert {read.expert} of layer {read.layer} failed: {error}")

    def _read(self, read: _Read) -> int:
        """Fills the target; a short read goes on from the last offset that direct I/O accepts."""
        files, direct = self._opened  # another thread may open them anew in the meantime
        size = self._bytes_of(read.layer, direct)
        start, done = self.layout.start(read.layer, read.expert), 0
        while done < size:
            try:
                got = self._preadv(files[read.layer], [read.target[done:size]], start + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._give_up_direct(error)
                return self._read(read)
            reached = done + got
            if direct and reached < size:
                reached -= reached % ALIGNMENT
            if reached <= done:
                raise ExpertIOError(f"the file ended {size - done} bytes early; was it replaced while open?")
            done = reached
        return size

    def _open(self, direct: bool) -> tuple[dict[int, int], bool]:
        """Descriptors by layer, and whether they read past the page cache."""
        files: dict[int, int] = {}
        try:
            for layer, path in self._paths.items():
                files[layer] = _open_file(path, direct)
                self._descriptors.append(files[layer])
                self._check(layer, path, os.fstat(files[layer]))
        except ExpertIOError:
            raise
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise ExpertIOError(f"cannot open expert files: {error}") from error
            return self._open_buffered(error)
        return files, direct

    def _check(self, layer: int, path: os.PathLike[str], found: os.stat_result) -> None:
        """The file has its length, and is the one that was opened first: old and new bytes never mix."""
        wanted = self.layout.layer_bytes(layer)
        if found.st_size != wanted:
            raise ExpertIOError(f"{path} has {found.st_size} bytes; the layout needs {wanted}")
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns)
        if self._identity.setdefault(layer, identity) != identity:
            raise ExpertIOError(f"{path} was replaced while open; load the model again")

    def _give_up_direct(self, error: OSError) -> None:
        """Opens the files again, through the page cache. Others may still read the old descriptors."""
        with self._opening:
            if self.direct:
                self._opened = self._open_buffered(error)

    def _open_buffered(self, error: OSError) -> tuple[dict[int, int], bool]:
        self.note = f"direct I/O is refused here ({error.strerror}); reading through the page cache"
        return self._open(False)


def _open_file(path: os.PathLike[str], direct: bool) -> int:
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    fd = os.open(path, flags)
    if direct and sys.platform == "darwin":
        fcntl.fcntl(fd, F_NOCACHE, 1)
        fcntl.fcntl(fd, F_RDAHEAD, 0)
    elif hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd
