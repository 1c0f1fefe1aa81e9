"""Experts that are read into a pool of slots, which is their only cache.

The least recently used records are evicted, but never one that somebody may still read. Reads run on worker threads
while the caller computes. This module knows bytes, files and which expert was used when, but no transformers.

An interrupt (Ctrl-C, or an exception that another thread raises in this one) may come between any two bytecodes, also
during cleanup. So no call relies on the completion of the previous one: `_alone` notes an incomplete call, and the next
call first rebuilds its state from the pools' tables of records.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.pieces import ExpertFiles
from ..ops.records import Records
from .places import Adopt
from .pool import Slot, SlotPool
from .pools import Pools
from .reader import DEFAULT_WORKERS, Check, ExpertReader, as_they_end
from .source import ARRIVING, CLOSED, IN_MEMORY, ExpertLoader, IoMode, Key, Lease, TooManyExpertsError, asked_for
from .stats import Asked, LoaderStats

DEFAULT_CACHE_BYTES = 2 << 30
WATCH_SECONDS = 0.5  # seconds between two checks while nothing is computed


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
        least_slots: number of records that a request may always ask for; the pool is never smaller.
        buffer_bytes: bytes of the largest array that the device allows (Metal).
        workers: number of reading threads.
        check: called with each record when it has been read for the first time, as for `ExpertReader`.
        copied: whether records are copied into device memory as they arrive; by default on CUDA without `adopt`.
        adopt: how MLX adopts the pool's memory (`places.Adopt`); by default as Metal does, on Metal.
        reader: replaces the default reader (direct I/O), in tests.

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
        least_slots: int | None = None,
        buffer_bytes: int | None = None,
        workers: int = DEFAULT_WORKERS,
        copied: bool | None = None,
        adopt: Adopt | None = None,
        reader: ExpertReader | None = None,
        check: Check | None = None,
    ):
        super().__init__(packed.layout, decision)
        self._busy_before = 0.0
        self._callers: set[int] = set()  # the first two threads that have had a turn
        self._guards: list[mx.array] = []  # guards of leases released in this turn
        self._guards_of = 0  # the thread whose turn it is
        self._is_sound = True  # no call is in progress, and none has been interrupted
        self._in_turn = self._in_interlude = False
        self._asked_by_row: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # this turn's ids, and which were in memory
        self._ahead: list[Key] = []  # guesses that are being read or queued
        self.reader = reader or ExpertReader(packed, workers=workers, check=check)
        self._blocks = self.reader.record_bytes / max(record.size for record in self.layout.records.values())
        weakref.finalize(self, self.reader.close)
        self._least = least_slots or self.layout.num_experts
        sizes = cache_bytes or DEFAULT_CACHE_BYTES, most_bytes or 0
        self.pools = Pools(self.layout, sizes, self._least, buffer_bytes, copied, adopt)
        self._allowance, self._limit = allowance, limit
        if limit is not None:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="pool-watch", daemon=True).start()

    @property
    def stats(self) -> LoaderStats:
        self._stats.busy_seconds = self.reader.busy_seconds - self._busy_before
        return self._stats

    def reset_stats(self) -> None:
        with self._lock:
            super().reset_stats()
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

    def resize(self, nbytes: int) -> int:
        """Resizes the pool to `nbytes`, in whole records, at least as many as a request may ask for and at most the
        pool's largest size; returns the resulting slots, which are more if more are leased. Evicts least recently used
        records.
        """
        with self._alone():
            self._check_open()
            return self._resize(nbytes)

    def _resize(self, nbytes: int) -> int:
        self._collect()
        return sum(
            pool.resize(share, functools.partial(self._evict, pool))
            for pool, share in zip(self.pools, self.pools.shares(nbytes), strict=True)
        )

    def _breathe(self, tokens: int) -> None:
        """Follows the allowed size: shrinks at once, but does not grow for a small gain."""
        with self._alone():
            self.relieve(may_grow=self._allowance is None)
        if self._allowance is None:
            return
        nbytes = self._allowance(tokens, self.pools.device_bytes)
        if self._limit is not None:
            nbytes = min(nbytes, self._limit(self.pools.held_bytes))
        if self.pools.is_due(nbytes):
            self.resize(nbytes)

    def relieve(self, may_grow: bool = False) -> None:
        """Returns memory that the machine is short of, during a call or between two; leased records stay."""
        if self._limit is None:
            return
        before = self.pools.held_bytes
        nbytes = self._limit(before)
        if self.pools.is_due(nbytes, may_grow):
            self._resize(nbytes)
            mx.clear_cache()
            self._stats.given_back += max(before - self.pools.held_bytes, 0)

    def relieve_between_calls(self) -> None:
        """Calls `relieve`, unless a call is in progress, which does it itself, or was interrupted."""
        if self._lock.acquire(blocking=False):
            try:
                if self._is_sound and not self._closed:
                    with self._alone():
                        self.relieve()
            finally:
                self._lock.release()

    @property
    def is_closed(self) -> bool:
        return self._closed

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
        for pool in self.pools:
            pool.reconcile([] if is_own else self._guards)
        if not is_own:  # the thread that made lazy arrays can evaluate them, at the end of this turn
            self._guards = []
        self._ahead = [key for pool in self.pools for key in pool.in_flight() if pool[key].speculative]

    @contextlib.contextmanager
    def turn(self, tokens: int) -> Iterator[bool]:
        """A lazy array can be evaluated only by the thread that made it, and lazy results of a call read memory that
        the next call may reuse. So once several threads have called, all results are evaluated; those of a single
        thread are at least started.
        """
        self.check_process()
        self._check_open()
        with self._lock:
            self._check_open()
            if not self._in_interlude:
                self._breathe(tokens)
                self.is_filling = False
            self._asked_by_row.clear()
            with self._alone():
                self._in_turn = True
                self._guards_of = threading.get_ident()
                if len(self._callers) < 2:
                    self._callers.add(self._guards_of)
                shared = len(self._callers) > 1
                try:
                    yield shared
                finally:
                    self._in_turn = False
                    (mx.eval if shared else mx.async_eval)(self._guards)
                    self._guards = []

    @contextlib.contextmanager
    def interlude(self) -> Iterator[None]:
        if not self._in_turn:
            yield
            return
        guards, self._guards = self._guards, []
        self._in_turn, self._in_interlude, self._is_sound = False, True, True
        try:
            yield
        finally:
            self._guards = guards
            self._in_turn, self._in_interlude, self._is_sound = True, False, False

    def request(self, layer: int, ids: np.ndarray) -> Lease:
        self._check_open()
        keys, inverse = asked_for(layer, ids)
        ready = [True] * len(keys)
        lease = Lease(self, keys, inverse, ready)
        if not any(pool.is_leased for pool in self.pools):  # the smallest pool holds only one lease
            self.relieve()
        self._collect()
        try:
            self._admit(self.pools.of[layer], keys, ready)
        except BaseException:
            lease.release()
            raise
        self._note_asked(layer, ids, keys, ready)
        if ids.ndim == 2 and (len(ids) > 1 or self.counts_rows):
            self._note_rows(layer, ids, lease.ready)
        return lease

    def _note_rows(self, layer: int, ids: np.ndarray, ready: np.ndarray) -> None:
        """Appends to the rows of an earlier part of the step."""
        earlier = self._asked_by_row.get(layer)
        if earlier is not None:
            ids, ready = (np.concatenate(both) for both in zip(earlier, (ids, ready), strict=True))
        self._asked_by_row[layer] = ids, ready

    def asked_by_row(self) -> list[Asked]:
        if not self._asked_by_row:
            return []
        layers, arrays = list(self._asked_by_row), list(self._asked_by_row.values())
        ids, ready = (np.stack(one) for one in zip(*arrays, strict=True))  # [layers, R, K]
        keys = ids + self.layout.num_experts * np.arange(len(layers))[:, None, None]
        sizes = np.array([self.layout.records[layer].size for layer in layers], float)
        sizes *= self._blocks  # scaled up to whole blocks
        missed, (layer, row, _) = keys[~ready], np.nonzero(~ready)
        nbytes = np.bincount(row, sizes[layer] / np.bincount(missed)[missed], ids.shape[1])
        hits, misses = ready.sum((0, 2)).tolist(), (~ready).sum((0, 2)).tolist()
        return [Asked(*counts) for counts in zip(hits, misses, nbytes.tolist(), strict=True)]

    def _places(self) -> list[tuple[Key, int]]:
        return [
            (key, IN_MEMORY if pool[key].read is None else ARRIVING) for pool in self.pools for key in pool.records()
        ]

    def hint(self, keys: Sequence[Key]) -> list[Key]:
        """Begins to read records that may be wanted next, in this order; returns those that begin to be read now.

        First drops queued reads of an earlier hint that this one does not name. For a guess, only records are evicted
        that are not leased and that this call does not request.
        """
        if self._closed or self._in_interlude:
            return []
        self._drop_queued(set(keys))
        self._collect()
        begun: list[Key] = []
        missing = [key for key in keys if self.pools.of[key[0]].find(key) is None]
        for key in missing:
            pool = self.pools.of[key[0]]
            if key in pool:  # requested twice
                continue
            slot = self._claim(pool, for_guess=True)
            if slot is None:
                break
            self._submit(pool, key, slot, speculative=True)
            begun.append(key)
        self._ahead += begun
        self._stats.prefetched += len(begun)
        return begun

    def intend(self, layer: int, ids: Sequence[int]) -> None:
        self.pools.intend(layer, ids)

    def give_way(self, layer: int, ids: Sequence[int]) -> None:
        """Makes these records the first to be evicted.

        Otherwise a pass over all layers that is larger than the pool would leave nothing for the next pass.
        """
        self.pools.give_way(layer, ids)

    def take_back(self, rows: int) -> None:
        for layer, (ids, ready) in self._asked_by_row.items():
            read = ids[rows:][~ready[rows:]]
            self.give_way(layer, np.setdiff1d(read, ids[:rows]).tolist())
        self._asked_by_row.clear()

    def holds(self, layer: int) -> bool:
        return self.pools.holds(layer)

    def slots_of(self, layer: int) -> int:
        return self.pools.of[layer].slots

    def slots_per_layer(self, spare: int = 0) -> int:
        return self.pools.slots_per_layer(spare)

    def wait_for(self, layer: int) -> None:
        with self._alone():
            self._take_in([key for key in self.in_flight if key[0] == layer])

    def drain(self) -> None:
        with self._alone():
            self._take_in(self.in_flight)

    def invalidate(self) -> None:
        with self._alone():
            self._take_in(self.in_flight)
            in_use = any(pool.pinned_besides([]) for pool in self.pools)
            for pool in [] if in_use else self.pools:
                self._empty(pool)
        if in_use:
            raise RuntimeError("the expert pool cannot be emptied while a lease of experts is in use")

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        if self._closed:
            return [ExpertIOError(CLOSED)]
        if not keys:
            return []
        start, failures, pool = time.perf_counter(), [], self.pools.of[keys[0][0]]
        if pool.holds(keys):
            return []
        for key in pool.in_turn(keys):
            error = self._arrived(pool, key)
            if error is None and key not in pool:
                error = ExpertIOError(f"reading expert {key[1]} of layer {key[0]} failed")
            failures += [] if error is None else [error]
        self._stats.wait_seconds += time.perf_counter() - start
        return failures[:1]

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
            self._take_in(self.in_flight)
            for pool in self.pools:
                self._empty(pool)
                pool.give_back()
            self.pools.clear()

    def _admit(self, pool: SlotPool, keys: list[Key], ready: list[bool]) -> None:
        """Pins the records of `keys` and submits the missing reads; returns which are in memory."""
        held = pool.pinned_besides(keys)
        slots = pool.pin(keys)
        most = min(pool.slots - held, self._least) if pool.copied else pool.slots - held
        if len(keys) > most:
            raise TooManyExpertsError(
                f"{len(keys)} experts were requested at once; the pool has {pool.slots} slots, {held} in use"
            )
        missing = []
        for i, slot in enumerate(slots):
            if slot is None:
                missing.append(keys[i])
                ready[i] = False
            else:
                ready[i] = slot.read is None
                self._count(slot)
        for key in missing:
            self._stats.misses += 1
            slot = self._claim(pool)
            assert slot is not None  # because it is no longer a guess
            self._submit(pool, key, slot, speculative=False)
        self.is_filling |= bool(missing) and not pool.has_been_full

    def _claim(self, pool: SlotPool, for_guess: bool = False) -> Slot | None:
        """A slot whose memory nobody reads; evicts records if necessary. None if a guess must not evict any."""
        while (slot := pool.take()) is None:
            key = pool.victim(for_guess)
            if key is not None:
                self._evict(pool, key)
            elif for_guess:
                return None
            elif not pool.copied:
                raise TooManyExpertsError(f"the device refused memory, and all {pool.slots} slots are in use")
            else:
                self._wait_for_staging(pool)
        return slot

    def _wait_for_staging(self, pool: SlotPool) -> None:
        """Waits until a staging row is free, when requested records use all of them.

        Raises the error of the reads if all failed; the callers that requested them get it too.
        """
        reads = {read: key for key in pool.in_flight() if (read := pool[key].read)}
        assert reads  # otherwise there would have been a slot or a victim
        errors = []
        for read in as_they_end(reads):
            if read.error is None:
                self._arrived(pool, reads[read])
                return
            errors.append(read.error)
        raise errors[0]

    def _evict(self, pool: SlotPool, key: Key) -> None:
        slot = pool[key]
        if slot.read is not None and slot.read.cancel():
            self._stats.prefetched -= slot.speculative
        elif self._arrived(pool, key) is not None:
            return  # the read failed and the record is gone
        else:
            self._stats.wasted += slot.speculative
        pool.drop(key)

    def _submit(self, pool: SlotPool, key: Key, slot: Slot, speculative: bool) -> None:
        slot.speculative = speculative
        slot.read = self.reader.prepare(*key, pool.memory(slot))
        pool.put(key, slot)  # first: a read in progress has an owner
        self.reader.submit(slot.read, speculative)

    def _count(self, slot: Slot) -> None:
        if slot.read is None:
            self._stats.hits += 1
            self._stats.prefetch_hits += slot.speculative
        else:
            self._stats.misses += 1
            self._stats.late += 1
            self.reader.promote(slot.read)
        slot.speculative = False

    def _collect(self) -> None:
        """Marks records that have arrived as present, so that they may be evicted.

        A failed read stays until the lease that waits for it has seen its error.
        """
        for pool in self.pools:
            for key in pool.in_flight():
                read = pool[key].read
                if read is not None and read.is_over and not (read.error is not None and pool.pinned(key)):
                    self._arrived(pool, key)

    def _arrived(self, pool: SlotPool, key: Key) -> ExpertIOError | None:
        """Waits for one record; drops a failed one and returns its error."""
        slot = pool.get(key)
        if slot is None or slot.read is None:
            return None
        error = slot.read.wait()  # not raised here: its traceback would keep the callers' frames
        if error is not None:
            pool.drop(key)
            return error
        nbytes = slot.read.result()
        pool.arrived(key)
        self._stats.bytes_read += nbytes
        return None

    def _drop_queued(self, wanted: set[Key]) -> None:
        """Drops queued guesses that are not `wanted` and that no thread has begun to read."""
        left = []
        for key in self._ahead:
            pool = self.pools.of[key[0]]
            slot = pool.get(key)
            if slot is None or not slot.speculative or slot.read is None:
                continue  # already used, read or evicted
            if key in wanted or not slot.read.cancel():
                left.append(key)
            else:
                pool.drop(key)
                self._stats.prefetched -= 1
        self._ahead = left

    def _take_in(self, keys: list[Key]) -> None:
        for key in keys:
            self._arrived(self.pools.of[key[0]], key)

    def _empty(self, pool: SlotPool) -> None:
        for key in pool.records():
            self._stats.wasted += pool[key].speculative
            pool.drop(key)


def _watch(loader: "weakref.ref[StreamedExperts]") -> None:
    """A thread that returns memory while nothing is computed, until the loader is closed or collected."""
    while (experts := loader()) is not None and not experts.is_closed:
        experts.relieve_between_calls()
        del experts
        time.sleep(WATCH_SECONDS)
