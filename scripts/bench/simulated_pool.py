"""Pools of records for a trace of routing: which of its requests hit, under several orders of eviction.

`SimulatedPool` has the loader's own order, and `Lookahead` reads ahead into it; the others are to compare with.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from moeflux_mlx.experts.lookahead import Lookahead
from moeflux_mlx.experts.ranking import Ranking
from moeflux_mlx.experts.routing import Routing


def run_ours(
    trace: np.ndarray, experts: int, slots: int, ahead: np.ndarray | None = None, distance: int = 1
) -> "SimulatedPool":
    """Returns a pool in the loader's order of eviction after the trace, with `Lookahead` if there are predictions, made
    `distance` layers ahead, [2, tokens, layers, K].
    """
    pool = SimulatedPool(trace.shape[1], experts, slots)
    lookahead = Lookahead(pool, "off" if ahead is None else "lookahead")
    lookahead.trial = AlwaysAhead()
    for t, layers in enumerate(trace):
        pool.ranking.pass_time(1)
        for layer, ids in enumerate(layers):
            later, guess = layer + distance, None
            if ahead is not None and later < len(layers) and lookahead.wants_guess(later, 1):
                guess = Routing(later, ahead[0, t, later][None].astype(int), ahead[1, t, later][None])
            pool.request(layer, ids)
            lookahead.requested(Routing(layer, ids[None], None, guess), ids[None])
    return pool


class AlwaysAhead:
    """In place of `Trial`, which measures times."""

    ahead = True

    def token(self, seconds: float) -> None:
        pass


class SimulatedPool:
    """The source of experts that `Lookahead` asks, with the order of eviction of `SlotPool`; its reads end at once.

    Attributes:
        hits: requested records that were there.
        whole: requests of a layer all of whose records were there.
        reads: records that were read.
    """

    reads_ahead = True

    def __init__(self, layers: int, experts: int, slots: int):
        self.layout = TracedLayout(layers, experts)
        self.slots, self.records, self.ranking = slots, set(), Ranking(layers)
        self.leased, self.foretold = set(), set()
        self.hits = self.whole = self.reads = 0

    def request(self, layer: int, ids: np.ndarray) -> None:
        keys = [(layer, expert) for expert in ids.tolist()]
        there = [key in self.records for key in keys]
        self.hits, self.whole = self.hits + sum(there), self.whole + all(there)
        self.ranking.request(keys)
        self.leased = set(keys)
        self.foretold = {key for key in self.foretold if key[0] != layer}
        for key in keys:
            self.read(key, self.leased | self.foretold) or self.read(key, self.leased)

    def hint(self, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        self.foretold |= set(keys)
        return [key for key in keys if key not in self.records and self.read(key, self.leased | self.foretold)]

    def read(self, key: tuple[int, int], kept: set[tuple[int, int]]) -> bool:
        """Brings a record; returns whether it is there."""
        if key not in self.records and len(self.records) == self.slots:
            victim = self.ranking.first(lambda one: one not in kept, spare_recent=True)
            if victim is None:
                return False
            self.records.remove(victim)
            self.ranking.leave(victim)
        if key not in self.records:
            self.records.add(key)
            self.ranking.enter(key)
            self.reads += 1
        return True

    def give_way(self, layer: int, ids: Sequence[int]) -> None:
        for expert in ids:
            if (layer, expert) in self.records:
                self.ranking.demote((layer, expert))

    def holds(self, layer: int) -> bool:
        return False

    def slots_per_layer(self, spare: int) -> int:
        return max(self.slots - spare, 0) // len(self.layout.moe_layers)


class TracedLayout:
    """The layers of a trace, as `ExpertLayout` names them."""

    def __init__(self, layers: int, experts: int):
        self.moe_layers, self.num_experts = list(range(layers)), experts

    def next_moe_layer(self, layer: int) -> int | None:
        return layer + 1 if layer + 1 < len(self.moe_layers) else None


def lfu(keys: np.ndarray, slots: int) -> np.ndarray:
    """Like `lru`, for a pool that evicts the record with the fewest uses so far, also before it was read; of several
    the least recently used one.
    """
    uses: dict[int, int] = {}
    pool: dict[int, tuple[int, int]] = {}  # record -> its uses, and when it was used last
    order: list[tuple[int, int, int]] = []
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        uses[key] = uses.get(key, 0) + 1
        hits[i] = key in pool
        if not hits[i] and len(pool) == slots:
            while pool.get(order[0][2]) != order[0][:2]:
                heapq.heappop(order)  # used again since
            del pool[heapq.heappop(order)[2]]
        pool[key] = uses[key], i
        heapq.heappush(order, (*pool[key], key))
    return hits


def lru(keys: np.ndarray, slots: int) -> np.ndarray:
    """Returns whether each access of `keys` [N] hits a pool of `slots` in least-recently-used order."""
    pool: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        if key in pool:
            hits[i] = True
            pool.move_to_end(key)
            continue
        if len(pool) == slots:
            pool.popitem(last=False)
        pool[key] = None
    return hits


def belady(keys: np.ndarray, slots: int) -> np.ndarray:
    """The same for a pool that evicts the record whose next use is farthest away: no policy has more hits."""
    following = next_uses(keys)
    due: dict[int, int] = {}  # record in the pool -> its next use
    farthest: list[tuple[int, int]] = []
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        hits[i] = key in due
        if not hits[i] and len(due) == slots:
            while due.get(-farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)  # not valid any more: used again since
            del due[-heapq.heappop(farthest)[1]]
        due[key] = following[i]
        heapq.heappush(farthest, (-following[i], -key))
    return hits


def next_uses(keys: np.ndarray) -> list[int]:
    """Returns for each access when the same record is used next; len(keys) if never."""
    following, last = [len(keys)] * len(keys), {}
    for i in range(len(keys) - 1, -1, -1):
        following[i] = last.get(int(keys[i]), len(keys))
        last[int(keys[i])] = i
    return following
