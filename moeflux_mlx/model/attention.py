"""Grouped-query attention with per-head query and key norms, partial rotation and optional output gate."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import cpu
from ..ops.rope import RoPE
from ..spec import ModelArgs
from ..state.cache import KVCache
from .linear import Linear, RMSNorm, Stack


class Attention(nn.Module):
    """Qwen3's attention; with `attn_output_gate`, Qwen3-Next's.

    The gated query projection holds, for each head, the query and then the gate.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
        )
        self.gated = args.attn_output_gate
        D = args.hidden_size
        self.q_proj = Linear(D, self.heads * self.head_dim * (2 if self.gated else 1))
        self.k_proj = Linear(D, self.kv_heads * self.head_dim)
        self.v_proj = Linear(D, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, D)
        self.q_norm = RMSNorm(self.head_dim, args.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, args.rms_norm_eps)
        self.rope = RoPE(args)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once they have their tensors."""
        self._inputs = Stack(self.q_proj, self.k_proj, self.v_proj)

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        B, L, _ = x.shape
        q, k, v = self._inputs(x)
        if cpu.takes(x):
            return self.o_proj(self._native(q, k, v, cache))
        q = q.reshape(B, L, self.heads, -1)
        gate = None
        if self.gated:
            q, gate = mx.split(q, 2, axis=-1)
        k = k.reshape(B, L, self.kv_heads, -1)
        v = v.reshape(B, L, self.kv_heads, -1).transpose(0, 2, 1, 3)
        q = self.rope(self.q_norm(q).transpose(0, 2, 1, 3), cache.offset)  # [B, heads, L, head_dim]
        k = self.rope(self.k_norm(k).transpose(0, 2, 1, 3), cache.offset)
        k, v = cache.update_and_fetch(k, v)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=cache.mask(L))
        out = out.transpose(0, 2, 1, 3).reshape(B, L, -1)
        if gate is not None:
            out = out * mx.sigmoid(gate.reshape(B, L, -1))
        return self.o_proj(out)

    def _native(self, q: cpu.Array, k: cpu.Array, v: cpu.Array, cache: KVCache) -> cpu.Array:
        """The same between the projections, on the CPU: [B, L, ...] in and out."""
        B, L, _ = q.shape
        q, k, v = (
            q.reshape(B, L, self.heads, -1),
            k.reshape(B, L, self.kv_heads, -1),
            v.reshape(B, L, self.kv_heads, -1),
        )
        gate = None
        if self.gated:
            q, gate = cpu.split(q, self.head_dim)
        q = self.rope.rotate(self.q_norm(q), cache.offset)
        k = self.rope.rotate(self.k_norm(k), cache.offset)
        out = cpu.attend(q, k, v, cache, self.head_dim**-0.5)
        if gate is not None:
            out *= cpu.sigmoid(gate)
        return out.reshape(B, L, -1)
