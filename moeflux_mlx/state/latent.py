"""The cache of latent attention with an indexer: latents, rotated keys, and the keys by which positions are chosen."""

from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.growing import LatentCache
from ..caches.joined import JoinedCache, KeyCache
from ..caches.layer_cache import Arrays, Shape, State
from ..kinds import Latent


class IndexedCache(JoinedCache):
    """`own`: as without an indexer. `beside`: the indexer's keys, normed and rotated. A snapshot has them behind the
    rotated keys, [length, 1, rotated + dim]."""

    def __init__(self, part: Latent):
        super().__init__(part, LatentCache(part), KeyCache(part))

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
