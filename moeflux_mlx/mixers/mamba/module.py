"""Mamba-2 (arXiv:2405.21060), a state space model as a token mixer: the projections round its core."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ...layers import Caches, Convolution, Linear, MixerModule, RMSNorm, packed
from ...ops.backend import Array
from ...ops.seen import Chosen
from .op import MambaWeights, mamba
from .spec import Mamba2

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ("A_log", "dt_bias", "D")
FORMS: tuple[str, ...] = ()


class Mamba(MixerModule):
    """One projection makes the gate, x, B, C and the step sizes, side by side."""

    def __init__(self, mixer: Mamba2, hidden_size: int, eps: float):
        super().__init__()
        self.mixer = mixer
        self.in_proj = Linear(hidden_size, mixer.projected)
        self.conv1d = Convolution(mixer.channels, mixer.taps, bias=True)
        self.A_log = mx.zeros((mixer.heads,))
        self.dt_bias = mx.zeros((mixer.heads,))
        self.D = mx.ones((mixer.heads,))
        self.norm = RMSNorm(mixer.width, eps)
        self.out_proj = Linear(mixer.width, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Packs what a GPU's kernels take at once, and turns parameters into floats of 32 bits; called again once all
        layers have their tensors."""
        self.in_proj.pack()
        self.out_proj.pack()
        parameters = self.conv1d.weight, self.conv1d.bias, self.A_log, self.dt_bias, self.D, self.norm.weight
        conv, conv_bias, A_log, dt_bias, D, norm = floats = [one.astype(mx.float32) for one in parameters]
        mx.eval(floats)
        self._weights = MambaWeights(conv, conv_bias, A_log, dt_bias, D, norm, self.norm.eps, packed(*floats))

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        return [self.in_proj(x, norm)]

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        return mamba(parts[0], caches[0], self._weights, self.mixer)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        return self.out_proj(out, residual=x)


def make_module(mixer: Mamba2, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values."""
    return Mamba(mixer, hidden_size, eps)
