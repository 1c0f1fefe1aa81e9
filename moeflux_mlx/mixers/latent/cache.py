"""The caches of latent attention: latents and rotated keys; and with them the keys by which positions or blocks are
chosen."""

from typing import Any

import mlx.core as mx
import numpy as np

from ...caches.entries import EntriesCache
from ...caches.growing import Stepping
from ...caches.joined import JoinedCache
from ...caches.keys import KeyCache
from ...caches.layer_cache import Arrays, LayerCache, Shape, State
from ...kinds import Indexer
from ...ops import index
from ...ops.backend import AnyArray
from ...ops.positions import RECENT, Rows
from . import op as latent
from .spec import Latent


def make_cache(mixer: Latent) -> LayerCache:
    """An empty cache for a layer with this mixer."""
    if mixer.blocks is not None:
        return LatentBlocksCache(mixer)
    has_keys = mixer.indexer is not None and not mixer.indexer.reuses
    return IndexedCache(mixer) if has_keys else LatentCache(mixer)


def _takes_steps(part: Latent) -> bool:
    """Whether there are kernels for a token alone of the attention, and of its indexer."""
    return latent.takes_step(part.latent, part.rotated) and (part.rule is None or index.takes_step(part.rule))


class LatentCache(Stepping[Latent]):
    """MLA: the normed latent [B, 1, N, latent] and the rotated shared key [B, 1, N, rotated]."""

    @property
    def rows(self) -> Rows:
        return (1, self.part.latent), (1, self.part.rotated)

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)

    @property
    def recent_shape(self) -> Shape:
        return RECENT, self.part.latent + self.part.rotated

    def parts(self, recent: AnyArray, length: int) -> tuple[AnyArray, AnyArray]:
        entries, width = recent[None, None, :length], self.part.latent
        return entries[..., :width], entries[..., width:]


class LatentKeyCache(KeyCache[Latent]):
    """The keys by which positions are chosen."""

    @property
    def indexer(self) -> Indexer:
        assert self.part.indexer is not None
        return self.part.indexer

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)


class IndexedCache(JoinedCache):
    """`own`: as without an indexer. `beside`: the indexer's keys, normed and rotated. A snapshot has them behind the
    rotated keys, [length, 1, rotated + dim]."""

    def __init__(self, part: Latent):
        super().__init__(part, LatentCache(part), LatentKeyCache(part))

    def stored_shapes(self, length: int) -> tuple[Shape, ...]:
        """The shapes of the arrays that are saved."""
        latents, rotated = self.own.stored_shapes(length)
        keys, _ = self.beside.stored_shapes(length)
        return latents, (*rotated[:-1], rotated[-1] + keys[-1])

    def stored(self) -> Arrays:
        """The arrays that are saved of a single text."""
        (latents, rotated), (keys, _) = self.own.stored(), self.beside.stored()
        return latents, None if rotated is None or keys is None else mx.concatenate([rotated, keys], axis=-1)

    def restored(self, *stored: Any) -> State:
        """The state that `stored` was taken of: the arrays, the length, and the dtype of entries."""
        latents, both, *more = stored
        rotated, keys = np.split(both, [self.part.rotated], axis=-1)
        own, beside = self.own.restored(latents, rotated, *more), self.beside.restored(keys, keys[..., :0], *more)
        return *own[:-1], *beside


class LatentBlocksCache(JoinedCache):
    """Latents and rotated keys of all positions, and the keys of their blocks."""

    def __init__(self, part: Latent):
        super().__init__(part, LatentCache(part), EntriesCache(part.blocks))
