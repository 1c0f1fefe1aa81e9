"""A gated short convolution as a token mixer: the projections round its core (transformers, `Lfm2MoeShortConv`)."""

from collections.abc import Sequence

import mlx.nn as nn

from ...layers import Caches, Convolution, Linear, MixerModule, RMSNorm
from ...ops.backend import Array
from ...ops.seen import Chosen
from .op import short_conv
from .spec import ShortConv

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ()
FORMS: tuple[str, ...] = ()


class GatedConvolution(MixerModule):
    """One projection makes B, C and x, one behind the other."""

    def __init__(self, mixer: ShortConv, hidden_size: int):
        super().__init__()
        self.mixer = mixer
        self.in_proj = Linear(hidden_size, mixer.projected)
        self.conv = Convolution(mixer.channels, mixer.taps)
        self.out_proj = Linear(mixer.channels, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Packs what a GPU's kernels take at once; called again once all layers have their tensors."""
        self.in_proj.pack()
        self.out_proj.pack()

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        return [self.in_proj(x, norm)]

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        return short_conv(parts[0], caches[0], self.conv.weight, self.mixer)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        return self.out_proj(out, residual=x)


def make_module(mixer: ShortConv, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values."""
    return GatedConvolution(mixer, hidden_size)
