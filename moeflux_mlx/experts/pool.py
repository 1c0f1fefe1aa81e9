"""The memory for expert records: which record is in which place, who still reads it, and which one is evicted next.

The CPU and Metal read a record's memory in place (`places.py`). On CUDA each record is copied to its own array in
device memory, because updating a part of a shared array would copy all of it; the host's memory is `Staging`.
The pool knows neither files nor threads, only reads. It can be resized; the most recently used records stay.

A caller may be interrupted between any two bytecodes. The table of records is authoritative: it says who owns a row and
which reads are in progress, and each change to it is one operation. The other attributes are for speed; `reconcile`
rebuilds them from the table.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import mlx.core as mx
import numpy as np

from ..formats.record import Key, Record
from .places import AddressRange, Adopt, Buffers, Places
from .ranking import Ranking
from .reads import as_they_end
from .record_table import RecordTable, Tables
from .staging import NOWHERE, HostRecord, Slot, Staging

WORTH_GROWING = 16  # a pool grows by at least 1/16, so that it is not resized for each token


class SlotPool:
    """At most `slots` records of one size, of which the one that was used least of late is evicted (`Ranking`).

    Args:
        nbytes: bytes of memory for a record.
        slots: number of records to keep, until `resize`.
        staging: None keeps records where they were read to. With a number, each record is copied to its own array on
            arrival, and this many records may be read at once.
        most: the most slots that `resize` may set.
        least: the fewest; for memory that is adopted.
        largest: bytes of the largest array that the device can adopt.
        adopt: how MLX adopts memory (`places.Adopt`); None: the CPU reads the records.
        step: number of requests in a step, as for `Ranking`.
        host: with `staging`: the most records that stay in host memory after they were copied.

    Attributes:
        places: the memory.
        ranking: the order of eviction.
        staging: the host's memory where records are copied, else None.
        reserve: slots that reads which nobody waits for leave free.
        intended, foretold: records that are wanted soon, and those that the next layer will probably request.
        has_been_full: whether a record had no free memory since the pool last grew.
    """

    def __init__(
        self,
        nbytes: int,
        slots: int,
        staging: int | None = None,
        most: int | None = None,
        *,
        least: int = 1,
        largest: int | None = None,
        adopt: Adopt | None = None,
        step: int = 0,
        host: int = 0,
    ):
        self.nbytes = nbytes
        self.copied = staging is not None
        self.most = slots if most is None else most
        self.ranking = Ranking(step)
        self._tables = Tables()
        self.staging = None if staging is None else Staging(nbytes, staging, self.ranking, host, self._tables.note)
        self.places: Places
        if self.staging is not None:
            self.places = self.staging.places
        elif adopt is not None:
            self.places = buffers = Buffers(nbytes, self.most, least, largest, adopt)
            self.most = buffers.most
        else:
            self.places = AddressRange.of_pages(self.most, nbytes)
        self.slots = self.fit(min(slots, self.most))
        if not self.copied:
            self.places.aim(self.slots, {})
        self._used: dict[Key, Slot] = {}
        self._leased: dict[int, Sequence[Key]] = {}  # by the identity of the keys
        self._arriving: set[Key] = set()
        self.intended, self.foretold = set[Key](), set[Key]()
        self.has_been_full, self.reserve = False, 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the records take from the machine; of adopted memory, with all places."""
        return len(self) * self.nbytes if self.copied else self.places.held_bytes(len(self))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for records that stay there, and for staging beside them."""
        return 0 if self.staging is None else self.staging.held_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of MLX's arrays."""
        return self.held_bytes + self.host_bytes if self.copied or self.places.is_adopted else 0

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, key: Key) -> Slot:
        return self._used[key]

    def get(self, key: Key) -> Slot | None:
        return self._used.get(key)

    def holds(self, keys: Iterable[Key]) -> bool:
        """Whether all these records have arrived."""
        return self._arriving.isdisjoint(keys) and all(map(self._used.__contains__, keys))

    def put(self, key: Key, slot: Slot) -> None:
        """Enters a claimed slot, whose read is prepared if it has none of the host's records. If the read is never
        submitted, `reconcile` finds the slot.
        """
        self._used[key] = slot
        if slot.device is None:
            self._arriving.add(key)
        elif self.staging is not None:
            self.staging.copying[key] = slot
            self._tables.note(key)
        self.ranking.enter(key)

    def victim(self, for_guess: bool, wanted: Key | None = None) -> Key | None:
        """The record to evict before `take` of a wanted record can succeed: the one of the lowest rank that is not
        pinned.

        A record that the last step has used is chosen only if there is no other. So is one that is intended, foretold
        or still arriving, but never for a guess.
        """
        row_wanted = self.staging is not None and not self.staging.available
        row_wanted &= wanted is None or not self.on_host(wanted)
        if not row_wanted and (unwanted := self._unwanted(1)):
            return unwanted[0]
        if for_guess:
            return None
        pinned = set().union(*list(self._leased.values()))
        return self.ranking.first(lambda key: key not in pinned and (not row_wanted or self._is_arriving(key)))

    def surplus(self, more: int) -> list[Key]:
        """Records to evict before `more` records are read, as `victim` chooses them for a guess, at once: as many as
        lack a slot, but no more than may be read now.
        """
        if self.staging is not None:
            more = min(more, self.staging.available)
        short = len(self._used) + more - self.slots
        if short <= 0:
            return []
        self.has_been_full = True
        return self._unwanted(short)

    def _unwanted(self, count: int) -> list[Key]:
        """Up to `count` records to evict, lowest rank first, that are neither pinned, wanted soon nor arriving."""
        wanted = self.intended.union(self.foretold, *list(self._leased.values()))
        return self.ranking.lowest(count, lambda key: not (key in wanted or self._is_arriving(key)), spare_recent=True)

    def _is_arriving(self, key: Key) -> bool:
        return self._used[key].read is not None

    @property
    def is_full(self) -> bool:
        return len(self._used) >= self.slots

    @property
    def has_room(self) -> bool:
        """Whether a record may be read that nobody asked for, without a wait."""
        return not self.is_warm and (self.places.room > 0 if self.staging is None else self.staging.has_room)

    @property
    def is_warm(self) -> bool:  # no room is left for what nobody asked for
        return len(self._used) + self.reserve >= self.slots

    def on_host(self, key: Key) -> bool:
        """Whether the record is not in the device's memory and stayed in the host's."""
        return self.staging is not None and key not in self._used and key in self.staging.host

    def take(self, key: Key | None = None) -> Slot | None:
        """A free slot for the record, if there is one; the record is in it if it is `on_host`."""
        self.has_been_full |= self.is_full
        if self.is_full:
            return None
        if self.staging is not None:
            if key is not None and self.on_host(key):
                return self.staging.take_from_host(key)
            place = self.staging.take()
        else:
            place = self.places.take()
        if place is None:
            self.slots = self.fit(self.slots)  # fewer if the device refused a buffer
        return None if place is None else Slot(place)

    def memory(self, slot: Slot) -> memoryview:
        return self.places.row(slot.row).data.cast("B")

    def arrived(self, key: Key) -> None:
        """Marks the record as complete."""
        slot = self._used[key]
        if self.staging is not None and slot.device is None:
            self.staging.copy(key, slot)
        slot.read = None
        self._arriving.discard(key)
        self._tables.note(key)

    def finish_copies(self) -> None:
        """Waits for the copies into device memory."""
        if self.staging is not None:
            self.staging.finish_all()

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array | tuple[mx.array, ...], np.ndarray]:
        """(memory of records, as `Records` has it, slot of each key int32)."""
        slots = [self._used[key] for key in keys]
        if self.copied:
            copies = tuple(slot.device for slot in slots if slot.device is not None)
            assert len(copies) == len(keys)  # the caller has waited for them
            return copies, np.arange(len(keys), dtype=np.int32)
        return self.places.memory, np.array([slot.row for slot in slots], np.int32)

    def table(self, layer: int, record: Record, experts: int) -> RecordTable | None:
        """The layer's records that kernels can read, on the device or the host; None if there are none."""

        def slot_of(expert: int) -> Slot | HostRecord | None:
            slot = self._used.get((layer, expert))
            if slot is None:
                return None if self.staging is None else self.staging.host_record((layer, expert))
            return slot if slot.read is None and (slot.device is not None or not self.copied) else None

        return self._tables.get(layer, record, experts, slot_of, () if self.copied else self.places.memory)

    def pays_to_copy(self, key: Key) -> bool:
        """Whether a record that was just used in host memory should be copied to the device."""
        return not self.is_full or any(self.ranking.is_worth_a_copy(key, victim) for victim in self._unwanted(1))

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Keeps these records until `unpin` is called with the same list; returns their slots."""
        if keys:  # `unpin` is called only for pools with keys
            self._leased[id(keys)] = keys
        self.ranking.request(keys)
        return [self._used.get(key) for key in keys]

    def unpin(self, keys: Sequence[Key], guard: mx.array | None = None) -> None:
        """Ends `pin`; does nothing if these keys no longer hold anything."""
        if guard is not None and id(keys) in self._leased:
            for slot in filter(None, map(self._used.get, keys)):
                self._guard(slot, guard)
        self._leased.pop(id(keys), None)  # last, in one step: if interrupted before, the records stay pinned

    @staticmethod
    def _guard(slot: Slot, guard: mx.array) -> None:
        if slot.guard is not None and slot.guard is not guard:
            mx.eval(slot.guard)  # usually done long ago; if another computation reads the record too, both must end
        slot.guard = guard

    @property
    def is_leased(self) -> bool:
        """Whether somebody may still read a record."""
        return bool(self._leased)

    def pinned(self, key: Key) -> bool:
        return any(key in keys for keys in list(self._leased.values()))

    def pinned_besides(self, keys: Sequence[Key]) -> int:
        return len(set().union(*list(self._leased.values())).difference(keys))

    def demote(self, key: Key) -> None:
        """Makes the record the first to be evicted."""
        if key in self._used:
            self.ranking.demote(key)

    def drop(self, key: Key) -> None:
        """Removes a record that nobody reads and whose read has ended."""
        slot = self._used[key]
        mx.eval(slot.guard)
        if self.staging is not None and slot.is_copied:
            self.staging.finish(key)
        self._tables.note(key)
        del self._used[key]
        self.ranking.leave(key)
        self._arriving.discard(key)
        if slot.row != NOWHERE:
            self.places.put(slot.row)

    def reconcile(self, abandoned: Sequence[mx.array] = ()) -> None:
        """After an interrupted call: releases everything, and rebuilds the other attributes from the table of records.

        Args:
            abandoned: guards that will never be evaluated.
        """
        self._leased.clear()
        self._tables.clear()
        self.places.queued(())
        self.intended, self.foretold = set(), set()
        for key, slot in list(self._used.items()):
            if any(slot.guard is guard for guard in abandoned):
                slot.guard = None
            if slot.read is not None and (slot.read.is_cancelled or not slot.read.is_queued and slot.read.cancel()):
                self.drop(key)
        self.ranking.reset(self._used)
        self._arriving = {key for key, slot in self._used.items() if slot.read is not None}
        if self.staging is not None:
            self.staging.reconcile(self._used)
        else:
            self.places.aim(self.slots, self._owned())

    def _owned(self) -> dict[int, bool]:
        """The places that records own, and whether the record must stay there: it is leased or being read."""
        leased = set().union(*list(self._leased.values()))
        return {slot.row: slot.read is not None or key in leased for key, slot in self._used.items()}

    def fit(self, slots: int) -> int:
        """The number of slots that `resize` reaches if no record is leased."""
        return slots if self.copied else self.places.fit(slots)

    def is_due(self, slots: int, may_grow: bool) -> bool:
        """Whether the pool should be resized if it may have `slots` slots."""
        slots = self.fit(slots)
        grown = slots - self.slots
        if grown <= 0:
            return grown < 0 or not self.places.is_settled
        return may_grow and (grown >= max(self.slots / WORTH_GROWING, 1) or slots == self.most)

    def resize(self, slots: int, evict: Callable[[Key], object]) -> int:
        """Keeps at most `slots` records and their memory from now on; returns the resulting number of slots.

        The result is larger if more records are pinned, and is rounded to whole buffers of adopted memory.

        Args:
            evict: removes a record after its read is cancelled or over.
        """
        assert 0 < slots <= self.most
        slots = self.fit(slots)
        self.has_been_full &= slots <= self.slots
        if len(self._used) > slots:
            self.finish_copies()  # otherwise `victim` would look for a record that frees a staging row
        while len(self._used) > slots and (key := self.victim(for_guess=False)) is not None:
            evict(key)
        reached = max(slots, len(self._used))
        if not self.copied:
            self._set_memory(reached)
        self.slots = reached
        return reached

    def _set_memory(self, slots: int) -> None:
        """Takes or returns memory, so that there is enough for `slots` records, and moves records out of the memory
        that goes. A record that is pinned or arriving stays where it is, and its memory goes later.
        """
        owned = self._owned()
        self.places.aim(slots, owned)
        if slots >= self.slots and self.places.is_settled:
            return
        for key, slot in self._used.items():
            if self.places.goes(slot.row) and not owned[slot.row]:
                self._move(key, slot)
        self.places.release(self._owned())

    def resize_host(self, records: int) -> None:
        """Lets at most so many records stay in host memory from now on, and gives back the rest of it."""
        if self.staging is not None and (records != self.staging.host.records or not self.places.is_settled):
            self.finish_copies()
            self.staging.resize_host(records, self._owned())

    def give_back(self) -> None:
        """Returns all memory of a pool without records."""
        if self.staging is not None:
            self.staging.host.clear()
        self.places.aim(0, {})
        self.places.release(())

    def _move(self, key: Key, slot: Slot) -> None:
        """Moves a record to the first free place that stays."""
        mx.eval(slot.guard)
        self.places.row(self.places.free[0])[:] = self.places.row(slot.row)
        place = self.places.take()
        assert place is not None
        slot.row = place
        self._tables.note(key)

    def in_turn(self, keys: list[Key]) -> Iterable[Key]:
        """The slots in the order in which to wait for them. Records that are copied come as they arrive, so that copies
        overlap with reads.
        """
        if not self.copied:
            return keys
        reads = {slot.read: key for key in keys if (slot := self.get(key)) and slot.read}
        present = [key for key in keys if key not in reads.values()]
        return chain(present, (reads[read] for read in as_they_end(reads)))

    def records(self) -> list[Key]:
        return list(self._used)

    def in_flight(self) -> list[Key]:
        """Records whose read is in progress, or has ended without a call of `arrived`."""
        return list(self._arriving)
