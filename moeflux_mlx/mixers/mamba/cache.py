"""The cache of Mamba-2: the last inputs of its convolution, and its state."""

from ...caches.recurrent import RecurrentCache
from ...ops import backend
from .op import refusal
from .spec import Mamba2


class MambaCache(RecurrentCache):
    """The same; `part` is its mixer."""

    @property
    def joins(self) -> bool:
        return not refusal(backend.name(), 1, 1, self.part)


def make_caches(mixer: Mamba2) -> tuple[MambaCache]:
    """The empty cache of a layer with this mixer."""
    return (MambaCache(mixer),)
