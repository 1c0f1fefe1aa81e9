"""The cache of latent attention with an indexer: latents, rotated keys, and the keys by which positions are chosen."""

from ..kinds import Latent
from ..ops.attend import Rows
from .growing import Growing


class IndexedCache(Growing[Latent]):
    """The normed latent [B, 1, N, latent]; the rotated shared key and, behind it, the indexer's key
    [B, 1, N, rotated + dim], normed and rotated, of which a layer that reuses another's choice has none."""

    @property
    def rows(self) -> Rows:
        indexer = self.part.indexer
        assert indexer is not None
        return (1, self.part.latent), (1, self.part.rotated + (0 if indexer.reuses else indexer.dim))
