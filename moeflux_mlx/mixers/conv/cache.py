"""The cache of a gated short convolution: the last inputs of the convolution, beside a state without values."""

from ...caches.recurrent import RecurrentCache
from .spec import ShortConv


def make_caches(mixer: ShortConv) -> tuple[RecurrentCache]:
    """The empty cache of a layer with this mixer."""
    return (RecurrentCache(mixer),)
