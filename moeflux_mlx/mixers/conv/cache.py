"""The cache of a gated short convolution: the convolution's last inputs."""

from ...caches.recurrent import FixedState, RecurrentCache
from ...ops.launch import Shape
from .spec import ShortConv


def make_caches(mixer: ShortConv) -> tuple[RecurrentCache]:
    """The empty cache of a layer with this mixer."""
    return (ConvCache(mixer),)


class _FixedConv(FixedState):
    """The traced stand-in."""

    num_inputs = num_outputs = 1


class ConvCache(RecurrentCache):
    """`conv` [B, *conv_shape] alone."""

    stand_in = _FixedConv

    def stored_shapes(self, length: int) -> tuple[Shape]:
        return (self.part.conv_shape,)
