"""The host's memory of a pool that copies records into a device's memory: rows to read into, and records that stay.

A record owns its row until the copy has been computed. Then the row is free, or the record stays there (`HostTier`), so
that a later request copies it again instead of reading the disk. Keeping it copies nothing. What is on the GPU may be
in host memory too. When there is no room, the record goes that was used least of late, on the GPU or not. Kernels of
layers that are queued ahead read the records where they are (`record_table.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..formats.record import Key
from ..ops import backend
from .memory import as_result, host_memory, on_device, staging_memory
from .places import AddressRange, Buffers, Places
from .ranking import Ranking
from .reads import Read


@dataclass(eq=False)
class HostRecord:
    """A record in a place of host memory, as an array [words] that kernels can read until the place is settled."""

    row: int
    device: mx.array


class HostTier:
    """At most `records` records, in places of `places` that nobody else owns.

    Each change of the table of records is one operation. If a call is interrupted, a place may belong to nobody, until
    `SlotPool.reconcile` frees it.

    Args:
        ranking: of the pool on the GPU; its counts are those of the host's records too.
        records: the most records, until `resize`.
        changed: is called when a record comes or goes.

    Attributes:
        kept: the place of each record.
        lent: places whose records tables may have had since they were read.
        readers: what must be evaluated before such a place is used again.
    """

    def __init__(self, places: Places, ranking: Ranking, records: int, changed: Callable[[Key], object]):
        self.places, self.records, self._changed = places, records, changed
        self.lent = set[int]()
        self.readers: Sequence[object] = ()
        self.ranking = ranking.beside()
        self.kept: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.kept

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def owned(self) -> list[int]:
        """The places of all records."""
        return list(self.kept.values())

    def take(self, key: Key) -> int:
        """The place of a record, which belongs to the caller from now on."""
        place = self.kept.pop(key)
        self.ranking.leave(key)
        self._changed(key)
        return place

    def keep(self, key: Key, place: int) -> None:
        """Takes over a place with a record; frees it, or another one, if there is no room."""
        if not self.records or key in self.kept:
            self.places.put(place)
            return
        while len(self.kept) >= self.records:
            self.give_up()
        self.kept[key] = place
        self.ranking.enter(key)
        self._changed(key)

    def settle(self, place: int) -> None:
        """Waits for what may read the place, which is to be used again."""
        if place in self.lent:
            mx.eval(self.readers)
        self.lent.discard(place)

    def give_up(self) -> None:
        """Frees the place of the record that was used least of late."""
        key = self.ranking.first(lambda key: True)
        assert key is not None
        self.places.put(self.take(key))

    def resize(self, records: int) -> None:
        """Keeps at most so many records from now on."""
        self.records = records
        while len(self.kept) > records:
            self.give_up()

    def move(self) -> None:
        """Moves records out of memory that goes, as long as there are free places elsewhere, and drops the others."""
        for key, place in list(self.kept.items()):
            if self.places.goes(place):
                self.take(key)
                if self.places.free:
                    free = self.places.free[0]
                    self.settle(free)
                    self.places.row(free)[:] = self.places.row(place)
                    taken = self.places.take()
                    assert taken == free
                    self.keep(key, free)

    def clear(self) -> None:
        """Forgets all records."""
        while self.kept:
            self.give_up()

    def reconcile(self, slots: Collection[int]) -> None:
        """Ranks exactly the records that are there. Those whose places slots own belong to these."""
        self.kept = {key: place for key, place in self.kept.items() if place not in slots}
        self.ranking.reset(self.kept)


NOWHERE = -1
BUFFER_BYTES = 512 << 20  # of the memory that is taken or given back at once for records that stay


@dataclass(eq=False)
class Slot:
    """A record in memory, or being read by `read`: in the place `row`, or copied to `device`. The record owns its place
    until the copy has been computed; then `row` is NOWHERE. `guard` must be evaluated before the memory is used again.
    """

    row: int
    read: Read | None = None
    guard: mx.array | None = None
    device: mx.array | None = None
    speculative: bool = False
    warming: bool = False  # read into free memory before anybody asked for it, and not used yet
    from_host: bool = False  # copied from a record that had stayed in host memory

    @property
    def is_copied(self) -> bool:
        """Whether the device may still read the row."""
        return self.device is not None and self.row != NOWHERE


class Staging:
    """Args:
        nbytes: bytes of a record.
        rows: the most records that are read at once.
        ranking: of the pool.
        host: the most records that stay.
        changed: is called when one of them comes or goes.

    Attributes:
        places: the rows.
        host: the records that stay.
        copying: slots whose rows the device may still read, earliest copy first.
    """

    def __init__(self, nbytes: int, rows: int, ranking: Ranking, host: int, changed: Callable[[Key], object]):
        self.rows, self.copying = rows, dict[Key, Slot]()
        self._array: mx.array | None = None
        self.places: Places
        if host:
            count = -(-(rows + host) * nbytes // BUFFER_BYTES)
            self.places = Buffers(nbytes, rows + host, rows, None, host_memory, count)
            self.places.aim(rows + host, {})
        elif backend.name() == "cuda":
            view, self._array = staging_memory(rows, nbytes // 4)
            self.places = AddressRange(view)
        else:
            self.places = AddressRange.of_pages(rows, nbytes)
        self.host = HostTier(self.places, ranking, host, changed)

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes from the machine where records stay; else 0, because the plan counts the rows."""
        return self.places.held_bytes(0) if self.places.is_adopted else 0

    @property
    def has_room(self) -> bool:
        """Whether at least half as many rows are free as may be read at once."""
        return 2 * self.places.room >= self.rows

    @property
    def available(self) -> int:
        """The number of records that can be read without a wait for other reads."""
        return self.places.room + len(self.copying) + len(self.host)

    def take(self) -> int | None:
        """A row to read into, or None if others read into all of them."""
        place = self.places.take()
        if place is None:
            self.free_rows(-(-self.rows // 2))
            if not self.places.room and len(self.host):
                self.host.give_up()  # the system refused memory
            place = self.places.take()
        if place is not None:
            self.host.settle(place)
        return place

    def take_from_host(self, key: Key) -> Slot:
        """A slot for a record that stayed; its copy is being computed."""
        row = self.host.take(key)
        return Slot(row, device=self._copy(row), from_host=True)

    def host_record(self, key: Key) -> HostRecord | None:
        """A record that stayed, where it is; None if it did not."""
        place = self.host.kept.get(key)
        if place is None:
            return None
        assert isinstance(self.places, Buffers)
        self.host.lent.add(place)
        return HostRecord(place, self.places.array(place).reshape(-1))

    def copy(self, key: Key, slot: Slot) -> None:
        """Begins the copy of a record that was read."""
        slot.device = self._copy(slot.row)  # first: without memory for the copy the record has not arrived
        self.copying[key] = slot

    def _copy(self, row: int) -> mx.array:
        """An array [words] in device memory; the copy is being computed."""
        if isinstance(self.places, Buffers):
            rows = self.places.array(row)
        elif self._array is not None:
            rows = self._array[row : row + 1]
        else:
            return on_device(self.places.row(row))
        copy = as_result(rows).reshape(-1)
        mx.async_eval(copy)
        return copy

    def free_rows(self, count: int) -> None:
        """Waits for the earliest copies until so many rows are free, if that is enough."""
        while self.copying and self.places.room < count:
            self.finish(next(iter(self.copying)))

    def finish_all(self) -> None:
        """Waits for all copies."""
        for key in list(self.copying):
            self.finish(key)

    def finish(self, key: Key) -> None:
        """Waits for a copy; its row then stays with the host's records, or is free."""
        slot = self.copying[key]
        mx.eval(slot.device)
        row, slot.row = slot.row, NOWHERE
        self.host.keep(key, row)
        del self.copying[key]

    def resize_host(self, records: int, slots: Mapping[int, bool]) -> None:
        """Lets at most so many records stay, and gives back the memory of the others, from now on.

        Args:
            slots: the rows that slots own, as for `Places.aim`.
        """
        self.host.resize(records)
        self.places.aim(self.rows + records, {**slots, **dict.fromkeys(self.host.owned, False)})
        if not self.places.is_settled:
            self.host.move()
            self.places.release({*slots, *self.host.owned})

    def reconcile(self, used: Mapping[Key, Slot]) -> None:
        """Rebuilds what an interrupted call may have left incomplete, from the table of records."""
        self.copying = {key: slot for key, slot in used.items() if slot.is_copied}
        self.host.reconcile({slot.row for slot in used.values()})
        self.places.find_free({*(slot.row for slot in used.values()), *self.host.owned})
