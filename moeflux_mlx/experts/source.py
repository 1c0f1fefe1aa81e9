"""The source of a model's experts: its interface, and the lease of records.

`ExpertLoader` is the interface for mapped files (`mapped`), for a pool that files are read into (`streamed`) and for
layers that are read once (`resident`). Code above it does not know that weights are on disk; code below it does not
know what a transformer is. Threads that run the model take turns (`turn`); only `request`, `hint`, `give_way` and the
methods of a lease are called within a turn.
"""

import contextlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.record import ExpertLayout, Key
from ..ops.experts import Records
from ..process import check_process

Owned = Callable[[int, Sequence[int]], list[int]]  # (layer, experts) -> those of them that are served here
CLOSED = "the expert loader is closed; load the model again"


def all_of(layer: int, ids: Sequence[int]) -> list[int]:
    """An `Owned` of a process that serves every expert."""
    return list(ids)


class TooManyExpertsError(ValueError):
    """One request asks for more different experts than it may have at a time; nothing is held for it."""


class IoMode(str, Enum):
    """`MMAP`: the system pages experts in. `PREAD`: we read them into memory that we own, as they are wanted.
    `RESIDENT`: all of them, once."""

    MMAP = "mmap"
    PREAD = "pread"
    RESIDENT = "resident"


@dataclass
class LoaderStats:
    """Counts since the last `reset_stats`, in experts, bytes and seconds.

    A hit was in the pool when asked for; `prefetch_hits` are those that a prefetch brought. `late` are
    misses that a prefetch had already begun to read. `wasted` were read ahead and dropped unused.
    `given_back` is what the pool shrank by because the machine was short of memory.
    `wait_seconds` is what the computation waited for reads, `busy_seconds` how long the drive was reading.
    """

    hits: int = 0
    misses: int = 0
    prefetch_hits: int = 0
    late: int = 0
    prefetched: int = 0
    wasted: int = 0
    bytes_read: int = 0
    given_back: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    @property
    def gb_per_second(self) -> float:
        """While the drive was reading, in units of 1e9 bytes."""
        return self.bytes_read / self.busy_seconds / 1e9 if self.busy_seconds else 0.0

    def since(self, earlier: "LoaderStats") -> "LoaderStats":
        """What was counted after `earlier`, a copy of these counts."""
        before = asdict(earlier)
        return LoaderStats(**{name: value - before[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Asked:
    """Experts that were asked for: how many were in memory, how many were not, and the bytes that were read for them.

    What several rows ask for is read once; each has an equal part of its bytes.
    """

    hits: int = 0
    misses: int = 0
    nbytes: float = 0.0

    def __add__(self, other: "Asked") -> "Asked":
        return Asked(self.hits + other.hits, self.misses + other.misses, self.nbytes + other.nbytes)


class Lease:
    """The right to read the records of experts that were asked for together.

    Attributes:
        keys: layer and id of each different expert.
        inverse: for each id that was asked for its place among the keys, int32 in the ids' shape.
        ready: whether each was in memory when it was asked for, bool in the ids' shape.

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
            ExpertIOError: a read failed, or the loader is closed; no failed record is kept, the others are.
                The lease is released.
        """
        try:
            failures = self._source.finish(self.keys)
        except BaseException:
            self.release()
            raise
        if failures:
            self.release()
            raise failures.pop()  # a name for it here would keep this frame, and all above it, alive

    def records(self) -> tuple[Records, np.ndarray]:
        """The records' memory, and the row of each id that was asked for, int32 in the ids' shape.

        Rows whose read has not finished hold anything; on CUDA call `wait` first.
        """
        records, rows = self._source.locate(self.keys)
        return records, rows[self.inverse]

    def release(self, out: mx.array | np.ndarray | None = None) -> None:
        """Lets the records be overwritten once `out`, the output of all that reads them, is evaluated.

        None, or a numpy array, means that the reading is over. `out` is kept while the records are: give a small one.
        Only the first time counts.
        """
        self._source.unpin(self.keys, out if isinstance(out, mx.array) else None)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


ON_DISK, IN_MEMORY, ARRIVING, HIT, MISSED = range(5)  # what `ExpertLoader.picture` says of an expert


class ExpertLoader(ABC):
    """Serves the experts of every layer of one model that has any.

    Attributes:
        mode: how files are read.
        layout: the geometry of the files.
        decision: one line that says why this mode.
        note: what the user should know once; empty if nothing.
        slots: records that the pool holds; 0 when every expert is in memory.
        pool_bytes: memory of as many records.
        reads_ahead: whether `hint` does anything.
        counts_rows: whether `asked_by_row` is wanted.
        asking: numbers from 1 to 255 of those for whom the rows of a call are computed, in order, or of the only one.
    """

    mode: IoMode
    note: str = ""
    slots: int = 0
    pool_bytes: int = 0
    reads_ahead: bool = False
    counts_rows: bool = False
    asking: Sequence[int] = ()

    def __init__(self, layout: ExpertLayout, decision: str):
        self.layout, self.decision = layout, decision or self.mode.value
        self._stats = LoaderStats()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._forgetting: list[Callable[[], object]] = []
        self._asked: dict[Key, int] = {}  # since the last `expert_states`, if anybody looks
        self._askers: dict[Key, int] = {}  # who asked last
        self._is_watched = False

    def watch(self, wanted: bool) -> None:
        """From now on `expert_states` and `last_askers` say what was asked for and by whom, or do not."""
        self._is_watched, self._asked, self._askers = wanted, {}, {}

    def expert_states(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: ON_DISK, IN_MEMORY, ARRIVING, or if it was asked for since the
        last call and somebody watches, HIT or MISSED. Called by the thread that runs the model.
        """
        states = self._by_place([*self._places(), *self._asked.items()])
        self._asked = {}
        return states

    def last_askers(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: which of `asking` asked for an expert last while somebody watched;
        0: nobody. Called by the thread that runs the model.
        """
        return self._by_place(self._askers.items())

    def _by_place(self, values: Iterable[tuple[Key, int]]) -> np.ndarray:
        """uint8 [layers that have experts, experts] with these values, and 0 elsewhere."""
        rows = {layer: row for row, layer in enumerate(self.layout.moe_layers)}
        filled = np.zeros((len(rows), self.layout.num_experts), np.uint8)
        for (layer, expert), value in values:
            filled[rows[layer], expert] = value
        return filled

    def _places(self) -> list[tuple[Key, int]]:
        """What is not on the disk alone: mapped experts are in the system's memory, as far as it has any."""
        every = range(self.layout.num_experts)
        return [((layer, expert), IN_MEMORY) for layer in self.layout.moe_layers for expert in every]

    def _note_asked(self, layer: int, ids: np.ndarray, keys: Sequence[Key], ready: Sequence[bool]) -> None:
        if not self._is_watched:
            return
        self._asked.update((key, HIT if there else MISSED) for key, there in zip(keys, ready, strict=True))
        if len(self.asking) == 1:
            self._askers.update(dict.fromkeys(keys, self.asking[0]))
        elif ids.ndim == 2 and len(ids) == len(self.asking):
            rows = zip(self.asking, ids.tolist(), strict=True)
            self._askers.update(((layer, expert), asker) for asker, row in rows for expert in row)

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

    @abstractmethod
    def turn(self, tokens: int) -> contextlib.AbstractContextManager[bool]:
        """Held by one thread for one call of the model with so many tokens; tells whether its results must be
        evaluated before it ends. A call may be interrupted between any two bytecodes, and the next turn begins
        by putting in order what it left; its leases are void.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
        """

    @abstractmethod
    def request(self, layer: int, ids: np.ndarray) -> Lease:
        """Asks for the records of `ids` (any shape, repeats allowed); the missing ones begin to be read.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
            TooManyExpertsError: more different experts than the pool has slots that no other lease holds, or than are
                planned to be stacked where records are copied; `least_slots` are always served.
        """

    def hint(self, keys: Sequence[Key]) -> list[Key]:
        """Begins to read records that may be wanted next, in this order; returns those that begin to be read now."""
        return []

    def intend(self, layer: int, ids: Sequence[int]) -> None:  # noqa: B027
        """These records, and no others, are wanted soon: what of them is in memory is the last to be replaced."""

    def give_way(self, layer: int, ids: Sequence[int]) -> None:  # noqa: B027
        """These records are the first to be replaced."""

    def take_back(self, rows: int) -> None:  # noqa: B027
        """Only the first `rows` rows of the last call count: what was read for the others alone is the first to be
        replaced."""

    def asked_by_row(self) -> list[Asked]:
        """What each row of the last step asked for, if anybody wants to know; nothing where none is ever read."""
        return []

    def relieve(self) -> None:  # noqa: B027
        """Gives back what the machine is short of, between two parts of a call's work; what is leased stays."""

    def holds(self, layer: int) -> bool:
        """Whether every expert of `layer` is in memory or on its way, so that nothing need be predicted."""
        return True

    def interlude(self) -> contextlib.AbstractContextManager[None]:
        """Within a call that leases nothing at this moment, as between two waves: other calls may take turns meanwhile,
        in this thread, which nobody interrupts. Nothing is read ahead for them, and no memory moves."""
        return contextlib.nullcontext()

    def slots_of(self, layer: int) -> int:
        """Slots of the memory that serves `layer`, and others; 0 when every expert is in memory."""
        return 0

    def slots_per_layer(self, spare: int = 0) -> int:
        """An equal share of the pool less `spare` slots; 0 when every expert is in memory."""
        return 0

    def whole(self, layer: int) -> Records | None:
        """All records of the layer, for kernels to index by id, if they are in one array of the default device."""
        return None

    def without_lease(self, layer: int, ids: np.ndarray) -> Records | None:
        """All records of the layer, for the native kernels to index by `ids` without a lease, which takes as long as
        a small product; None: `request` them.

        Raises:
            ExpertIOError: as `request`.
        """
        return None

    @property
    def is_resident(self) -> bool:
        """Whether every layer is one array that kernels index by id."""
        return all(self.whole(layer) is not None for layer in self.layout.moe_layers)

    def wait_for(self, layer: int) -> None:  # noqa: B027
        """Blocks until no read of `layer` is under way. Failed guesses are forgotten."""

    def drain(self) -> None:  # noqa: B027
        """Blocks until no read is under way. Failed guesses are forgotten."""

    @property
    def in_flight(self) -> list[Key]:
        """Records whose read is under way."""
        return []

    def invalidate(self) -> None:  # noqa: B027
        """Forgets every record in the pool, so that the next request reads the files again.

        Raises:
            RuntimeError: a lease has not been released.
        """

    def check_process(self) -> None:
        """Raises ExpertIOError: this is not the process that made the loader."""
        check_process(self._process)

    def at_close(self, forget: Callable[[], object]) -> None:
        """`close` calls `forget`: for objects that keep something of the loader's."""
        self._forgetting.append(forget)

    def close(self) -> None:
        """Stops the threads, closes the files, gives memory back; what is asked for later raises ExpertIOError.

        More than once does no harm, and completes what was interrupted. Waits for a call that another thread has under
        way, if experts are streamed.
        """
        with self._lock:
            self._let_go()
            self._closed = True
            while self._forgetting:
                self._forgetting[-1]()
                self._forgetting.pop()

    @abstractmethod
    def _let_go(self) -> None:
        """What `close` gives back."""

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertIOError(CLOSED)

    # What a lease calls.

    @abstractmethod
    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        """Waits for the records; returns what went wrong, one error at most."""

    @abstractmethod
    def locate(self, keys: list[Key]) -> tuple[Records, np.ndarray]:
        """The memory that holds the records, of one layer, and the row of each, int32."""

    @abstractmethod
    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        """As `Lease.release`; `keys` is the lease's own list."""


def asked_for(layer: int, ids: np.ndarray) -> tuple[list[Key], np.ndarray]:
    """The different experts among `ids`, in their order, and each id's place among them, int32.

    So a token's experts, which differ, are in places 0, 1, ..., whichever they are.
    """
    flat = ids.reshape(-1).tolist()
    place = {expert: i for i, expert in enumerate(dict.fromkeys(flat))}
    keys = [(layer, expert) for expert in place]
    if len(keys) == len(flat):
        return keys, _in_order(ids.shape)
    return keys, np.array([place[expert] for expert in flat], np.int32).reshape(ids.shape)


@lru_cache(32)
def _in_order(shape: tuple[int, ...]) -> np.ndarray:
    """0, 1, ..., int32."""
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
