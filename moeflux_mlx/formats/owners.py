"""Which process owns an expert, and which experts a directory made for one rank holds."""

from dataclasses import dataclass

import numpy as np

from ..errors import ModelFileError

MOST_RANKS, MOST_SHARE = 64, 64


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


@dataclass(frozen=True)
class RankShare:
    """The experts of one rank.

    Args:
        owners: who owns what.
        rank: whose share this is.
    """

    owners: Owners
    rank: int

    def has(self, layer: int, expert: int) -> bool:
        """Whether it is one of the rank's experts."""
        return bool(self.owners.of(layer, np.array(expert)) == self.rank)

    def __str__(self) -> str:
        parts = self.owners.shares
        return f"rank {self.rank} of {len(parts)}" + ("" if len(set(parts)) == 1 else f" with shares {parts}")

    def check(self, wanted: "RankShare | None", layers: tuple[int, ...], count: int, where: object) -> None:
        """Raises ModelFileError: `wanted`, or one process that needs all, needs what is not held at `where`.

        Args:
            layers: with experts, `count` each.
        """
        for layer in layers:
            held = set(self.owners.experts(layer, self.rank, count))
            needed = range(count) if wanted is None else wanted.owners.experts(layer, wanted.rank, count)
            missing = next((expert for expert in needed if expert not in held), None)
            if missing is not None:
                who = "one process needs all" if wanted is None else f"this is {wanted}"
                raise ModelFileError(
                    f"{where} holds the experts of {self} only, not expert {missing} of layer {layer}, and {who}; "
                    "start as many ranks, each with its own directory, or convert without --ranks"
                )
