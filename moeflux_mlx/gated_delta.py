"""Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 use it: a linear-attention token mixer.

Two pieces of state: the last inputs of a short causal convolution, and for each value head a matrix
that decays, forgets along the new key and learns the new value.
"""

import mlx.core as mx
import mlx.nn as nn

from .cache import RecurrentCache
from .config import ModelArgs
from .linear import Linear, RMSNorm

NORM_EPS = 1e-6  # of the query/key L2 norm, fixed in the published model code


class GatedDeltaNet(nn.Module):
    """Projections are stored flat: [q of all heads | k | v], z, b and a."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.k_heads, self.v_heads = args.linear_num_key_heads, args.linear_num_value_heads
        self.k_dim, self.v_dim = args.linear_key_head_dim, args.linear_value_head_dim
        self.key_width = args.linear_key_dim
        self.kernel = args.linear_conv_kernel_dim
        self.channels = args.linear_conv_dim
        D = args.hidden_size
        self.in_proj_qkv = Linear(D, self.channels)
        self.in_proj_z = Linear(D, args.linear_value_dim)
        self.in_proj_b = Linear(D, self.v_heads)
        self.in_proj_a = Linear(D, self.v_heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = mx.zeros((self.channels, self.kernel, 1))
        self.A_log = mx.zeros((self.v_heads,))
        self.dt_bias = mx.zeros((self.v_heads,))
        self.norm = RMSNorm(self.v_dim, args.rms_norm_eps)
        self.out_proj = Linear(args.linear_value_dim, D)

    def __call__(self, x: mx.array, cache: RecurrentCache) -> mx.array:
        B, L, _ = x.shape
        qkv = self._convolve(self.in_proj_qkv(x), cache)
        q, k, v = mx.split(qkv, [self.key_width, 2 * self.key_width], axis=-1)
        q = self._unit(q.reshape(B, L, self.k_heads, self.k_dim)) * self.k_dim**-0.5
        k = self._unit(k.reshape(B, L, self.k_heads, self.k_dim))
        v = v.reshape(B, L, self.v_heads, self.v_dim)
        decay = decay_rate(self.in_proj_a(x), self.A_log, self.dt_bias)
        beta = mx.sigmoid(self.in_proj_b(x))
        state = cache.recurrent
        if state is None:
            state = mx.zeros((B, self.v_heads, self.v_dim, self.k_dim), mx.float32)
        out, cache.recurrent = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        cache.offset += L
        z = self.in_proj_z(x).reshape(B, L, self.v_heads, self.v_dim).astype(mx.float32)
        out = self.norm(out) * nn.silu(z).astype(out.dtype)
        return self.out_proj(out.reshape(B, L, -1))

    def _convolve(self, qkv: mx.array, cache: RecurrentCache) -> mx.array:
        """silu(causal depthwise convolution): output t sees inputs t - kernel + 1 .. t."""
        B, keep = qkv.shape[0], self.kernel - 1
        before = mx.zeros((B, keep, self.channels), qkv.dtype) if cache.conv is None else cache.conv
        padded = mx.concatenate([before, qkv], axis=1)
        cache.conv = mx.contiguous(padded[:, -keep:])
        return nn.silu(mx.conv1d(padded, self.conv1d.weight, groups=self.channels))

    def _unit(self, x: mx.array) -> mx.array:
        """x / sqrt(sum(x^2) + eps) over the head, as an RMS norm: sum = dim * mean."""
        return mx.fast.rms_norm(x, None, NORM_EPS / self.k_dim) * self.k_dim**-0.5


def decay_rate(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """exp(-exp(A_log) * softplus(a + dt_bias)), float32 [B, L, value_heads]; softplus cannot overflow."""
    softplus = mx.logaddexp(a.astype(mx.float32) + dt_bias.astype(mx.float32), 0.0)
    return mx.exp(-mx.exp(A_log.astype(mx.float32)) * softplus)
