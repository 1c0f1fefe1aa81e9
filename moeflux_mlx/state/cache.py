"""What a model remembers between calls, one cache for each layer, in mlx-lm's cache protocol.

A cache is made for the part of a layer that it serves. `KVCache` and `LatentCache` grow in steps and can be trimmed;
`WindowCache` holds the newest positions and goes back a few; `RecurrentCache` holds a state that has absorbed every
token and goes back to states that were kept.
"""

from collections.abc import Iterable

from ..kinds import Delta, GroupedQuery, Latent, Mixer
from .growing import KVCache, LatentCache
from .recurrent import RecurrentCache
from .window import WindowCache

Cache = KVCache | WindowCache | LatentCache | RecurrentCache


def make_cache(mixer: Mixer) -> Cache:
    """An empty cache for a layer with this mixer."""
    match mixer:
        case GroupedQuery():
            return KVCache(mixer) if mixer.window is None else WindowCache(mixer)
        case Latent():
            return LatentCache(mixer)
        case Delta():
            return RecurrentCache(mixer)


def untrimmable_bytes(mixers: Iterable[Mixer], itemsize: int) -> int:
    """What one text's states take in the layers whose caches cannot be cut, with entries of `itemsize` bytes."""
    caches = map(make_cache, mixers)
    return sum(layer.bytes_for(1, itemsize) for layer in caches if not layer.is_trimmable())
