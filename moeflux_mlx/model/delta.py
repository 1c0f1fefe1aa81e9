"""Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 use it: a linear-attention token mixer.

Two pieces of state: the last inputs of a short causal convolution, and for each value head a matrix
that decays, forgets along the new key and learns the new value.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..ops import cpu, native
from ..ops.kernels import has_kernels
from ..ops.mixer_kernels import conv_silu, gated_delta, gated_norm
from ..spec import ModelArgs
from ..state.cache import RecurrentCache
from .linear import Linear, RMSNorm, Stack

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
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once they have their tensors."""
        self._inputs = Stack(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def __call__(self, x: mx.array, cache: RecurrentCache) -> mx.array:
        B, L, _ = x.shape
        qkv, z, b, a = self._inputs(x)
        if cpu.takes(x):
            return self.out_proj(self._native(qkv, z, b, a, cache))
        if B == 1 and self.k_dim % 32 == 0 and has_kernels():
            qkv, z, b, a = (part.reshape(L, -1) for part in (qkv, z, b, a))  # indexing with [0] would copy
            return self.out_proj(self._kernels(qkv, z, b, a, cache)[None])
        qkv = self._convolve(qkv, cache)
        q, k, v = mx.split(qkv, [self.key_width, 2 * self.key_width], axis=-1)
        q = self._unit(q.reshape(B, L, self.k_heads, self.k_dim)) * self.k_dim**-0.5
        k = self._unit(k.reshape(B, L, self.k_heads, self.k_dim))
        v = v.reshape(B, L, self.v_heads, self.v_dim)
        decay = decay_rate(a, self.A_log, self.dt_bias)
        beta = mx.sigmoid(b)
        state = cache.recurrent
        if state is None:
            state = mx.zeros((B, self.v_heads, self.v_dim, self.k_dim), mx.float32)
        out, cache.recurrent = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        cache.offset += L
        z = z.reshape(B, L, self.v_heads, self.v_dim).astype(mx.float32)
        out = self.norm(out) * nn.silu(z).astype(out.dtype)
        return self.out_proj(out.reshape(B, L, -1))

    def _kernels(self, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: RecurrentCache) -> mx.array:
        """The same for one sequence on a GPU: [L, ...] in, [L, value width] out."""
        L = qkv.shape[0]
        conv, state = cache.conv, cache.recurrent
        if conv is None or state is None:
            conv = mx.zeros((1, self.kernel - 1, self.channels), qkv.dtype)
            state = mx.zeros((1, self.v_heads, self.v_dim, self.k_dim), mx.float32)
        qkv, conv = conv_silu(qkv, conv.reshape(conv.shape[1:]), self.conv1d.weight.reshape(self.channels, -1))
        out, state = gated_delta(qkv, a, b, self.A_log, self.dt_bias, state.reshape(state.shape[1:]), self.k_heads)
        cache.conv, cache.recurrent = conv[None], state[None]
        cache.offset += L
        return gated_norm(out, z.reshape(out.shape), self.norm.weight, self.norm.eps).reshape(L, -1)

    def _native(self, qkv: cpu.Array, z: cpu.Array, b: cpu.Array, a: cpu.Array, cache: RecurrentCache) -> cpu.Array:
        """The same on the CPU: [B, L, ...] in, [B, L, value width] out."""
        B, L, _ = qkv.shape
        if cache.conv is None or cache.recurrent is None:
            conv = np.zeros((B, self.kernel - 1, self.channels), np.float32)
            state = np.zeros((B, self.v_heads, self.v_dim, self.k_dim), np.float32)
        else:
            conv, state = cpu.view(cache.conv), cpu.view(cache.recurrent)
        with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
            softplus = np.logaddexp(a + cpu.view(self.dt_bias), np.float32(0))
        decay = np.exp(-np.exp(cpu.view(self.A_log)) * softplus)
        beta = cpu.sigmoid(b)
        steps = [self._recur(qkv[i], decay[i], beta[i], conv[i], state[i]) for i in range(B)]
        out, conv, state = (cpu.stack(list(part)) for part in zip(*steps, strict=True))
        cache.conv, cache.recurrent = mx.array(conv), mx.array(state)
        cache.offset += L
        return cpu.silu_mul(z.reshape(out.shape), self.norm(out)).reshape(B, L, -1)

    def _recur(
        self, qkv: cpu.Array, decay: cpu.Array, beta: cpu.Array, conv: cpu.Array, state: cpu.Array
    ) -> tuple[cpu.Array, cpu.Array, cpu.Array]:
        """One sequence [L, channels] -> (out [L, value heads, value dim], next conv, next state)."""
        L, dim = len(qkv), self.k_dim
        taps = np.ascontiguousarray(cpu.view(self.conv1d.weight).reshape(self.channels, -1).T)
        mixed, conv = native.conv_silu(conv, np.ascontiguousarray(qkv), taps)
        q, k, v = cpu.split(mixed, self.key_width, 2 * self.key_width)
        # Unit length is an RMS norm over sqrt(dim); the query's own scale is another.
        q = cpu.rms_norm(q.reshape(L, -1, dim), np.full(dim, 1 / dim, np.float32), NORM_EPS / dim)
        k = cpu.rms_norm(k.reshape(L, -1, dim), np.full(dim, dim**-0.5, np.float32), NORM_EPS / dim)
        v = np.ascontiguousarray(v).reshape(L, self.v_heads, -1)
        out, state = native.gated_delta(state, q, k, v, np.ascontiguousarray(decay), np.ascontiguousarray(beta))
        return out, conv, state

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
