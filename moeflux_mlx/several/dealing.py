"""Assigns reads of experts to processes that could all read them: first to the one that has the expert in memory,
otherwise to the one with least to read.

Every process keeps the same account from the routings alone, so that nothing is exchanged for it. It is an account of
what was dealt out, not of what is in memory: guesses are not in it, and a process that has dropped what the account
says it has reads it again.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..formats.owners import Owners
from ..formats.record import Key

SURE = 7 / 8  # of a pool's slots: the others may hold guesses


class Dealing:
    """Args:
    owners: who reads what nobody has, as far as that is even.
    slots: of each process's pool.
    """

    def __init__(self, owners: Owners, slots: Sequence[int]):
        self._owners, self._room = owners, [max(int(SURE * count), 1) for count in slots]
        self.held: list[OrderedDict[Key, None]] = [OrderedDict() for _ in slots]
        self.home: dict[Key, int] = {}

    def deal(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The process of each of the experts `ids`, in their shape; all of these count as used then."""
        experts, inverse = np.unique(ids, return_inverse=True)
        ranks = self.expected(layer, experts)
        missing = np.array([(layer, expert) not in self.home for expert in experts.tolist()])
        self._even(ranks, np.flatnonzero(missing))
        for expert, rank in zip(experts.tolist(), ranks.tolist(), strict=True):
            self._use((layer, expert), rank)
        return ranks[inverse].reshape(ids.shape)

    def expected(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The process that would have each expert if it were asked for alone, int32 [n]."""
        homes = self._owners.of(layer, ids)
        known = [self.home.get((layer, expert), -1) for expert in ids.tolist()]
        return np.where(np.array(known, np.int32) < 0, homes, np.array(known, np.int32))

    def note(self, layer: int, ids: np.ndarray) -> None:
        """A prompt has used these experts, each at its owner; those with the most tokens count as used last."""
        experts, counts = np.unique(ids, return_counts=True)
        experts = experts[np.argsort(counts, kind="stable")]
        for expert, rank in zip(experts.tolist(), self._owners.of(layer, experts).tolist(), strict=True):
            self._use((layer, expert), rank)

    def _even(self, ranks: np.ndarray, missing: np.ndarray) -> None:
        """Moves what is to be read from who has most of it for his share to who has least, while that helps."""
        shares = np.array(self._owners.shares)
        loads = np.bincount(ranks[missing], minlength=len(shares))
        while True:
            most, least = int(np.argmax(loads / shares)), int(np.argmin((loads + 1) / shares))
            if (loads[least] + 1) / shares[least] >= loads[most] / shares[most]:
                return
            ranks[missing[ranks[missing] == most][-1]] = least
            loads[most] -= 1
            loads[least] += 1

    def _use(self, key: Key, rank: int) -> None:
        before = self.home.get(key, rank)
        if before != rank:
            del self.held[before][key]
        held, self.home[key] = self.held[rank], rank
        held[key] = None
        held.move_to_end(key)
        if len(held) > self._room[rank]:
            del self.home[held.popitem(last=False)[0]]
