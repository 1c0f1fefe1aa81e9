"""Experts that are read into a pool of slots, which is their only cache.

The records that were used least of late are evicted, but never one that somebody may still read. Reads run on worker
threads while the caller computes. This module knows bytes, files and which expert was used when, but no transformers.

An interrupt (Ctrl-C, or an exception that another thread raises in this one) may come between any two bytecodes, also
during cleanup. So no call relies on the completion of the previous one: `_alone` notes an incomplete call, and the next
call first rebuilds its state from the pools' tables of records.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.packed import ExpertFiles
from ..ops.records import Records
from ..ops.tiles import MAX_TOKENS
from .memory import AllowedMemory
from .places import Adopt
from .pool_reads import PoolReads
from .pools import Pools
from .reader import DEFAULT_WORKERS, Arrange, ExpertReader, RecordCheck
from .reads import IN_A_STEP, WARM_READS
from .record_table import RecordTable
from .source import ARRIVING, CLOSED, IN_MEMORY, ExpertLoader, IoMode, Key, Lease, Passage, asked_for
from .stats import Asked, AskedByRow, LoaderStats
from .warming import Usage, Warming

Kind = TypeVar("Kind")


def repeat(name: str, one: Kind, call: Callable[[Kind], bool], seconds: float) -> None:
    """Starts a thread that calls `call` with `one` every `seconds`, until it returns False or `one` is gone."""
    threading.Thread(target=_repeat, args=(weakref.ref(one), call, seconds), name=name, daemon=True).start()


def _repeat(reference: "weakref.ref[Kind]", call: Callable[[Kind], bool], seconds: float) -> None:
    while (one := reference()) is not None and call(one):
        del one
        time.sleep(seconds)


DEFAULT_CACHE_BYTES = 2 << 30
WATCH_SECONDS = 0.5  # seconds between two checks while nothing is computed
FEED_SECONDS = 0.01  # the same while free memory is filled
SPAN_SECONDS = 0.005  # the same while another thread computes a span


class StreamedExperts(ExpertLoader):
    """Args:
        packed: the opened files.
        decision: one line that says why experts are read.
        cache_bytes: the initial size of the pool.
        most_bytes: its largest size; None is `cache_bytes`. Ignored where memory cannot be given back.
        allowance: called with the number of tokens of a call and the bytes of MLX arrays that belong to the pool;
            returns the bytes that the pool may have during the call. It is called for every call of the model, so it
            must take only microseconds.
        limit: called with the bytes that the pool takes from the machine; returns those that the machine leaves to it.
            It is called at every call and every request, and by a separate thread while nothing is computed.
        prompt_check: called with the number of new tokens of a prompt; raises RequestError if memory cannot hold it.
        least_slots: number of records that a request may always ask for; the pool is never smaller.
        buffer_bytes: bytes of the largest array that the device allows (Metal).
        workers: number of reading threads.
        check, arrange: called with records that have been read, as for `ExpertReader`.
        copied: whether records are copied into device memory as they arrive; by default on CUDA without `adopt`.
        adopt: how MLX adopts the pool's memory (`places.Adopt`); by default as Metal does, on Metal.
        host_bytes: the most bytes of records that stay in host memory after they were copied, if they are.
        host_limit: as `limit`, for these; at most `host_bytes`.
        reader: replaces the default reader (direct I/O), in tests.

    Attributes:
        usage: counts the experts of steps. reads: those into the pools. allowance, limit, prompt_check: as given.

    Raises:
        ExpertIOError: a file cannot be opened.
    """

    mode = IoMode.PREAD
    reads_ahead = True

    def __init__(
        self,
        packed: ExpertFiles,
        decision: str = "",
        *,
        cache_bytes: int | None = None,
        most_bytes: int | None = None,
        allowance: Callable[[int, int], int] | None = None,
        limit: Callable[[int], int] | None = None,
        prompt_check: Callable[[int], None] | None = None,
        least_slots: int | None = None,
        buffer_bytes: int | None = None,
        workers: int = DEFAULT_WORKERS,
        copied: bool | None = None,
        adopt: Adopt | None = None,
        host_bytes: int = 0,
        host_limit: Callable[[int], int] | None = None,
        reader: ExpertReader | None = None,
        check: RecordCheck | None = None,
        arrange: Arrange | None = None,
    ):
        super().__init__(packed.layout, decision)
        self._busy_before = 0.0
        self._callers: set[int] = set()  # the first two threads that have had a turn
        self._guards: list[mx.array] = []  # guards of leases released in this turn
        self._guards_of = 0  # the thread whose turn it is
        self._is_sound = True  # no call is in progress, and none has been interrupted
        self._passages = weakref.WeakSet[Passage]()  # spans on their way
        self._computes_beside = False  # the call in progress is not the span's that is on its way
        self.reader = reader or ExpertReader(packed, workers=workers, check=check, arrange=arrange)
        largest = max(record.size for record in self.layout.records.values())
        self._rows_asked = AskedByRow(self.layout, self.reader.record_bytes / largest)  # in this turn
        weakref.finalize(self, self.reader.close)
        self._least = least_slots or self.layout.num_experts
        sizes = cache_bytes or DEFAULT_CACHE_BYTES, most_bytes or 0
        self.pools = Pools(self.layout, sizes, self._least, buffer_bytes, copied, adopt, host_bytes)
        self._keeps_on_host, self._allowed = host_bytes > 0, AllowedMemory()
        self.at_close(partial(self._allowed.follow, 0))
        self.reads = PoolReads(self.pools, self.reader, self._least, self._stats)
        self.usage = Usage(self.layout)
        self._warming = Warming(self.reads, self.layout, self.usage.counts)
        self.allowance, self.prompt_check = allowance, prompt_check
        self.limit, self._host_limit = limit, host_limit
        if limit is not None or host_limit is not None:
            repeat("pool-watch", self, StreamedExperts.relieve_between_calls, WATCH_SECONDS)

    @property
    def stats(self) -> LoaderStats:
        self._stats.busy_seconds = self.reader.busy_seconds - self._busy_before
        return self._stats

    def reset_stats(self) -> None:
        with self._lock:
            super().reset_stats()
            self.reads.stats = self._stats
            self._busy_before = self.reader.busy_seconds

    @property
    def note(self) -> str:  # type: ignore[override]
        """A note if direct I/O was refused, else an empty string."""
        return self.reader.note

    @property
    def record_bytes(self) -> int:
        return self.reader.record_bytes

    @property
    def slots(self) -> int:  # type: ignore[override]
        return self.pools.slots

    @property
    def pool_bytes(self) -> int:  # type: ignore[override]
        return self.pools.nbytes

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        return self.pools.host_bytes

    def resize(self, nbytes: int) -> int:
        """Resizes the pool to `nbytes`, in whole records, at least as many as a request may ask for and at most its
        largest size; returns the slots, which are more if more are leased. Evicts the records used least of late.
        """
        with self._alone():
            self._check_open()
            return self.reads.resize(nbytes)

    def take_memory(self) -> None:
        with self._alone():
            self.pools.take_memory()

    def _breathe(self, tokens: int) -> None:
        """Follows the allowed size: shrinks at once, but does not grow for a small gain."""
        with self._alone():
            self.relieve(may_grow=self.allowance is None)
        if self.allowance is None:
            return
        nbytes = self.allowance(tokens, self.pools.device_bytes)
        if self.limit is not None:
            nbytes = min(nbytes, self.limit(self.pools.held_bytes))
        if self.pools.is_due(nbytes):
            self.resize(nbytes)

    def check_prompt(self, tokens: int) -> None:
        if self.prompt_check is not None and self.limit is not None:
            self.limit(self.pools.held_bytes)
            self.prompt_check(tokens)

    def warm(self, rates: np.ndarray) -> None:
        """Fills free memory with the experts of the highest `rates`, float [record sets, the most experts of a set],
        the shares of earlier steps that used them.
        """
        with self._alone():
            self._warming = Warming(self.reads, self.layout, rates)
        repeat("pool-feed", self, StreamedExperts.warm_between_calls, FEED_SECONDS)

    def warm_between_calls(self) -> bool:
        """Reads on for `warm`, unless a call is in progress, which does it itself. Returns whether there is more."""
        return self._between_calls(self._read_on) and self._warming.may_read

    def _read_on(self) -> None:
        self.reader.limit_warming(WARM_READS)
        self.reads.collect()
        self.relieve()
        for pool in self.pools:
            pool.finish_copies()  # a lazy array belongs to the thread that made it

    def relieve(self, may_grow: bool = False) -> None:
        """Returns memory that the machine is short of, during a call or between two; leased records stay. What is left
        is filled by `warm`.
        """
        if self.limit is not None:
            before = self.pools.held_bytes
            nbytes = self.limit(before)
            if self.pools.is_due(nbytes, may_grow):
                self.reads.resize(nbytes)
                mx.clear_cache()
                self.reads.stats.given_back += max(before - self.pools.held_bytes, 0)
        if self._keeps_on_host:
            held = self.pools.host_bytes
            if self._host_limit is not None and held and self.reads.resize_host(self._host_limit(held)):
                mx.clear_cache()
            self._allowed.follow(self.pools.host_bytes)
        self._warming.feed()

    def relieve_between_calls(self) -> bool:
        """Calls `relieve`, unless a call is in progress, which does it itself. Returns whether the loader is open."""
        return self._between_calls(self.relieve)

    def _between_calls(self, work: Callable[[], None]) -> bool:
        """Does something, unless a call is in progress or was interrupted. Returns whether the loader is open."""
        if self._lock.acquire(blocking=False):
            try:
                if self._is_sound and not self._closed:
                    with self._alone():
                        work()
            finally:
                self._lock.release()
        return not self._closed

    @property
    def in_flight(self) -> list[Key]:
        return self.pools.in_flight()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Admits one thread at a time; first repairs the state that an interrupted call has left."""
        with self._lock:
            if not self._is_sound:
                self._reconcile()
            self._is_sound = False
            yield
            self._is_sound = True

    def _reconcile(self) -> None:
        """Repairs the state after an interrupted call: its leases are void, and lazy results that nobody will read are
        not waited for.
        """
        is_own = self._guards_of == threading.get_ident()
        self.reads.reconcile([] if is_own else self._guards)
        if not is_own:  # the thread that made lazy arrays can evaluate them, at the end of this turn
            self._guards = []

    def begin_span(self) -> Passage:
        passage = Passage()
        while True:
            with self._lock:
                if all(other.has_ended or other.thread == passage.thread for other in self._passages):
                    self._passages.add(passage)
                    return passage
            time.sleep(SPAN_SECONDS)

    @contextlib.contextmanager
    def turn(self, tokens: int, passage: Passage | None = None) -> Iterator[bool]:
        """A lazy array can be evaluated only by the thread that made it, and lazy results of a call read memory that
        the next call may reuse. So once several threads have called, all results are evaluated; those of a single
        thread are at least started.
        """
        self.check_process()
        self._check_open()
        with self._lock:
            self._check_open()
            self._begin(tokens, passage)
            with self._alone():
                self._guards_of = threading.get_ident()
                if len(self._callers) < 2:
                    self._callers.add(self._guards_of)
                shared = len(self._callers) > 1
                try:
                    yield shared
                finally:
                    (mx.eval if shared else mx.async_eval)(self._guards)
                    self._guards = []

    def _begin(self, tokens: int, passage: Passage | None) -> None:
        """Does what comes before a call, and before the first piece of a span."""
        is_step = passage is None and tokens <= MAX_TOKENS
        self._computes_beside = is_step and not all(other.has_ended for other in self._passages)
        self.reader.limit_warming(IN_A_STEP if tokens <= MAX_TOKENS else WARM_READS)
        self._rows_asked.layers.clear()
        if passage is not None and passage.has_begun:
            return
        if not self._computes_beside:
            self._breathe(tokens)
            self.is_filling = False
        self.pools.pass_time(tokens if tokens > MAX_TOKENS else 1)
        self.usage.begin(tokens)
        if passage is not None:
            passage.has_begun = True

    def request(self, layer: int, ids: np.ndarray) -> Lease:
        self._check_open()
        keys, inverse = asked_for(layer, ids)
        ready = [True] * len(keys)
        lease = Lease(self, keys, inverse, ready)
        if not any(pool.is_leased for pool in self.pools):  # the smallest pool holds only one lease
            self.relieve()
        self.reads.collect()
        try:
            self.is_filling |= self.reads.admit(self.pools.of[layer], keys, ready)
        except BaseException:
            lease.release()
            raise
        self._warming.feed()
        self._note_use(layer, ids, keys, inverse, ready)
        return lease

    def _note_use(self, layer: int, ids: np.ndarray, keys: list[Key], at: np.ndarray, ready: list[bool]) -> None:
        if self.observer is not None:
            self.observer.requested(layer, ids, keys, ready)
        self.usage.note(layer, ids)
        if ids.ndim == 2 and (len(ids) > 1 or self.counts_rows):
            self._rows_asked.note(layer, ids, np.array(ready)[at])

    def table(self, layer: int) -> RecordTable | None:
        return self.reads.table(layer, self.layout)

    def queued(self, outputs: Sequence[mx.array]) -> None:
        self.pools.queued(outputs)
        if outputs:
            self.reads.keep_reserve()

    def accept(self, layer: int, ids: np.ndarray, table: RecordTable) -> bool:
        keys, inverse = asked_for(layer, ids)
        if is_used := self.reads.use(keys, table):
            self._note_use(layer, ids, keys, inverse, [True] * len(keys))
        return is_used

    def asked_by_row(self) -> list[Asked]:
        return self._rows_asked.counts()

    def places(self) -> list[tuple[Key, int]]:
        places = ((key, pool[key]) for pool in self.pools for key in pool.records())
        return [(key, IN_MEMORY if place.read is None else ARRIVING) for key, place in places]

    def hint(self, keys: Sequence[Key]) -> list[Key]:
        return [] if self._closed or self._computes_beside else self.reads.guess(keys)

    def intend(self, layer: int, ids: Sequence[int]) -> None:
        self.pools.intend(layer, ids)

    def note_prompt(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        self.pools.note_prompt(layer, counts, tokens)

    def give_way(self, layer: int, ids: Sequence[int]) -> None:
        """Makes these records the first to be evicted, so that a pass over all layers leaves some for the next pass."""
        self.pools.give_way(layer, ids)

    def take_back(self, rows: int) -> None:
        for layer, ids, ready in self._rows_asked.visits():
            read = ids[rows:][~ready[rows:]]
            self.give_way(layer, np.setdiff1d(read, ids[:rows]).tolist())
        self._rows_asked.layers.clear()

    def holds(self, layer: int) -> bool:
        return self.pools.holds(layer)

    def slots_of(self, layer: int) -> int:
        return self.pools.of[layer].slots

    def slots_per_layer(self, spare: int = 0, layer: int | None = None) -> int:
        return self.pools.slots_per_layer(spare, layer)

    def drain(self) -> None:
        with self._alone():
            self.reads.take_in(self.in_flight)

    def invalidate(self) -> None:
        with self._alone():
            self.reads.take_in(self.in_flight)
            self._warming.stop()
            in_use = any(pool.pinned_besides([]) for pool in self.pools)
            for pool in [] if in_use else self.pools:
                self.reads.empty(pool)
        if in_use:
            raise RuntimeError("the expert pool cannot be emptied while a lease of experts is in use")

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        if self._closed:
            return [ExpertIOError(CLOSED)]
        return self.reads.finish(keys) if keys else []

    def locate(self, keys: list[Key]) -> tuple[Records, np.ndarray]:
        self._check_open()
        layer = keys[0][0]
        memory, rows = self.pools.of[layer].locate(keys)
        return Records(memory, self.layout.records[layer], lasting=self.pools.of[layer].copied), rows

    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        if not self.pools or not keys:  # closed, or a rank that owns none of the requested experts
            return
        if out is not None:
            self._guards.append(out)
        self.pools.of[keys[0][0]].unpin(keys, out)  # a lease has one layer

    def _let_go(self) -> None:
        with self._alone():
            self.reader.close()
            self.reads.take_in(self.in_flight)
            for pool in self.pools:
                self.reads.empty(pool)
                pool.give_back()
            self.pools.clear()
