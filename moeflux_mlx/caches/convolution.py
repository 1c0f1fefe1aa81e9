"""The cache of a short convolution: its last inputs."""

from ..ops.launch import Shape
from .recurrent import FixedState, RecurrentCache


class _FixedConv(FixedState):
    """The traced stand-in."""

    num_inputs = num_outputs = 1


class ConvCache(RecurrentCache):
    """`conv` [B, *conv_shape] alone."""

    stand_in = _FixedConv

    def stored_shapes(self, length: int) -> tuple[Shape]:
        return (self.part.conv_shape,)
