"""Records that stay in host memory after they were copied to a GPU, so that a later request copies them again instead
of reading the disk.

A record stays in the place that it was read into, so keeping it copies nothing. What is on the GPU may be in host
memory too. When there is no room, the record goes that was used least of late, on the GPU or not. Kernels of layers
that are queued ahead read the records where they are (`record_table.py`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..formats.record import Key
from .places import Places
from .ranking import Ranking


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
