"""The caches of the delta rule: its recurrent state, and the state of n-grams before it."""

from typing import Any

from ...caches.joined import JoinedCache
from ...caches.layer_cache import LayerCache
from ...caches.ngrams import NGramCache
from ...caches.recurrent import RecurrentCache
from .spec import Delta


def make_cache(mixer: Delta) -> LayerCache:
    """An empty cache for a layer with this mixer."""
    return RecurrentCache(mixer) if mixer.ngrams is None else NGramsCache(mixer)


class NGramsCache(JoinedCache):
    """The cache of the delta rule and that of the n-grams before it."""

    def __init__(self, part: Delta):
        super().__init__(part, RecurrentCache(part), NGramCache(part.ngrams))

    @property
    def of_mixer(self) -> Any:
        return self.own
