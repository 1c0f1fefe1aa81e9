"""What a model remembers between calls, one cache for each layer, in mlx-lm's cache protocol.

A cache is made for the part of a layer that it serves. `KVCache` and `LatentCache` grow in steps and can be trimmed;
`RecurrentCache` holds a state that has absorbed every token and cannot.
"""

from collections.abc import Iterable

from ..kinds import Delta, GroupedQuery, Latent, Mixer
from .growing import KVCache, LatentCache
from .recurrent import RecurrentCache

Cache = KVCache | LatentCache | RecurrentCache


def make_cache(mixer: Mixer) -> Cache:
    """An empty cache for a layer with this mixer."""
    match mixer:
        case GroupedQuery():
            return KVCache(mixer)
        case Latent():
            return LatentCache(mixer)
        case Delta():
            return RecurrentCache(mixer)


def uncut_bytes(mixers: Iterable[Mixer], itemsize: int) -> int:
    """What one text's states take in the layers whose caches cannot be cut, with entries of `itemsize` bytes."""
    return sum(make_cache(mixer).row_bytes(itemsize) for mixer in mixers)
