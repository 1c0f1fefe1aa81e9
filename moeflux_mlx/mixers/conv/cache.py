"""The cache of a gated short convolution: the convolution's last inputs."""

from ...caches.convolution import ConvCache
from ...ops import backend
from ...ops.convolution import refusal
from .spec import ShortConv


def make_caches(mixer: ShortConv) -> tuple[ConvCache]:
    """The empty cache of a layer with this mixer."""
    return (GatedConvCache(mixer),)


class GatedConvCache(ConvCache):
    """The same, of several sequences in one array where the kernel takes them so."""

    @property
    def joins(self) -> bool:
        return not refusal(backend.name(), 1, 1)
