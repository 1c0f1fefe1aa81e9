"""The host's memory of a pool that copies records into a device's memory: rows to read into, and records that stay.

A record owns its row until the copy has been computed. Then the row is free, or the record stays there
(`host_tier.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from ..formats.record import Key
from ..ops import backend
from .host_tier import HostRecord, HostTier
from .memory import as_result, host_memory, on_device, staging_memory
from .places import AddressRange, Buffers, Places
from .ranking import Ranking
from .reads import Read

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
