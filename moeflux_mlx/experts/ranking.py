"""Which record of a pool is evicted next: the one that was used least of late, but not in the last step.

Each use counts 1, and half as much after every `HALF_LIFE` steps. The counts of evicted records are kept too, so that a
record that is read again has the rank of all its uses. This order is known as LRFU (Lee et al., 2001); a half-life near
0 is least-recently-used order, an infinite one least-frequently-used order. What the last step used is spared, because
a token often uses what the token before used once. docs/performance.md compares these orders on the routing of a
trained model and on a synthetic one: this one has the most hits on both, with pools of 10 to 90 % of the records.

Counts are kept as base-2 logarithms of what they would be worth when the clock began, so time changes none.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf, log2

from ..formats.record import Key

HALF_LIFE = 32.0  # steps (results.tsv, "pool eviction")
MEAN_LIFE = HALF_LIFE / 0.693147  # steps; a record that every step uses has this count in the end
BETWEEN = 2.0**-10  # steps from one request to the next, so that of equal records the earlier one is evicted
WORTH_A_COPY = 3  # more uses; fewer are often chance
MOST_NOTED = 256  # requests whose uses are counted together, which takes a third of the time
MOST_STALE = 8  # entries of the heap for each record; those that are no longer true go when a victim is looked for
NEVER = -inf  # the logarithm of no uses
FIRST = -(2.0**52)  # the rank of a record without uses; demoted ones have lower integers, the last one the lowest


class Uses:
    """How often all records were used, and when last.

    Attributes:
        requests: the number of requests.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._clock = 0.0  # in half-lives
        self._noted: list[tuple[float, int, Sequence[Key]]] = []  # requests to be counted: the time, number and records
        self._counts: dict[Key, float] = {}
        self._last: dict[Key, int] = {}  # the number of the request that used a record last

    def pass_time(self, steps: float) -> None:
        self._clock += steps / HALF_LIFE

    def request(self, keys: Sequence[Key]) -> None:
        """Counts a use of each of these records, which differ. Keeps the list, because it counts when it is asked."""
        self.requests += 1
        self.pass_time(BETWEEN)
        self._noted.append((self._clock, self.requests, keys))
        if len(self._noted) >= MOST_NOTED:
            self._count()

    def add(self, key: Key, times: float) -> None:
        """Counts several uses at once."""
        self._count()
        added = self._clock + log2(times)
        self._counts[key] = added + log2(1.0 + 2.0 ** min(self._counts.get(key, NEVER) - added, 1023.0))

    @property
    def counts(self) -> dict[Key, float]:
        """Of each record that was used."""
        self._count()
        return self._counts

    @property
    def last(self) -> dict[Key, int]:
        """The number of the request that used a record last, unless the owner of the order has removed it."""
        self._count()
        return self._last

    def worth(self, key: Key) -> float:
        """The count of a record now."""
        return float(2.0 ** (self.counts.get(key, FIRST) - self._clock))

    def _count(self) -> None:
        """Counts the requests that were noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        counts = self._counts
        for clock, number, keys in noted:
            for key in keys:
                counts[key] = clock + log2(1.0 + 2.0 ** (counts.get(key, NEVER) - clock))
            self._last.update(dict.fromkeys(keys, number))


class Ranking:
    """Ranks the records that are in a pool. `reset` rebuilds what an interrupted call may have left incomplete.

    Args:
        requests: number of requests in a step. What the last so many have used is recent.
        uses: counts of all records; None: its own.
    """

    def __init__(self, requests: int = 0, uses: Uses | None = None) -> None:
        self._step, self._uses = requests, uses or Uses()
        self._ranks: dict[Key, float] = {}  # of those in the pool, when they were entered into the heap
        self._heap: list[tuple[float, Key]] = []
        self._demoted: set[Key] = set()  # since whose demotion there was no use
        self._demotions = 0

    def beside(self) -> "Ranking":
        """The order of other records with the same counts."""
        return Ranking(uses=self._uses)

    def pass_time(self, steps: float) -> None:
        self._uses.pass_time(steps)

    def is_worth_a_copy(self, key: Key, other: Key) -> bool:
        """Whether a record that was just used will probably be used so much more than another one in the coming
        `MEAN_LIFE` steps that a copy in the other's place pays, which takes as long as a use where it is now. Its last
        use says nothing about how many more will come.
        """
        return self._uses.worth(key) - 1 > self._uses.worth(other) + WORTH_A_COPY

    def request(self, keys: Sequence[Key]) -> None:
        """Counts a use of each of these different records, which are requested together. Keeps the list."""
        self._uses.request(keys)
        self._promote(keys)

    def use(self, key: Key, times: float = 1.0) -> None:
        """Counts a use, or several at once."""
        self._uses.add(key, times)
        self._promote([key])

    def _promote(self, keys: Sequence[Key]) -> None:
        """Ranks those of the records anew that were demoted."""
        if not self._demoted.isdisjoint(keys):
            for key in self._demoted.intersection(keys):
                self.enter(key)

    def _is_recent(self, key: Key) -> bool:
        """Whether the last step has used a record that was not demoted since."""
        return self._uses.requests - self._uses.last.get(key, -self._step) < self._step

    def enter(self, key: Key) -> None:
        """Ranks a record that is in the pool from now on, or was demoted."""
        self._demoted.discard(key)
        self._rank(key, self._uses.counts.get(key, FIRST))

    def demote(self, key: Key) -> None:
        """Makes a record the first to be evicted, until its next use."""
        self._demotions += 1
        self._demoted.add(key)
        self._uses.last.pop(key, None)
        self._rank(key, FIRST - self._demotions)

    def _rank(self, key: Key, rank: float) -> None:
        self._ranks[key] = rank
        if len(self._heap) > MOST_STALE * (len(self._ranks) + 1):  # nothing was evicted for long
            self._order()
        else:
            heappush(self._heap, (rank, key))

    def _order(self) -> None:
        heap = [(rank, key) for key, rank in self._ranks.items()]
        heapify(heap)
        self._heap = heap

    def leave(self, key: Key) -> None:
        """The record is not in the pool any more."""
        self._ranks.pop(key, None)
        self._demoted.discard(key)

    def first(self, may_go: Callable[[Key], bool], spare_recent: bool = False) -> Key | None:
        """As `lowest`: the first of these records; None if there is none."""
        return next(iter(self.lowest(1, may_go, spare_recent)), None)

    def lowest(self, count: int, may_go: Callable[[Key], bool], spare_recent: bool = False) -> list[Key]:
        """The records of the lowest ranks that `may_go`, lowest first: `count` of them, or all if there are fewer.

        Args:
            spare_recent: prefers records that the last step has not used.
        """
        counts, passed = self._uses.counts, list[tuple[float, Key]]()
        found: dict[Key, None] = {}  # an entry may be in the heap twice
        recent: dict[Key, None] = {}
        try:
            while self._heap and len(found) < count:
                rank, key = self._heap[0]
                now = rank if rank < FIRST else counts.get(key, FIRST)
                if self._ranks.get(key) != rank:
                    heappop(self._heap)  # evicted, or ranked anew since
                elif now > rank:  # used since
                    heappop(self._heap)
                    self._rank(key, now)
                else:
                    passed.append(heappop(self._heap))
                    if may_go(key):
                        (recent if spare_recent and self._is_recent(key) else found)[key] = None
            return [*found, *recent][:count]
        finally:
            for entry in passed:
                heappush(self._heap, entry)

    def reset(self, keys: Iterable[Key]) -> None:
        """Ranks exactly the records `keys`, by their counts."""
        counts = self._uses.counts
        self._ranks, self._demoted = {key: counts.get(key, FIRST) for key in keys}, set()
        self._order()
