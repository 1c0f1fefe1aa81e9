"""Reads expert records from files into caller's memory, on a few threads, past the page cache if asked.

Reads that somebody waits for overtake speculative ones in the queue. A record that lies in several places is read by
several threads. It knows files and pieces; what is worth keeping is the pool's business.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..errors import ExpertIOError, ModelFileError
from ..formats.pieces import ExpertFiles, Run, runs_of
from ..formats.record import ExpertLayout, Key
from ..process import check_process
from .files import SCRATCH_BYTES, OpenFiles, Preadv, Share
from .source import CLOSED

SHARE_BYTES = 256 << 10  # a thread is woken for as much; smaller reads go one after the other (results.tsv, "in place")
BATCH_BYTES = 2 << 20  # the same where a thread has its reads under way together; its scratch memory holds more
READS_BYTES = 5 << 8  # of what is kept of one expert in pieces: 0.8 to 1.1 KB where they are nine
Check = Callable[[int, int, memoryview], None]
DEFAULT_WORKERS = 8  # reads at once: from eight on, records of megabytes reach the ceiling of every drive seen


@dataclass(eq=False)
class _Read:
    """A record on its way: `left` threads have not done their share, `got` bytes have come, `error` is what failed."""

    layer: int
    expert: int
    target: memoryview
    future: "Future[int]"
    left: int
    begun: bool = False
    got: int = 0
    error: ExpertIOError | None = None

    def begin(self) -> bool:
        """Whether it is to be read: a future that runs cannot be cancelled any more."""
        if self.left and not self.begun:
            self.begun = self.future.set_running_or_notify_cancel()
            self.left = self.left if self.begun else 0
        return self.begun

    def count_off(self) -> bool:
        """One share is over; tells whether it was the last."""
        self.left -= 1
        return self.left == 0

    def settle(self) -> None:
        """Tells whoever waits how it went."""
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.got)


class ExpertReader:
    """Worker threads over the open files of one model.

    Args:
        files: where its experts lie.
        direct: bypass the page cache, as for `OpenFiles`.
        workers: threads.
        preadv: the system call, replaceable in tests.
        check: looks at each record (layer, expert, its memory) when it has come for the first time; a ModelFileError
            of its ends the read.

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
    ):
        self.layout = files.layout
        self._check, self._checked = check, set[Key]()
        self._in_pieces: dict[Key, tuple[Share, ...]] = {}
        self._where, self._files = files, OpenFiles(files.sizes, direct=direct, preadv=preadv)
        self._queue: tuple[deque[tuple[_Read, Share]], ...] = (deque(), deque())  # wanted now, speculative
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
        return self._files.direct

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
        shares = self._shares(layer, expert, len(target))
        read = _Read(layer, expert, target, Future(), len(shares))
        with self._wake:
            if self._closed:
                raise ExpertIOError(CLOSED)
            self._queue[speculative].extend((read, share) for share in shares)
            self._wake.notify(len(shares))
        return read.future

    def _shares(self, layer: int, expert: int, room: int) -> tuple[Share, ...]:
        """What each of some threads reads of the record; kept where it took longer to make than to find again."""
        found = self._in_pieces.get((layer, expert))
        if found is None:
            worth = BATCH_BYTES if self._files.reads_at_once else SHARE_BYTES
            runs = runs_of(self._where.pieces(layer, expert), room, self._files.run_bytes)
            found = tuple([self._files.share(some) for some in shares_of(runs, worth)])
            if len(runs) > 1 and self._files.reads_at_once:
                self._in_pieces[layer, expert] = found
        return found

    def promote(self, future: "Future[int]") -> None:
        """Moves a queued speculative read, or what is left of it, to those that somebody waits for."""
        with self._wake:
            parts = list(self._queue[True])
            self._queue[True].clear()
            for part in parts:
                self._queue[part[0].future is not future].append(part)

    def close(self) -> None:
        """Cancels what is queued, waits for what is running, closes the files. More than once does no harm."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._closed = True
            over = [read for queue in self._queue for read, _ in queue if self._abandon(read)]
            for queue in self._queue:
                queue.clear()
            self._wake.notify_all()
        for read in over:
            read.settle()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may call from anywhere
                thread.join()
        self._files.close()

    @staticmethod
    def _abandon(read: _Read) -> bool:
        """A share of `read` will not be read; tells whether nothing of it is under way any more."""
        if not read.begun:
            read.future.cancel()
            read.begin()  # tells those who wait for the first of several
            return False
        read.error = read.error or ExpertIOError(CLOSED)
        return read.count_off()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._queue[False] or self._queue[True]):
                    self._wake.wait()
                if self._closed:
                    return
                read, share = (self._queue[False] or self._queue[True]).popleft()
                if not read.begin():
                    continue
                self._begin()
            outcome = read.error or self._attempt(read, share)
            with self._wake:
                self._end()
                if isinstance(outcome, ExpertIOError):
                    read.error = outcome
                else:
                    read.got += outcome
                is_over = read.count_off()
            if is_over:
                self._look_at(read)
                read.settle()

    def _look_at(self, read: _Read) -> None:
        """Shows a whole record to who wants to see it, once."""
        key = read.layer, read.expert
        if self._check is None or read.error is not None or key in self._checked:
            return
        try:
            self._check(*key, read.target)
        except ModelFileError as error:
            read.error = ExpertIOError(str(error))
        else:
            self._checked.add(key)

    def _begin(self) -> None:
        self._active += 1
        if self._active == 1:
            self._busy_since = time.perf_counter()

    def _end(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._busy += time.perf_counter() - self._busy_since

    def _attempt(self, read: _Read, share: Share) -> int | ExpertIOError:
        """Bytes read, or what went wrong: whoever waits must hear of it, whatever it is."""
        try:
            return self._files.read_all(share, read.target)
        except Exception as error:
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
