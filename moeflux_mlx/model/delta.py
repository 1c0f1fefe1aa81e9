"""Gated DeltaNet (arXiv:2412.06464), a linear-attention token mixer: the projections round its core."""

import mlx.core as mx
import mlx.nn as nn

from ..kinds import Delta
from ..ops.backend import Array
from ..ops.delta import DeltaWeights, State, delta
from .layers import Linear, RMSNorm, Stack, packed


class GatedDeltaNet(nn.Module):
    """Projections are stored flat: [q of all heads | k | v], z, b and a."""

    def __init__(self, mixer: Delta, hidden_size: int, eps: float):
        super().__init__()
        self.mixer = mixer
        self.in_proj_qkv = Linear(hidden_size, mixer.channels)
        self.in_proj_z = Linear(hidden_size, mixer.value_width)
        self.in_proj_b = Linear(hidden_size, mixer.value_heads)
        self.in_proj_a = Linear(hidden_size, mixer.value_heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = mx.zeros((mixer.channels, mixer.taps, 1))
        self.A_log = mx.zeros((mixer.value_heads,))
        self.dt_bias = mx.zeros((mixer.value_heads,))
        self.norm = RMSNorm(mixer.value_dim, eps)
        self.out_proj = Linear(mixer.value_width, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.out_proj.pack()
        self._weights = packed(self.A_log, self.dt_bias, self.conv1d.weight, self.norm.weight)

    def __call__(self, x: Array, norm: RMSNorm, cache: State) -> Array:
        """x plus what is mixed of norm(x)."""
        joined, (qkv, z, b, a) = self._inputs(x, norm)
        parameters = self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps
        weights = DeltaWeights(*parameters, self._weights)
        return self.out_proj(delta(qkv, z, b, a, cache, weights, self.mixer, joined), residual=x)
