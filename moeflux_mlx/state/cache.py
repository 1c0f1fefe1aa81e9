"""The state of a model between calls: one cache per layer, with mlx-lm's cache protocol.

A cache is made for the part of a layer that it serves. `KVCache` and `LatentCache` grow in steps and can be trimmed;
`WindowCache` and `CompressedCache` hold the newest positions and go back a few; `RecurrentCache` holds a state that has
absorbed every token and goes back to states that were kept. `QuantizedKVCache` and `QuantizedWindowCache` keep 8 bits
of each value. `IndexedCache`, `BlocksCache` and `NGramsCache` each combine a mixer's cache with a second one.
"""

from collections.abc import Mapping

from ..caches.entries import CompressedCache
from ..caches.growing import KVCache, LatentCache
from ..caches.joined import BlocksCache, JoinedCache, NGramsCache
from ..caches.recurrent import RecurrentCache
from ..caches.ring import WindowCache
from ..kinds import Compressed, Delta, GroupedQuery, HeadBlocks, KeyBlocks, Latent, Mamba2, Mixer, NGrams
from .grouped import QuantizedKVCache, QuantizedWindowCache
from .latent import IndexedCache

Cache = KVCache | WindowCache | CompressedCache | LatentCache | IndexedCache | RecurrentCache | JoinedCache


def make_cache(mixer: Mixer) -> Cache:
    """An empty cache for a layer with this mixer."""
    match mixer:
        case GroupedQuery(blocks=KeyBlocks() | HeadBlocks()) | Latent(blocks=KeyBlocks()):
            return BlocksCache(mixer)
        case GroupedQuery(kv_bits=8):
            return QuantizedKVCache(mixer) if mixer.window is None else QuantizedWindowCache(mixer)
        case GroupedQuery():
            return KVCache(mixer) if mixer.window is None else WindowCache(mixer)
        case Latent():
            has_keys = mixer.indexer is not None and not mixer.indexer.reuses
            return IndexedCache(mixer) if has_keys else LatentCache(mixer)
        case Compressed():
            return CompressedCache(mixer)
        case Delta(ngrams=NGrams()):
            return NGramsCache(mixer)
        case Delta() | Mamba2():
            return RecurrentCache(mixer)
        case _:
            raise TypeError(f"no cache serves {mixer}")


def untrimmable_bytes(mixers: Mapping[Mixer, int], itemsize: int) -> int:
    """Bytes of one text's states in the layers whose caches cannot be cut, with entries of `itemsize` bytes. `mixers`:
    number of layers of each kind.
    """
    return sum(count * make_cache(mixer).kept_bytes(itemsize) for mixer, count in mixers.items())
