"""The state of a model between calls: one cache per layer, with mlx-lm's cache protocol.

A cache is made for the part of a layer that it serves. Most caches of attention grow in steps and can be trimmed; a
`Ring` holds the newest positions and goes back a few; a `RecurrentCache` holds a state that has absorbed every token
and goes back to states that were kept. A `JoinedCache` combines a mixer's cache with a second one. Where a mixer has
caches of its own, the module of its name has them, and chooses between them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..caches.entries import EntriesCache
from ..caches.layer_cache import LayerCache
from ..caches.recurrent import RecurrentCache
from ..kinds import Mixer
from .compressed.spec import Compressed
from .delta import cache as delta
from .delta.spec import Delta
from .grouped import cache as grouped
from .grouped.spec import GroupedQuery
from .latent import cache as latent
from .latent.spec import Latent
from .mamba.spec import Mamba2

MAKERS: dict[type, Callable[[Any], LayerCache]] = {
    GroupedQuery: grouped.make_cache,
    Latent: latent.make_cache,
    Compressed: EntriesCache,
    Delta: delta.make_cache,
    Mamba2: RecurrentCache,
}


def make_cache(mixer: Mixer) -> LayerCache:
    """An empty cache for a layer with this mixer."""
    return MAKERS[type(mixer)](mixer)


def untrimmable_bytes(mixers: Mapping[Mixer, int], itemsize: int) -> int:
    """Bytes of one text's states in the layers whose caches cannot be cut, with entries of `itemsize` bytes. `mixers`:
    number of layers of each kind.
    """
    return sum(count * make_cache(mixer).kept_bytes(itemsize) for mixer, count in mixers.items())
