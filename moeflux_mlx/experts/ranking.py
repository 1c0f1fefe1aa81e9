"""Which record of a pool is evicted next: the one that was used least of late.

Each use counts 1, and half as much after every `HALF_LIFE` steps. The counts of evicted records are kept too, so that a
record that is read again has the rank of all its uses. This order is known as LRFU (Lee et al., 2001). A half-life of 0
would be least-recently-used order, and an infinite one least-frequently-used order. On the routing of a trained model
this one has 10 to 15 % fewer misses than the first and 15 to 35 % fewer than the second (docs/performance.md).

The counts are kept as base-2 logarithms of what they will have been worth when the clock began, so time changes none.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import log2

from ..formats.record import Key

HALF_LIFE = 32.0  # steps; 16 and 64 have up to 1.4 % more misses (results.tsv, "eviction")
MEAN_LIFE = HALF_LIFE / 0.693147  # steps; a record that every step uses has this count in the end
BETWEEN = 2.0**-10  # steps from one request to the next, so that of equal records the earlier one is evicted
FIRST = -(2.0**52)  # the rank of a record without uses; demoted ones have lower integers, the last one the lowest


class Ranking:
    """Ranks the records that are in a pool. `reset` rebuilds what an interrupted call may have left incomplete."""

    def __init__(self) -> None:
        self._clock = 0.0  # in half-lives
        self._counts: dict[Key, float] = {}  # of all records
        self._ranks: dict[Key, float] = {}  # of those in the pool, when they were entered into the heap
        self._heap: list[tuple[float, Key]] = []
        self._demoted = 0

    def pass_time(self, steps: float) -> None:
        self._clock += steps / HALF_LIFE

    def use(self, key: Key, times: float = 1.0) -> None:
        """Counts a use, or several at once."""
        added, count = self._clock + log2(times), self._counts.get(key)
        if count is not None:
            more, less = (added, count) if added > count else (count, added)
            added = more + log2(1.0 + 2.0 ** (less - more))
        self._counts[key] = added
        if self._ranks.get(key, 0.0) < FIRST:
            self.enter(key)

    def enter(self, key: Key) -> None:
        """Ranks a record that is in the pool from now on, or was demoted."""
        self._rank(key, self._counts.get(key, FIRST))

    def demote(self, key: Key) -> None:
        """Makes a record the first to be evicted, until its next use."""
        self._demoted += 1
        self._rank(key, FIRST - self._demoted)

    def _rank(self, key: Key, rank: float) -> None:
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))

    def leave(self, key: Key) -> None:
        """The record is not in the pool any more."""
        self._ranks.pop(key, None)

    def first(self, may_go: Callable[[Key], bool]) -> Key | None:
        """The record of the lowest rank that `may_go`; None if there is none."""
        passed: list[tuple[float, Key]] = []
        try:
            while self._heap:
                rank, key = self._heap[0]
                now = rank if rank < FIRST else self._counts.get(key, FIRST)
                if self._ranks.get(key) != rank:
                    heappop(self._heap)  # evicted, or ranked anew since
                elif now > rank:  # used since
                    heappop(self._heap)
                    self._rank(key, now)
                elif may_go(key):
                    return key
                else:
                    passed.append(heappop(self._heap))
            return None
        finally:
            for entry in passed:
                heappush(self._heap, entry)

    def reset(self, keys: Iterable[Key]) -> None:
        """Ranks exactly the records `keys`, by their counts."""
        ranks = {key: self._counts.get(key, FIRST) for key in keys}
        heap = [(rank, key) for key, rank in ranks.items()]
        heapify(heap)
        self._ranks, self._heap = ranks, heap
