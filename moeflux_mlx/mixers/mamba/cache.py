"""The cache of Mamba-2: the last inputs of its convolution, and its state."""

from ...caches.recurrent import RecurrentCache
from .spec import Mamba2


def make_caches(mixer: Mamba2) -> tuple[RecurrentCache]:
    """The empty cache of a layer with this mixer."""
    return (RecurrentCache(mixer),)
