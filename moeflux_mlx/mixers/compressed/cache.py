"""The caches of compressed attention: the window and the entries, and the state of n-grams before it."""

from typing import Any

from ...caches.entries import EntriesCache
from ...caches.joined import JoinedCache
from ...caches.layer_cache import LayerCache
from ...caches.ngrams import NGramCache
from .spec import Compressed


def make_cache(mixer: Compressed) -> LayerCache:
    """An empty cache for a layer with this mixer."""
    return EntriesCache(mixer) if mixer.ngrams is None else EntriesBehindNGrams(mixer)


class EntriesBehindNGrams(JoinedCache):
    """The cache of compressed attention and that of the n-grams before it."""

    def __init__(self, part: Compressed):
        super().__init__(part, EntriesCache(part), NGramCache(part.ngrams))

    @property
    def of_mixer(self) -> Any:
        return self.own
