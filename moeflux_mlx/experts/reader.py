"""Reads expert records from files into the caller's memory, on a few threads, past the page cache if asked.

Each drive has its own threads and queue, so a slow drive does not delay the others. In a queue, reads that a caller
waits for overtake speculative ones, and reads that fill free memory begin only while the drive does nothing else
(`reads.DriveQueue`). If a record is stored in several places, several threads read it. This module knows files and
pieces; the pool decides which records to keep.

A caller that requests a read may be interrupted between any two bytecodes, so it must not take a lock that a reading
thread needs. Callers and threads share only deques, dicts and queues, and each call of these is one operation.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import ExpertIOError, ModelFileError
from ..formats.packed import ExpertFiles, Run, runs_of
from ..formats.record import ExpertLayout, Key
from ..process import check_process
from .files import SCRATCH_BYTES, DriveOf, OpenFiles, Preadv, ReadShare, device_of
from .reads import REQUESTED, DriveQueue, Read, Shares
from .source import CLOSED

SHARE_BYTES = 256 << 10  # worth waking a thread for; smaller reads share a thread (results.tsv, "in place")
BATCH_BYTES = 2 << 20  # the same if a thread makes its reads at once; its scratch memory holds more
READS_BYTES = 5 << 8  # bytes kept for one expert in pieces: 0.8 to 1.1 KB if there are nine
LOST = errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE  # the system's errors for a drive that is gone
RecordCheck = Callable[[int, int, memoryview], None]
Arrange = Callable[[int, int, memoryview], None]
DEFAULT_WORKERS = (
    8  # reads at once per drive: from eight on, records of megabytes reach the limit of every drive measured
)


class ExpertReader:
    """Worker threads over the open files of one model.

    Args:
        files: the files of its experts.
        direct: bypass the page cache, as for `OpenFiles`.
        workers: number of threads per drive.
        preadv: the system call, replaceable in tests.
        check: called with each record (layer, expert, its memory) when it has been read for the first time; a
            ModelFileError from it ends the read.
        arrange: called likewise whenever a record has been read, before `check`, to bring what was read to its form.
        drive_of: returns a file's drive, as for `OpenFiles`.

    Attributes:
        queues: the queue of each drive.

    Raises:
        ExpertIOError: a file cannot be opened.
    """

    def __init__(
        self,
        files: ExpertFiles,
        *,
        direct: bool = True,
        workers: int = DEFAULT_WORKERS,
        preadv: Preadv = os.preadv,
        check: RecordCheck | None = None,
        arrange: Arrange | None = None,
        drive_of: DriveOf = device_of,
    ):
        self.layout = files.layout
        self._check, self._checked, self._arrange = check, set[Key](), arrange
        self._in_pieces: dict[Key, Shares] = {}
        self._where, self._files = files, OpenFiles(files.sizes, direct=direct, preadv=preadv, drive_of=drive_of)
        self.queues = [DriveQueue() for _ in range(self._files.drives)]
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()  # used only among the reading threads
        self._busy = 0, 0.0, 0.0  # shares in progress, total busy seconds, start of the current busy period
        self._threads = [
            threading.Thread(target=self._work, args=(drive,), name=f"expert-reader-{drive}-{i}", daemon=True)
            for drive in range(self.drives)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._files.direct

    @property
    def drives(self) -> int:
        """The number of drives."""
        return len(self.queues)

    @property
    def note(self) -> str:
        """A note if direct I/O was refused, else an empty string."""
        return self._files.note

    @property
    def record_bytes(self) -> int:
        """Bytes that the drive delivers for one record: whole blocks past the page cache."""
        every = ((self._where.pieces(layer, 0), record.held_bytes) for layer, record in self.layout.records.items())
        most = self._files.run_bytes
        return max(sum(map(self._files.cost, runs_of(pieces, room, most))) for pieces, room in every)

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one read was in progress."""
        active, seconds, since = self._busy
        return seconds + (time.perf_counter() - since if active else 0.0)

    def prepare(self, layer: int, expert: int, target: memoryview) -> Read:
        """Makes a read of one record, for `submit`.

        Args:
            target: writable bytes of a record's size, page-aligned if `direct`.

        Raises:
            ExpertIOError: the reader is closed, or this is a forked child, which has no threads.
        """
        check_process(self._process)
        self._check_open()
        return Read(layer, expert, target, self._shares(layer, expert, len(target)))

    def submit(self, read: Read, purpose: int = REQUESTED) -> Read:
        """Queues a read made by `prepare`. Raises ExpertIOError: the reader is closed."""
        for drive, count in read.waiting.items():
            self.queues[drive].put(read, count, purpose)
        read.is_queued = True
        if self._closed:  # the reader may have been closed after the threads last looked
            read.cancel()
            self._check_open()
        return read

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertIOError(CLOSED)

    def _shares(self, layer: int, expert: int, room: int) -> Shares:
        """Divides a record among threads; the result is kept if computing it takes longer than looking it up."""
        shares = self._in_pieces.get((layer, expert))
        if shares is None:
            worth = BATCH_BYTES if self._files.reads_at_once else SHARE_BYTES
            runs, by_drive = (
                runs_of(self._where.pieces(layer, expert), room, self._files.run_bytes),
                dict[int, list[Run]](),
            )
            for run in runs:
                by_drive.setdefault(self._files.drive(run.path), []).append(run)
            shares = {
                drive: tuple([self._files.share(some) for some in shares_of(of_drive, worth)])
                for drive, of_drive in by_drive.items()
            }
            if len(runs) > 1 and self._files.reads_at_once:
                self._in_pieces[layer, expert] = shares
        return shares

    def limit_warming(self, reads: int) -> None:
        """Sets the most reads of a drive at once that fill free memory."""
        for queue in self.queues:
            queue.warm_reads = reads

    def promote(self, read: Read, purpose: int = REQUESTED) -> None:
        """Moves a queued read, or its remaining shares, to the reads of a purpose that goes earlier. The entries at its
        old place then have nothing left to take.
        """
        for drive, count in read.waiting.items():
            self.queues[drive].put(read, count, purpose)

    def close(self) -> None:
        """Cancels queued reads, waits for running ones, and closes the files. May be called more than once."""
        if os.getpid() != self._process:
            return
        self._closed = True
        for queue in self.queues:
            queue.wake.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call this from anywhere
                thread.join()
        for queue in self.queues:
            queue.clear()  # reads submitted in the meantime
        self._files.close()

    def _work(self, drive: int) -> None:
        queue = self.queues[drive]
        while not self._closed:
            queue.wake.get()
            while (following := self.next_read(drive)) is not None:
                self._serve(*following, drive)
        queue.wake.put(None)  # for the other threads

    def next_read(self, drive: int) -> tuple[Read, int] | None:
        """The read that goes next, and its purpose. It counts as in progress before another thread asks for its own."""
        with self._lock:
            following = self.queues[drive].next()
            if following is not None:
                self._count(1, following[1], drive)
        return following

    def _serve(self, read: Read, purpose: int, drive: int) -> None:
        """Reads one share of the drive, if one is left and the reader is open."""
        if self._closed:
            read.cancel()
        share, outcome = read.take(drive), None
        if share is not None:
            outcome = read.error or (ExpertIOError(CLOSED) if self._closed else self._attempt(read, share))
        with self._lock:
            self._count(-1, purpose, drive)
            is_last = outcome is not None and read.count_off(outcome)
        if is_last:
            read.settle(self._complaint(read))

    def _complaint(self, read: Read) -> ExpertIOError | None:
        """Arranges a complete record, and returns the error that `check` raises if it has not seen it before, or
        None.
        """
        key = read.layer, read.expert
        if read.error is None and self._arrange is not None:
            self._arrange(*key, read.target)
        if self._check is None or read.error is not None or key in self._checked:
            return None
        try:
            self._check(*key, read.target)
        except ModelFileError as error:
            return ExpertIOError(str(error))
        self._checked.add(key)
        return None

    def _count(self, change: int, purpose: int, drive: int) -> None:
        """Counts shares that begin and end."""
        self.queues[drive].active[purpose] += change
        active, seconds, since = self._busy
        now = time.perf_counter()
        if not active:
            since = now
        elif active + change == 0:
            seconds += now - since
        self._busy = active + change, seconds, since

    def _attempt(self, read: Read, share: ReadShare) -> int | ExpertIOError:
        """Returns the bytes read or the error; every error must reach the waiting threads."""
        try:
            return self._files.read_all(share, read.target)
        except Exception as error:
            if self.drives > 1 and isinstance(error, OSError) and error.errno in LOST:
                folders = {str(piece.path.parent) for piece in self._where.pieces(read.layer, read.expert)}
                where = " or ".join(sorted(folders))
                return ExpertIOError(f"the drive of {where} is lost ({error}): connect it, and load the model again")
            return ExpertIOError(f"reading {self.layout.named((read.layer, read.expert))} failed: {error}")


def in_pieces_bytes(layout: ExpertLayout) -> int:
    """Bytes that reading experts in pieces takes besides the experts: scratch memory, and the places of the pieces."""
    return DEFAULT_WORKERS * SCRATCH_BYTES + layout.total_experts * READS_BYTES


def shares_of(runs: Sequence[Run], worth: int) -> list[list[Run]]:
    """Groups the runs into shares of about `worth` bytes, which are worth a thread: large runs alone, small ones
    together.
    """
    shares: list[list[Run]] = []
    held = worth
    for run in runs:
        size = run.stop - run.start
        if size >= worth:
            shares.insert(0, [run])
        elif held >= worth:
            shares.append([run])
            held = size
        else:
            shares[-1].append(run)
            held += size
    return shares
