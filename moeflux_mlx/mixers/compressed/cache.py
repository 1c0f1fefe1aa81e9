"""The caches of compressed attention: the window and the entries, and the state of n-grams before it."""

from ...caches.entries import EntriesCache
from ...caches.layer_cache import LayerCache
from ...caches.ngrams import NGramCache
from .spec import Compressed


def make_caches(mixer: Compressed) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer."""
    return EntriesCache(mixer), *([] if mixer.ngrams is None else [NGramCache(mixer.ngrams)])
