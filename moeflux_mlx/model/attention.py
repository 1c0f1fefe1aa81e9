"""Grouped-query attention: its projections, with the norms, biases, sinks and the gate that the mixer has."""

import mlx.core as mx
import mlx.nn as nn

from ..kinds import GroupedQuery
from ..ops.attend import Steps, Whole, attend
from ..ops.backend import Array
from ..ops.elementwise import HEAD_GATES, times_heads
from ..ops.rope import Rope
from .layers import Linear, RMSNorm, Stack, packed


class Attention(nn.Module):
    """Softmax attention of any family; its switches are `GroupedQuery`'s."""

    def __init__(self, mixer: GroupedQuery, hidden_size: int, eps: float):
        super().__init__()
        self.mixer = mixer
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        self.q_proj = Linear(hidden_size, queries * (2 if mixer.gate == "joined" else 1), mixer.bias)
        self.k_proj = Linear(hidden_size, keys, mixer.bias)
        self.v_proj = Linear(hidden_size, mixer.kv_heads * mixer.value_width, mixer.bias)
        self.o_proj = Linear(mixer.heads * mixer.value_width, hidden_size, mixer.output_bias)
        if mixer.gate in HEAD_GATES:
            self.g_proj = Linear(hidden_size, mixer.heads)
        if mixer.sinks:
            self.sinks = mx.zeros((mixer.heads,))
        if mixer.norm is not None:
            by_head = mixer.norm == "head"
            self.q_norm = RMSNorm(mixer.head_dim if by_head else queries, eps)
            self.k_norm = RMSNorm(mixer.head_dim if by_head else keys, eps)
        self.rope = Rope(mixer.rotation) if mixer.rotation else None
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj.pack()
        self._weights = None
        if self.mixer.norm == "head" and self.rope is not None:
            self._weights = packed(self.q_norm.weight, self.k_norm.weight, self.rope.periods)

    def __call__(self, x: Array, norm: RMSNorm, cache: Steps) -> Array:
        """x plus what is mixed of norm(x)."""
        B, L, _ = x.shape
        joined, (q, k, v) = self._inputs(x, norm)
        mixer, heads, kv_heads = self.mixer, self.mixer.heads, self.mixer.kv_heads
        if mixer.norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        norms = (self.q_norm, self.k_norm) if mixer.norm == "head" else (None, None)
        q, k, v = (part.reshape(B, L, n, -1) for part, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        whole = Whole(joined, self._weights) if isinstance(joined, mx.array) and self._weights else None
        out = attend(
            *(q, k, v, cache),
            q_norm=norms[0],
            k_norm=norms[1],
            rope=self.rope,
            scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
            window=mixer.window,
            sinks=self.get("sinks"),
            whole=whole,
        )
        if mixer.value_scale != 1.0:
            out = out * mixer.value_scale
        if mixer.gate in HEAD_GATES:
            out = times_heads(out, HEAD_GATES[mixer.gate](self.g_proj(x, norm)))
        return self.o_proj(out, residual=x)
