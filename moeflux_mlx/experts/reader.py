"""Reads expert records from files into the caller's memory, on a few threads, past the page cache if asked.

Each drive has its own threads and queue, so a slow drive does not delay the others. In a queue, reads that somebody
waits for overtake speculative ones. If a record is stored in several places, several threads read it. This module knows
files and pieces; the pool decides which records to keep.

A caller that requests a read may be interrupted between any two bytecodes, so it takes no lock that a reading thread
needs. Callers and threads share only deques, dicts and queues, and each call of these is one operation.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue

from ..errors import ExpertIOError, ModelFileError
from ..formats.pieces import ExpertFiles, Run, runs_of
from ..formats.record import ExpertLayout, Key
from ..process import check_process
from .files import SCRATCH_BYTES, DriveOf, OpenFiles, Preadv, ReadShare, device_of
from .source import CLOSED

SHARE_BYTES = 256 << 10  # a thread is woken for as much; smaller reads go one after the other (results.tsv, "in place")
BATCH_BYTES = 2 << 20  # the same where a thread has its reads under way together; its scratch memory holds more
READS_BYTES = 5 << 8  # of what is kept of one expert in pieces: 0.8 to 1.1 KB where they are nine
LOST = errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE  # what a system says of a drive that is gone
Check = Callable[[int, int, memoryview], None]
Shares = Mapping[int, Sequence[ReadShare]]  # by the number of their drive
DEFAULT_WORKERS = (
    8  # reads at once of a drive: from eight on, records of megabytes reach the ceiling of every drive seen
)


class Read:
    """A record on its way into `target`.

    Attributes:
        is_queued: whether threads will read it; an interrupt may come before its submission is complete.
    """

    def __init__(self, layer: int, expert: int, target: memoryview, shares: Shares):
        self.layer, self.expert, self.target = layer, expert, target
        self.is_queued = False
        self._error: ExpertIOError | None = None
        self._shares = {drive: deque(some) for drive, some in shares.items()}  # not begun
        self._left, self._got = sum(map(len, shares.values())), 0  # shares that are not over; bytes that have come
        self._fate: dict[str, bool] = {}  # "begun": whether a thread came first, or `cancel`
        self._over = False
        self._waiters: list[SimpleQueue[Read]] = []  # those who wait

    @property
    def waiting(self) -> dict[int, int]:
        """Shares of each drive that no thread has begun."""
        return {drive: len(shares) for drive, shares in self._shares.items()}

    @property
    def is_cancelled(self) -> bool:
        return self._fate.get("begun") is False

    @property
    def is_over(self) -> bool:
        return self._over or self.is_cancelled

    @property
    def error(self) -> ExpertIOError | None:
        """What went wrong."""
        return ExpertIOError(CLOSED) if self.is_cancelled else self._error

    def cancel(self) -> bool:
        """Whether it will never be begun."""
        if self._fate.setdefault("begun", False):
            return False
        self.settle()
        return True

    def take(self, drive: int) -> ReadShare | None:
        """A share for the thread that calls, of its drive; None: it is cancelled, or others have them all."""
        if not self._fate.setdefault("begun", True):
            return None
        try:
            return self._shares[drive].popleft()
        except IndexError:
            return None

    def count_off(self, outcome: int | ExpertIOError) -> bool:
        """A share is over; tells whether it was the last."""
        if isinstance(outcome, ExpertIOError):
            self._error = outcome
        else:
            self._got += outcome
        self._left -= 1
        return self._left == 0

    def settle(self, error: ExpertIOError | None = None) -> None:
        """Ends the read and wakes all waiting threads; `error` is the reason if it failed."""
        self._error, self._over = error or self._error, True
        for queue in self._waiters:
            queue.put(self)

    def notify(self, queue: "SimpleQueue[Read]") -> None:
        """`queue` gets this read once it is over, perhaps twice."""
        self._waiters.append(queue)
        if self.is_over:
            queue.put(self)

    def wait(self) -> ExpertIOError | None:
        """What went wrong, once it is over."""
        if not self.is_over:
            queue: SimpleQueue[Read] = SimpleQueue()
            self.notify(queue)
            queue.get()
        return self.error

    def result(self) -> int:
        """Bytes read, once it is over. Raises ExpertIOError."""
        error = self.wait()
        if error is not None:
            raise error
        return self._got


def as_they_end(reads: Iterable[Read]) -> Iterator[Read]:
    """The same, each once it is over."""
    queue: SimpleQueue[Read] = SimpleQueue()
    left = set(reads)
    for read in left:
        read.notify(queue)
    while left:
        read = queue.get()
        if read in left:
            left.remove(read)
            yield read


class DriveQueue:
    """Reads that wait for a drive: those that are wanted now before speculative ones, each once for each share.

    Attributes:
        wake: each item wakes a thread, which looks until nothing is queued.
    """

    def __init__(self) -> None:
        self._queue: tuple[deque[Read], ...] = (deque(), deque())
        self.wake: SimpleQueue[None] = SimpleQueue()

    def put(self, read: Read, count: int, speculative: bool) -> None:
        self._queue[speculative].extend([read] * count)
        for _ in range(count):
            self.wake.put(None)

    def promote(self, read: Read, count: int) -> None:
        self._queue[False].extend([read] * count)  # who comes to its old place finds nothing to take

    def next(self) -> Read | None:
        for queue in self._queue:
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None


class ExpertReader:
    """Worker threads over the open files of one model.

    Args:
        files: where its experts lie.
        direct: bypass the page cache, as for `OpenFiles`.
        workers: threads of each drive.
        preadv: the system call, replaceable in tests.
        check: looks at each record (layer, expert, its memory) when it has come for the first time; a ModelFileError
            of its ends the read.
        drive_of: tells drives apart, as for `OpenFiles`.

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
        check: Check | None = None,
        drive_of: DriveOf = device_of,
    ):
        self.layout = files.layout
        self._check, self._checked = check, set[Key]()
        self._in_pieces: dict[Key, Shares] = {}
        self._where, self._files = files, OpenFiles(files.sizes, direct=direct, preadv=preadv, drive_of=drive_of)
        self._drives = [DriveQueue() for _ in range(self._files.drives)]
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the threads among themselves
        self._busy = 0, 0.0, 0.0  # shares under way, seconds until there last were none, since when there are some
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
        """How many hold files."""
        return len(self._drives)

    @property
    def note(self) -> str:
        """That direct I/O was refused, if it was."""
        return self._files.note

    @property
    def record_bytes(self) -> int:
        """Bytes that the drive delivers for one record: whole blocks past the page cache."""
        every = ((self._where.pieces(layer, 0), record.held_bytes) for layer, record in self.layout.records.items())
        most = self._files.run_bytes
        return max(sum(map(self._files.cost, runs_of(pieces, room, most))) for pieces, room in every)

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one read was under way."""
        active, seconds, since = self._busy
        return seconds + (time.perf_counter() - since if active else 0.0)

    def prepare(self, layer: int, expert: int, target: memoryview) -> Read:
        """A read of one record, for `submit`.

        Args:
            target: writable bytes, as many as are held of a record, page-aligned when `direct`.

        Raises:
            ExpertIOError: the reader is closed, or this is a forked child, which has no threads.
        """
        check_process(self._process)
        self._check_open()
        return Read(layer, expert, target, self._shares(layer, expert, len(target)))

    def submit(self, read: Read, speculative: bool = False) -> Read:
        """Queues what `prepare` gave. Raises ExpertIOError: the reader is closed."""
        for drive, count in read.waiting.items():
            self._drives[drive].put(read, count, speculative)
        read.is_queued = True
        if self._closed:  # perhaps since the threads looked last
            read.cancel()
            self._check_open()
        return read

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertIOError(CLOSED)

    def _shares(self, layer: int, expert: int, room: int) -> Shares:
        """What each of some threads reads of the record; kept where it took longer to make than to find again."""
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

    def promote(self, read: Read) -> None:
        """A queued speculative read, or what is left of it, joins those that somebody waits for."""
        for drive, count in read.waiting.items():
            self._drives[drive].promote(read, count)

    def close(self) -> None:
        """Cancels what is queued, waits for what is running, closes the files. More than once does no harm."""
        if os.getpid() != self._process:
            return
        self._closed = True
        for queue in self._drives:
            queue.wake.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call from anywhere
                thread.join()
        for queue in self._drives:
            while (read := queue.next()) is not None:  # submitted meanwhile
                read.cancel()
        self._files.close()

    def _work(self, drive: int) -> None:
        queue = self._drives[drive]
        while not self._closed:
            queue.wake.get()
            while (read := queue.next()) is not None:
                self._serve(read, drive)
        queue.wake.put(None)  # the others are to see it too

    def _serve(self, read: Read, drive: int) -> None:
        """Reads one share of the drive, if there is one left; once the reader is closed, none is begun."""
        if self._closed:
            read.cancel()
        share = read.take(drive)
        if share is None:
            return
        with self._lock:
            self._count(1)
        outcome = read.error or (ExpertIOError(CLOSED) if self._closed else self._attempt(read, share))
        with self._lock:
            self._count(-1)
            is_last = read.count_off(outcome)
        if is_last:
            read.settle(self._complaint(read))

    def _complaint(self, read: Read) -> ExpertIOError | None:
        """Of `check` about a whole record that it has not seen."""
        key = read.layer, read.expert
        if self._check is None or read.error is not None or key in self._checked:
            return None
        try:
            self._check(*key, read.target)
        except ModelFileError as error:
            return ExpertIOError(str(error))
        self._checked.add(key)
        return None

    def _count(self, change: int) -> None:
        """A share has begun, or is over."""
        active, seconds, since = self._busy
        now = time.perf_counter()
        if not active:
            since = now
        elif active + change == 0:
            seconds += now - since
        self._busy = active + change, seconds, since

    def _attempt(self, read: Read, share: ReadShare) -> int | ExpertIOError:
        """Bytes read, or the error: every error must reach the waiting threads."""
        try:
            return self._files.read_all(share, read.target)
        except Exception as error:
            if self.drives > 1 and isinstance(error, OSError) and error.errno in LOST:
                folders = {str(piece.path.parent) for piece in self._where.pieces(read.layer, read.expert)}
                where = " or ".join(sorted(folders))
                return ExpertIOError(f"the drive of {where} is lost ({error}): connect it, and load the model again")
            return ExpertIOError(f"reading expert {read.expert} of layer {read.layer} failed: {error}")


def in_pieces_bytes(layout: ExpertLayout) -> int:
    """Memory that reading experts in pieces takes beside the experts' own: scratch memory, and where pieces lie."""
    return DEFAULT_WORKERS * SCRATCH_BYTES + layout.num_experts * len(layout.moe_layers) * READS_BYTES


def shares_of(runs: Sequence[Run], worth: int) -> list[list[Run]]:
    """The runs in groups of about `worth` bytes, which are worth a thread: large ones alone, the others together."""
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
