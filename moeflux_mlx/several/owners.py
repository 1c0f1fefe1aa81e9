"""Which process owns an expert.

`Dealing` assigns reads of experts to processes that could all read them: first to the one that has it in memory,
otherwise to the one with least to read.

Every process keeps the same account, from the routings alone, so nothing is exchanged for it. The account says what was
assigned, not what is in memory: it does not include guesses, and a process that has evicted an assigned record reads it
again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..formats.record import Key

MOST_SHARE = 64


@dataclass(frozen=True)
class Owners:
    """Which rank owns an expert: by (expert + layer) modulo the sum of the shares, so that layers differ.

    Args:
        shares: of each rank, small integers; equal ones for equal machines.
    """

    shares: tuple[int, ...]

    @property
    def turns(self) -> np.ndarray:
        """The ranks of one round, spread as evenly as their shares allow."""
        places = [((i + 0.5) / share, rank) for rank, share in enumerate(self.shares) for i in range(share)]
        return np.array([rank for _, rank in sorted(places)], np.int32)

    def of(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The rank of each expert, in the ids' shape."""
        turns = self.turns
        return turns[(ids.astype(np.int64) + layer) % len(turns)]

    def experts(self, layer: int, rank: int, count: int) -> list[int]:
        """The experts among `count` that a rank owns."""
        return np.flatnonzero(self.of(layer, np.arange(count)) == rank).tolist()


SURE = 7 / 8  # share of a pool's slots that the account uses; the others may hold guesses


class Dealing:
    """Args:
    owners: who reads an expert that no process has, as long as the work is even.
    slots: number of slots of each process's pool.
    """

    def __init__(self, owners: Owners, slots: Sequence[int]):
        self._owners, self._room = owners, [max(int(SURE * count), 1) for count in slots]
        self.held: list[OrderedDict[Key, None]] = [OrderedDict() for _ in slots]
        self.home: dict[Key, int] = {}

    def deal(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """Assigns a process to each of the experts `ids`, in their shape, and counts them as used."""
        experts, inverse = np.unique(ids, return_inverse=True)
        ranks = self.expected(layer, experts)
        missing = np.array([(layer, expert) not in self.home for expert in experts.tolist()])
        self._even(ranks, np.flatnonzero(missing))
        for expert, rank in zip(experts.tolist(), ranks.tolist(), strict=True):
            self._use((layer, expert), rank)
        return ranks[inverse].reshape(ids.shape)

    def expected(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The process that each expert would be assigned to if it were requested alone, int32 [n]."""
        homes = self._owners.of(layer, ids)
        known = [self.home.get((layer, expert), -1) for expert in ids.tolist()]
        return np.where(np.array(known, np.int32) < 0, homes, np.array(known, np.int32))

    def note(self, layer: int, ids: np.ndarray) -> None:
        """Records that a prompt has used these experts, each at its owner; those with the most tokens count as used
        last.
        """
        experts, counts = np.unique(ids, return_counts=True)
        experts = experts[np.argsort(counts, kind="stable")]
        for expert, rank in zip(experts.tolist(), self._owners.of(layer, experts).tolist(), strict=True):
            self._use((layer, expert), rank)

    def _even(self, ranks: np.ndarray, missing: np.ndarray) -> None:
        """Moves reads from the process with the most, relative to its share, to the one with the least, while that
        helps.
        """
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
