"""The cache of Mamba-2: the last inputs of its convolution, and its state."""

from ...caches.recurrent import RecurrentCache
from .spec import Mamba2


def make_cache(mixer: Mamba2) -> RecurrentCache:
    """An empty cache for a layer with this mixer."""
    return RecurrentCache(mixer)
