"""The source of a model's experts: its interface, and the lease of records.

`ExpertLoader` is the interface for layers that are mapped or read once (`whole`), and for a pool that files are read
into (`streamed`). Code above it does not know that weights are on disk; code below it does not know what a transformer
is. Threads that run the model take turns (`turn`); only `request`, `hint`, `give_way` and the methods of a lease are
called within a turn.
"""

import contextlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.record import ExpertLayout, Key
from ..ops.records import Records
from ..process import check_process
from .record_table import RecordTable
from .stats import Asked, LoaderStats

Owned = Callable[[int, Sequence[int]], list[int]]  # (layer, experts) -> the experts among them that are served here
CLOSED = "the expert loader is closed; load the model again"


def all_of(layer: int, ids: Sequence[int]) -> list[int]:
    """The `Owned` of a process that serves every expert."""
    return list(ids)


class TooManyExpertsError(ValueError):
    """One request asks for more different experts than may be leased at once; nothing is held for it."""


class IoMode(str, Enum):
    """`MMAP`: the system pages experts in. `PREAD`: experts are read into our own memory on demand. `RESIDENT`: all
    experts are read once.
    """

    MMAP = "mmap"
    PREAD = "pread"
    RESIDENT = "resident"


class Lease:
    """The right to read the records of experts that were requested together.

    Attributes:
        keys: layer and id of each different expert.
        inverse: for each requested id its place among the keys, int32 in the ids' shape.
        ready: whether each was in memory when it was requested, bool in the ids' shape.

    The records stay where they are until `release`, or the end of a `with` block.
    """

    def __init__(self, source: "ExpertLoader", keys: list[Key], inverse: np.ndarray, there: list[bool]):
        self._source, self.keys, self.inverse, self._there = source, keys, inverse, there

    @property
    def ready(self) -> np.ndarray:
        return np.array(self._there, bool)[self.inverse]

    def wait(self) -> None:
        """Blocks until every record is in memory.

        Raises:
            ExpertIOError: a read failed, or the loader is closed. Failed records are dropped, the others kept, and the
                lease is released.
        """
        try:
            failures = self._source.finish(self.keys)
        except BaseException:
            self.release()
            raise
        if failures:
            self.release()
            raise failures.pop()  # a name for it would keep this frame and all its callers' alive

    def records(self) -> tuple[Records, np.ndarray]:
        """The records' memory, and the row of each requested id, int32 in the ids' shape.

        Rows whose read has not finished have undefined contents; on CUDA call `wait` first.
        """
        records, rows = self._source.locate(self.keys)
        return records, rows[self.inverse]

    def release(self, out: mx.array | np.ndarray | None = None) -> None:
        """Allows the records to be overwritten once `out`, the output of everything that reads them, is evaluated.

        None, or a numpy array, means that nothing reads them any more. `out` is kept as long as the records, so it
        should be small. Only the first call counts.
        """
        self._source.unpin(self.keys, out if isinstance(out, mx.array) else None)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_there"):  # an interrupt can end the constructor
            self.release()


ON_DISK, IN_MEMORY, ARRIVING = range(3)  # where a record is


class Passage:
    """A span that a thread computes in pieces, a turn for each, within a `with` block; it ends with the block, or when
    nobody refers to it any more.
    """

    def __init__(self) -> None:
        self.thread, self.has_begun, self.has_ended = threading.get_ident(), False, False

    def __enter__(self) -> "Passage":
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended = True


class RequestObserver(Protocol):
    """Is told of requests, in the thread that runs the model."""

    def requested(self, layer: int, ids: np.ndarray, keys: Sequence[Key], ready: Sequence[bool]) -> None:
        """`ids` of `layer` were requested: the different `keys`, and whether each was in memory."""


class ExpertLoader(ABC):
    """Serves the experts of all layers of one model.

    Attributes:
        mode: the I/O mode.
        layout: the layout of the files.
        decision: one line that says why this mode was chosen.
        note: a message for the user, shown once; empty if there is none.
        slots: number of records that fit in the pool; 0 if every expert is in memory.
        pool_bytes: bytes of that many records.
        host_bytes: bytes of host memory for records that stay there after they were copied to a GPU.
        reads_ahead: whether `hint` does anything.
        counts_rows: whether to count for `asked_by_row`.
        is_filling: whether the last call read experts into memory that was free.
        observer: is told of each request, if there is one.
    """

    mode: IoMode
    note: str = ""
    slots: int = 0
    pool_bytes: int = 0
    host_bytes: int = 0
    reads_ahead: bool = False
    counts_rows: bool = False
    is_filling: bool = False
    observer: RequestObserver | None = None

    def __init__(self, layout: ExpertLayout, decision: str):
        self.layout, self.decision = layout, decision or self.mode.value
        self._stats = LoaderStats()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._forgetting: list[Callable[[], object]] = []

    def places(self) -> list[tuple[Key, int]]:
        """IN_MEMORY or ARRIVING of each expert that is not only on disk; mapped experts count as in memory. Called by
        the thread that runs the model.
        """
        layout = self.layout
        return [((layer, expert), IN_MEMORY) for layer in layout.records for expert in range(layout.count(layer))]

    @property
    def stats(self) -> LoaderStats:
        """Counts since the last `reset_stats`."""
        return self._stats

    def reset_stats(self) -> None:
        with self._lock:
            self._stats = LoaderStats()

    @property
    def record_bytes(self) -> int:
        """Bytes that reading one expert takes from the disk."""
        return max(record.size for record in self.layout.records.values())

    def begin_span(self) -> Passage:
        """Begins a span. Until it ends, calls of few tokens read nothing ahead, and no memory moves for them; a span of
        another thread waits.
        """
        return Passage()

    @abstractmethod
    def turn(self, tokens: int, passage: Passage | None = None) -> contextlib.AbstractContextManager[bool]:
        """Held by one thread for a call of the model with `tokens` tokens, or a piece of the `passage` of so many;
        yields whether the results must be evaluated before it ends. A call may be interrupted between any two
        bytecodes, and the next turn first repairs the state that it left; its leases are void.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
        """

    @abstractmethod
    def request(self, layer: int, ids: np.ndarray) -> Lease:
        """Requests the records of `ids` (any shape, repeats allowed) and begins to read the missing ones.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
            TooManyExpertsError: more different experts than the pool has slots without a lease, or, if records are
                copied, than the plan allows to be stacked. `least_slots` are always served.
        """

    def hint(self, keys: Sequence[Key]) -> list[Key]:
        """Begins to read records that may be requested next, in this order; returns those whose read is queued now."""
        return []

    def intend(self, layer: int, ids: Sequence[int]) -> None:  # noqa: B027
        """Names the records that will be needed soon, in place of earlier ones; they are the last to be evicted."""

    def note_prompt(self, layer: int, counts: np.ndarray, tokens: int) -> None:  # noqa: B027
        """Notes for how many of a prompt's `tokens` tokens each expert of `layer` computes, `counts` [E]."""

    def give_way(self, layer: int, ids: Sequence[int]) -> None:  # noqa: B027
        """Makes these records the first to be evicted."""

    def take_back(self, rows: int) -> None:  # noqa: B027
        """Keeps only the first `rows` rows of the last call: records read only for the others are the first to be
        evicted.
        """

    def asked_by_row(self) -> list[Asked]:
        """The requests of each row of the last step, if `counts_rows`; empty if experts are never read."""
        return []

    def relieve(self) -> None:  # noqa: B027
        """Returns memory that the machine is short of, between two parts of a call's work; leased records stay."""

    def take_memory(self) -> None:  # noqa: B027
        """Takes all memory now that the pool takes from the device otherwise while it fills (Metal).

        Raises:
            ExpertIOError: the device refuses memory without which the pool is too small.
        """

    def holds(self, layer: int) -> bool:
        """Whether every expert of `layer` is in memory or being read, so that no prediction is needed."""
        return True

    def slots_of(self, layer: int) -> int:
        """Slots of the pool that serves `layer`; 0 if every expert is in memory."""
        return 0

    def slots_per_layer(self, spare: int = 0, layer: int | None = None) -> int:
        """A layer's equal share of its pool without `spare` slots, of the layer with routed experts that has the least
        by default; 0 if every expert is in memory.
        """
        return 0

    def whole(self, layer: int) -> Records | None:
        """All records of the layer, for kernels to index by id, if they are in one array of the default device."""
        return None

    def without_lease(self, layer: int, ids: np.ndarray) -> Records | None:
        """All records of the layer, for native kernels that index by `ids` without a lease (a lease takes as long as a
        small product); None if they must be requested.

        Raises:
            ExpertIOError: as `request`.
        """
        return None

    def table(self, layer: int) -> RecordTable | None:
        """The records of the layer that may be used without a request; None if there is no table of them."""
        return None

    def accept(self, layer: int, ids: np.ndarray, table: RecordTable) -> bool:
        """As a request and the release of its lease: counts that a computation has used `ids` [1, K] of the table.
        Returns whether the table had all of them; otherwise nothing is counted.
        """
        return False

    def queued(self, outputs: Sequence[mx.array]) -> None:  # noqa: B027
        """These are the outputs of all computations that may still read records of tables, in the order in which they
        were queued.
        """

    @property
    def is_resident(self) -> bool:
        """Whether every layer is one array that kernels index by id."""
        return all(self.whole(layer) is not None for layer in self.layout.records)

    def drain(self) -> None:  # noqa: B027
        """Blocks until no read is in progress. Failed guesses are dropped. Not for use within a turn."""

    @property
    def in_flight(self) -> list[Key]:
        """Records whose read is in progress."""
        return []

    def invalidate(self) -> None:  # noqa: B027
        """Forgets every record in the pool, so that the next request reads the files again.

        Raises:
            RuntimeError: a lease has not been released.
        """

    def check_prompt(self, tokens: int) -> None:  # noqa: B027
        """Raises RequestError: the machine has too little memory for a prompt of so many new tokens."""

    def check_process(self) -> None:
        """Raises ExpertIOError: this is not the process that made the loader."""
        check_process(self._process)

    def at_close(self, forget: Callable[[], object]) -> None:
        """Registers `forget`, which `close` calls, for objects that keep data of the loader."""
        self._forgetting.append(forget)

    def close(self) -> None:
        """Stops the threads, closes the files and frees the memory; later requests raise ExpertIOError. May be called
        again, which completes an interrupted call. If experts are streamed, it waits for a call of another thread.
        """
        with self._lock:
            self._let_go()
            self._closed = True
            while self._forgetting:
                self._forgetting[-1]()
                self._forgetting.pop()

    @abstractmethod
    def _let_go(self) -> None:
        """Frees what `close` must free."""

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertIOError(CLOSED)

    # The methods that a lease calls.

    @abstractmethod
    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        """Waits for the records; returns an error or None."""

    @abstractmethod
    def locate(self, keys: list[Key]) -> tuple[Records, np.ndarray]:
        """The memory that holds the records of one layer, and the row of each, int32."""

    @abstractmethod
    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        """As `Lease.release`; `keys` is the lease's own list."""


def asked_for(layer: int, ids: np.ndarray) -> tuple[list[Key], np.ndarray]:
    """The different experts among `ids`, in their order, and each id's place among them, int32.

    The experts of a single token all differ, so their places are 0, 1, ...
    """
    flat = ids.reshape(-1).tolist()
    place = dict.fromkeys(flat)
    keys = [(layer, expert) for expert in place]
    if len(keys) == len(flat):
        return keys, _in_order(ids.shape)
    place = {expert: i for i, expert in enumerate(place)}
    return keys, np.array([place[expert] for expert in flat], np.int32).reshape(ids.shape)


@lru_cache(32)
def _in_order(shape: tuple[int, ...]) -> np.ndarray:
    """0, 1, ..., int32."""
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
