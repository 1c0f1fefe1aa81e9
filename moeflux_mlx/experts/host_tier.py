"""Records that stay in host memory after they were copied to a GPU, so that a later request copies them again instead
of reading the disk.

A record stays in the place that it was read into, so keeping it copies nothing. What is on the GPU may be in host
memory too. When there is no room, the record goes that was used least of late, on the GPU or not.
"""

from collections.abc import Collection

from ..formats.record import Key
from .places import Places
from .ranking import Ranking


class HostTier:
    """At most `records` records, in places of `places` that nobody else owns.

    Each change of the table of records is one operation. If a call is interrupted, a place may belong to nobody, until
    `SlotPool.reconcile` frees it.

    Args:
        ranking: of the pool on the GPU; its counts are those of the host's records too.
        records: the most records, until `resize`.

    Attributes:
        kept: the place of each record.
    """

    def __init__(self, places: Places, ranking: Ranking, records: int):
        self.places, self.records = places, records
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
