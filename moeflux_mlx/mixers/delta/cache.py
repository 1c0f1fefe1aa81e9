"""The caches of the delta rule: its recurrent state, and the state of n-grams before it."""

from ...caches.layer_cache import LayerCache
from ...caches.ngrams import NGramCache
from ...caches.recurrent import RecurrentCache
from .spec import Delta


def make_caches(mixer: Delta) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer."""
    return RecurrentCache(mixer), *([] if mixer.ngrams is None else [NGramCache(mixer.ngrams)])
