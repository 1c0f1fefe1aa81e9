"""Reads of records into the slots of their pools: which record gets a slot, which one is evicted for it, and which
reads are guesses. It does not know who calls, and keeps out no other thread.

A caller may be interrupted between any two bytecodes; `reconcile` then rebuilds the state from the pools' tables of
records.
"""

import functools
import time
from collections.abc import Sequence

import mlx.core as mx

from ..errors import ExpertIOError
from ..formats.record import ExpertLayout, Key
from .pool import Slot, SlotPool
from .pools import Pools
from .reader import ExpertReader
from .reads import GUESSED, REQUESTED, WARMING, as_they_end
from .record_table import RecordTable
from .source import TooManyExpertsError
from .stats import LoaderStats

RESERVE = 16  # places of a pool that are kept free while layers are queued: two layers' experts
LEAST_SLOTS_EACH = 32  # slots of a pool for each place of its reserve


class PoolReads:
    """Args:
    pools: the memory.
    reader: reads the files.
    least: number of records that a request may always ask for.
    stats: what it counts into.
    """

    def __init__(self, pools: Pools, reader: ExpertReader, least: int, stats: LoaderStats):
        self.pools, self.reader, self._least, self.stats = pools, reader, least, stats
        self._ahead: list[Key] = []  # guesses that are being read or queued

    def admit(self, pool: SlotPool, keys: list[Key], ready: list[bool]) -> bool:
        """Pins the records of `keys`, submits the missing reads, and notes in `ready` which are in memory.

        Returns:
            Whether something is read into memory that was free.

        Raises:
            TooManyExpertsError: the pool has no slots for all of them.
        """
        held = pool.pinned_besides(keys)
        slots = pool.pin(keys)
        most = min(pool.slots - held, self._least) if pool.copied else pool.slots - held
        if len(keys) > most:
            raise TooManyExpertsError(
                f"{len(keys)} experts were requested at once; the pool has {pool.slots} slots, {held} in use"
            )
        missing, needs_drive = [], False
        for i, slot in enumerate(slots):
            if slot is None:
                missing.append(i)
            else:
                ready[i] = slot.read is None
                needs_drive |= not ready[i] or slot.speculative and not slot.from_host
                self._count(slot)
        self._make_room(pool, len(missing))
        for i in missing:
            ready[i] = False  # first: the search for memory may fail
            slot = self._claim(pool, keys[i])
            assert slot is not None  # because it is no longer a guess
            self._submit(pool, keys[i], slot, REQUESTED)
            ready[i] = slot.read is None
            self.stats.hits += ready[i]
            self.stats.host_hits += ready[i]
            self.stats.misses += not ready[i]
            needs_drive |= not ready[i]
        self.stats.drive_requests += needs_drive
        return bool(missing) and not pool.has_been_full

    def guess(self, keys: Sequence[Key]) -> list[Key]:
        """As `ExpertLoader.hint`.

        First drops queued reads of an earlier hint that this one does not name. For a guess, only records are evicted
        that are not leased and that this call does not request.
        """
        self._drop_queued(set(keys))
        self.collect()
        begun: list[Key] = []
        self.pools.foretell(keys)
        absent: list[Key] = []
        for key in dict.fromkeys(keys):
            known = self.pools.of[key[0]].get(key)
            if known is None:
                absent.append(key)
            elif known.warming and known.read is not None:
                self.reader.promote(known.read, GUESSED)
        for pool in self.pools:
            self._make_room(pool, sum(self.pools.of[layer] is pool for layer, _ in absent))
        for key in absent:
            pool = self.pools.of[key[0]]
            slot = self._claim(pool, key, for_guess=True)
            if slot is None:
                break
            self._submit(pool, key, slot, GUESSED)
            begun.append(key)
        self._ahead += begun
        self.stats.prefetched += len(begun)
        return begun

    def warm(self, key: Key, uses: float) -> bool:
        """Begins to read a record into free memory, as one that has been used so often; evicts none. Returns whether
        there was memory.

        Raises:
            ExpertIOError: the device refuses memory without which the pool is too small.
        """
        pool = self.pools.of[key[0]]
        slot = pool.take(key) if pool.has_room else None
        if slot is None:
            return False
        pool.ranking.use(key, uses)
        self._submit(pool, key, slot, WARMING)
        self.stats.warmed += 1
        return True

    def table(self, layer: int, layout: ExpertLayout) -> RecordTable | None:
        """As `ExpertLoader.table`."""
        self.collect()
        pool = self.pools.of[layer]
        if not (pool.copied or pool.places.is_adopted):
            return None  # the CPU's kernels need none
        return pool.table(layer, layout.records[layer], layout.count(layer))

    def keep_reserve(self) -> None:
        """Evicts records of adopted memory early while layers are queued: what reads a record's place must end before
        the place is used again, and a missing record should not wait for that.
        """
        for pool, one in zip(self.pools, self.pools.classes, strict=False):  # none after they are cleared
            if not pool.copied:
                pool.reserve = min(RESERVE, pool.slots // LEAST_SLOTS_EACH) if pool.slots < one.records else 0
                self._make_room(pool, pool.reserve)

    def use(self, keys: Sequence[Key], table: RecordTable) -> bool:
        """Counts uses of a layer's records if all were in the table; returns whether."""
        pool = self.pools.of[keys[0][0]]
        slots, on_host, plain = [table.slots.get(expert) for _, expert in keys], [], 0
        if None in slots:
            return False
        pool.ranking.request(keys)
        for key, slot in zip(keys, slots, strict=True):
            if not isinstance(slot, Slot):
                on_host.append(key)
            elif slot.speculative or slot.warming:
                self._count(slot)
            else:
                plain += 1
        self.stats.hits += plain + len(on_host)
        self.stats.host_hits += len(on_host)
        self.stats.host_bytes += len(on_host) * pool.nbytes
        self._copy_one(pool, on_host)
        return True

    def _copy_one(self, pool: SlotPool, keys: Sequence[Key]) -> None:
        """Begins to copy the first record that is worth it from host memory, where it was used. It is one at a time,
        since the memory of the record that goes is free only when queued layers have ended.
        """
        key = next((key for key in keys if pool.on_host(key) and pool.pays_to_copy(key)), None)
        slot = None if key is None else self._claim(pool, key, for_guess=True)
        if key is None or slot is None:
            return
        if slot.device is None:  # the record that went has taken the place of this one
            pool.places.put(slot.row)
        else:
            self._submit(pool, key, slot, REQUESTED)

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        """As `ExpertLoader.finish`, for at least one record."""
        start, failures, pool = time.perf_counter(), [], self.pools.of[keys[0][0]]
        if pool.holds(keys):
            return []
        for key in pool.in_turn(keys):
            error = self._arrived(pool, key)
            if error is None and key not in pool:
                error = ExpertIOError(f"reading {self.pools.layout.named(key)} failed")
            failures += [] if error is None else [error]
        self.stats.wait_seconds += time.perf_counter() - start
        return failures[:1]

    def collect(self) -> None:
        """Marks records that have arrived as present, so that they may be evicted.

        A failed read stays until the lease that waits for it has seen its error.
        """
        for pool in self.pools:
            for key in pool.in_flight():
                read = pool[key].read
                if read is not None and read.is_over and not (read.error is not None and pool.pinned(key)):
                    self._arrived(pool, key)

    def take_in(self, keys: list[Key]) -> None:
        """Waits for the reads of these records; failed ones are dropped."""
        for key in keys:
            self._arrived(self.pools.of[key[0]], key)

    def empty(self, pool: SlotPool) -> None:
        """Forgets the records of a pool."""
        for key in pool.records():
            self.stats.wasted += pool[key].speculative
            pool.drop(key)
        if pool.staging is not None:
            pool.staging.host.clear()

    def resize(self, nbytes: int) -> int:
        """Resizes the pools to `nbytes` together, in whole records; returns the resulting slots."""
        self.collect()
        return sum(
            pool.resize(share, functools.partial(self._evict, pool))
            for pool, share in zip(self.pools, self.pools.shares(nbytes), strict=True)
        )

    def resize_host(self, nbytes: int) -> bool:
        """Resizes what stays in host memory to `nbytes` together; returns whether it is less now."""
        before = self.pools.host_bytes
        for pool, share in zip(self.pools, self.pools.host_shares(nbytes), strict=True):
            pool.resize_host(share)
        given_back = max(before - self.pools.host_bytes, 0)
        self.stats.given_back += given_back
        return given_back > 0

    def reconcile(self, abandoned: list[mx.array]) -> None:
        """After an interrupted call: as `SlotPool.reconcile`, for all pools."""
        for pool in self.pools:
            pool.reconcile(abandoned)
        self._ahead = [key for pool in self.pools for key in pool.in_flight() if pool[key].speculative]

    def _make_room(self, pool: SlotPool, records: int) -> None:
        """Evicts at once what goes for so many records, if they need memory of records that nobody wants."""
        for key in pool.surplus(records) if records else ():
            self._evict(pool, key)

    def _claim(self, pool: SlotPool, key: Key, for_guess: bool = False) -> Slot | None:
        """A slot whose memory nobody reads; evicts records if necessary. None if a guess must not evict any."""
        while (slot := pool.take(key)) is None:
            victim = pool.victim(for_guess, key)
            if victim is not None:
                self._evict(pool, victim)
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
            self.stats.prefetched -= slot.speculative
            self.stats.warmed -= slot.warming
        elif self._arrived(pool, key) is not None:
            return  # the read failed and the record is gone
        else:
            self.stats.wasted += slot.speculative
        pool.drop(key)

    def _submit(self, pool: SlotPool, key: Key, slot: Slot, purpose: int) -> None:
        slot.speculative, slot.warming = purpose == GUESSED, purpose == WARMING
        if slot.device is not None:
            self.stats.host_bytes += pool.nbytes
            pool.put(key, slot)
            return
        slot.read = self.reader.prepare(*key, pool.memory(slot))
        pool.put(key, slot)  # first: a read in progress has an owner
        self.reader.submit(slot.read, purpose)

    def _count(self, slot: Slot) -> None:
        if slot.read is None:
            self.stats.hits += 1
            self.stats.prefetch_hits += slot.speculative
        else:
            self.stats.misses += 1
            self.stats.late += 1
            self.reader.promote(slot.read, REQUESTED)
        self.stats.warm_hits += slot.warming
        slot.speculative = slot.warming = False

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
        self.stats.bytes_read += nbytes
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
                self.stats.prefetched -= 1
        self._ahead = left
