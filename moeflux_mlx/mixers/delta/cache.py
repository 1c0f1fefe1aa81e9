"""The caches of the delta rule: its recurrent state, and the state of n-grams before it."""

from ...caches.layer_cache import LayerCache
from ...caches.ngrams import NGramCache
from ...caches.recurrent import RecurrentCache
from ...ops import backend
from .op import refusal
from .spec import Delta


class DeltaCache(RecurrentCache):
    """The cache of the delta rule's recurrent state; `part` is its mixer."""

    @property
    def joins(self) -> bool:
        return not refusal(backend.name(), 1, self.part)


def make_caches(mixer: Delta) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer."""
    return DeltaCache(mixer), *([] if mixer.ngrams is None else [NGramCache(mixer.ngrams)])
