"""The cache of a gated short convolution: the convolution's last inputs."""

from ...caches.recurrent import FixedState, RecurrentCache
from ...ops import backend
from ...ops.launch import Shape
from .op import refusal
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

    @property
    def joins(self) -> bool:
        return not refusal(backend.name(), 1, 1)

    def stored_shapes(self, length: int) -> tuple[Shape]:
        return (self.part.conv_shape,)
