"""The cache of compressed attention: the window, and the entries."""

from ...caches.entries import EntriesCache
from .spec import Compressed


def make_cache(mixer: Compressed) -> EntriesCache:
    """An empty cache for a layer with this mixer."""
    return EntriesCache(mixer)
