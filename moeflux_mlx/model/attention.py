"""Grouped-query attention with per-head query and key norms, partial rotation and optional output gate."""

import mlx.core as mx
import mlx.nn as nn

from ..kinds import GroupedQuery
from ..ops.attend import Steps, Whole, attend
from ..ops.backend import Array
from ..ops.rope import Rope
from .layers import Linear, RMSNorm, Stack, packed


class Attention(nn.Module):
    """Qwen3's attention; with a gate, Qwen3-Next's."""

    def __init__(self, mixer: GroupedQuery, hidden_size: int, eps: float):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
        self.q_proj = Linear(hidden_size, self.heads * self.head_dim * (2 if mixer.gate else 1))
        self.k_proj = Linear(hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, hidden_size)
        self.q_norm = RMSNorm(self.head_dim, eps)
        self.k_norm = RMSNorm(self.head_dim, eps)
        self.rope = Rope(mixer.rotation)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj.pack()
        self._weights = packed(self.q_norm.weight, self.k_norm.weight, self.rope.periods)

    def __call__(self, x: Array, norm: RMSNorm, cache: Steps) -> Array:
        """x plus what is mixed of norm(x)."""
        B, L, _ = x.shape
        joined, (q, k, v) = self._inputs(x, norm)
        q = q.reshape(B, L, self.heads, -1)
        k = k.reshape(B, L, self.kv_heads, -1)
        v = v.reshape(B, L, self.kv_heads, -1)
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        whole = Whole(joined, self._weights) if isinstance(joined, mx.array) and self._weights else None
        out = attend(q, k, v, cache, **norms, rope=self.rope, scale=self.head_dim**-0.5, whole=whole)
        return self.o_proj(out, residual=x)
