"""The cache of latent attention with an indexer: latents, rotated keys, and the keys by which positions are chosen."""

from ..kinds import Latent
from ..ops.attend import Rows
from .growing import Growing
from .traced import FixedCache


class IndexedCache(Growing[Latent]):
    """The normed latent [B, 1, N, latent]; the rotated shared key and, behind it, the indexer's key
    [B, 1, N, rotated + dim], normed and rotated, of which a layer that reuses another's choice has none."""

    @property
    def rows(self) -> Rows:
        indexer = self.part.indexer
        assert indexer is not None
        return (1, self.part.latent), (1, self.part.rotated + (0 if indexer.reuses else indexer.dim))

    def whole(self, length: int) -> int:
        """How many of the next `length` tokens attend to all that they see."""
        assert self.part.indexer is not None
        return min(max(self.part.indexer.top - self.offset, 0), length)

    @property
    def traced(self) -> type[FixedCache]:
        """By what the next token attends to: a step is traced for each."""
        return FixedWhole if self.whole(1) else FixedChosen


class FixedWhole(FixedCache):
    """The stand-in for a token that attends to all positions."""

    def whole(self, length: int) -> int:
        return length


class FixedChosen(FixedCache):
    """The stand-in for a token that attends to some."""

    def whole(self, length: int) -> int:
        return 0
