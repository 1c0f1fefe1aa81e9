"""Which process owns an expert."""

from dataclasses import dataclass

import numpy as np

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
