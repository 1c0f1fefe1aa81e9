"""A read of a record that several threads may share, and the queue of a drive: which read goes next.

Callers and threads share only deques, dicts and queues, and each call of these is one operation, because a caller may
be interrupted between any two bytecodes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue

from ..errors import ExpertIOError
from .files import ReadShare
from .source import CLOSED

REQUESTED, GUESSED, WARMING = range(3)  # why a record is read; the first goes first
# The most reads of a drive at once that fill free memory. Each layer of a step may have to wait for one of them.
WARM_READS, IN_A_STEP = 8, 1
Shares = Mapping[int, Sequence[ReadShare]]  # by drive number


class Read:
    """The read of a record into `target`.

    Attributes:
        is_queued: whether threads will read it; False if an interrupt came before its submission was complete.
    """

    def __init__(self, layer: int, expert: int, target: memoryview, shares: Shares):
        self.layer, self.expert, self.target = layer, expert, target
        self.is_queued = False
        self._error: ExpertIOError | None = None
        self._shares = {drive: deque(some) for drive, some in shares.items()}  # not begun
        self._left, self._got = sum(map(len, shares.values())), 0  # shares that have not ended; bytes read
        self._fate: dict[str, bool] = {}  # "begun": decides whether a thread or `cancel` came first
        self._over = False
        self._waiters: list[SimpleQueue[Read]] = []  # the waiting threads

    @property
    def waiting(self) -> dict[int, int]:
        """The shares of each drive that no thread has begun."""
        return {drive: len(shares) for drive, shares in self._shares.items()}

    @property
    def is_cancelled(self) -> bool:
        return self._fate.get("begun") is False

    @property
    def is_over(self) -> bool:
        return self._over or self.is_cancelled

    @property
    def error(self) -> ExpertIOError | None:
        """The error of the read, or None."""
        return ExpertIOError(CLOSED) if self.is_cancelled else self._error

    def cancel(self) -> bool:
        """Cancels the read unless it has begun; returns whether it is cancelled."""
        if self._fate.setdefault("begun", False):
            return False
        self.settle()
        return True

    def take(self, drive: int) -> ReadShare | None:
        """A share of the drive for the calling thread; None if the read is cancelled or no share is left."""
        if not self._fate.setdefault("begun", True):
            return None
        try:
            return self._shares[drive].popleft()
        except IndexError:
            return None

    def count_off(self, outcome: int | ExpertIOError) -> bool:
        """Counts a finished share; returns whether it was the last."""
        if isinstance(outcome, ExpertIOError):
            self._error = outcome
        else:
            self._got += outcome
        self._left -= 1
        return self._left == 0

    def settle(self, error: ExpertIOError | None = None) -> None:
        """Ends the read and wakes all waiting threads; `error` says why it failed, if it did. It keeps no memory then,
        as a thread may hold it for a while.
        """
        self.target = memoryview(b"")
        self._error, self._over = error or self._error, True
        for queue in self._waiters:
            queue.put(self)

    def notify(self, queue: "SimpleQueue[Read]") -> None:
        """Puts this read on `queue` once it has ended; it may appear twice."""
        self._waiters.append(queue)
        if self.is_over:
            queue.put(self)

    def wait(self) -> ExpertIOError | None:
        """Waits for the end of the read and returns its error or None."""
        if not self.is_over:
            queue: SimpleQueue[Read] = SimpleQueue()
            self.notify(queue)
            queue.get()
        return self.error

    def result(self) -> int:
        """Waits for the end of the read and returns the bytes read. Raises ExpertIOError."""
        error = self.wait()
        if error is not None:
            raise error
        return self._got


def as_they_end(reads: Iterable[Read]) -> Iterator[Read]:
    """Yields the reads as they end."""
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
    """The reads that wait for a drive, each once per share, by purpose.

    Attributes:
        wake: each item wakes a thread, which works until it may begin nothing more.
        active: the shares in progress, by purpose.
        warm_reads: the most of them that fill free memory.
    """

    warm_reads = WARM_READS

    def __init__(self) -> None:
        self._queue: tuple[deque[Read], ...] = (deque(), deque(), deque())
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.active = [0, 0, 0]

    def put(self, read: Read, count: int, purpose: int) -> None:
        self._queue[purpose].extend([read] * count)
        for _ in range(count):
            self.wake.put(None)

    def next(self) -> tuple[Read, int] | None:
        """The read that goes next, and its purpose. If a read that fills free memory has to wait, the thread that ends
        what it waits for asks again.
        """
        for purpose, queue in enumerate(self._queue):
            if purpose == WARMING and not self._may_warm:
                return None
            try:
                read = queue.popleft()
            except IndexError:
                continue
            if purpose == WARMING and queue:
                self.wake.put(None)
            return read, purpose
        return None

    @property
    def _may_warm(self) -> bool:
        return not (self.active[REQUESTED] or self.active[GUESSED]) and self.active[WARMING] < self.warm_reads

    def clear(self) -> None:
        """Cancels all reads."""
        for queue in self._queue:
            while queue:
                queue.popleft().cancel()
