"""Grouped-query attention: projections with norms, biases, sinks and gate, and those of an indexer that chooses blocks
of positions.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kinds import GroupedQuery, HeadBlocks, KeyBlocks, Rotation
from ..ops.attend import Whole, attend
from ..ops.backend import Array, library_of, view
from ..ops.blocks import Terms, attend_blocks, block_keys
from ..ops.elementwise import HEAD_GATES, gated_heads, split
from ..ops.index import Index
from ..ops.norm import rms_norm
from ..ops.rope import Rope
from ..ops.rows import RowCaches
from .layers import Linear, MixerModule, RMSNorm, Stack, packed


class BlockIndexer(nn.Module):
    """Scores blocks of positions: makes queries and keys from the input, normed and rotated."""

    def __init__(self, blocks: KeyBlocks, rotation: Rotation, hidden_size: int, eps: float):
        super().__init__()
        self.blocks, indexer = blocks, blocks.indexer
        self.index_qk_proj = Linear(hidden_size, (indexer.heads + 1) * indexer.dim)
        self.q_layernorm, self.k_layernorm = RMSNorm(indexer.dim, eps), RMSNorm(indexer.dim, eps)
        self.rope, self.block_rope = Rope(rotation), Rope(rotation, blocks.ratio)

    def projected(self, x: Array, norm: RMSNorm | None) -> Any:
        """The projections of norm(x) from which queries and keys are made, side by side."""
        return self.index_qk_proj(x, norm)

    def __call__(self, projected: Array, cache: Any, position: Any) -> Index:
        """The index of tokens from a rotary position on; `cache` absorbs their keys, and the result has the keys of all
        whole blocks.
        """
        (B, L, _), indexer = projected.shape, self.blocks.indexer
        q, k = split(projected, indexer.heads * indexer.dim)
        q, is_mlx = self.q_layernorm(q.reshape(B, L, indexer.heads, -1)), isinstance(projected, mx.array)
        q = self.rope(q.swapaxes(1, 2) if is_mlx else q, position)
        _, _, keys = cache.absorb(k, self._keys)
        weights = (mx.ones if is_mlx else np.ones)((B, L, indexer.heads)) * indexer.dim**-0.5
        return Index(q.swapaxes(1, 2) if is_mlx else q, keys, weights.astype((mx if is_mlx else np).float32))

    def _keys(self, rows: Any, first: Any, count: int) -> Any:
        """Keys of so many blocks from number `first` on, of their positions' index keys."""
        return block_keys(rows, self.k_layernorm, self.block_rope, first, self.blocks.ratio)


class HeadIndexer(nn.Module):
    """Scores blocks of positions for each key head: makes queries and keys from the input, normed and rotated."""

    def __init__(self, blocks: HeadBlocks, rotation: Rotation, hidden_size: int, eps: float):
        super().__init__()
        self.heads, width = blocks.indexer.heads, blocks.indexer.dim
        self.q_proj, self.k_proj = Linear(hidden_size, self.heads * width), Linear(hidden_size, width)
        self.q_norm, self.k_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.rope = Rope(rotation)

    def projected(self, x: Array, norm: RMSNorm | None) -> Any:
        """The projections of norm(x) from which queries and keys are made, side by side."""
        library = library_of(x)
        return library.concatenate([self.q_proj(x, norm), self.k_proj(x, norm)], axis=-1)

    def __call__(self, projected: Array, cache: Any, position: Any) -> Index:
        """The index of tokens from a rotary position on; `cache` absorbs their keys, and the result has the keys of all
        positions.
        """
        B, L, _ = projected.shape
        width = projected.shape[-1] // (self.heads + 1)
        q, k = (part.reshape(B, L, -1, width) for part in split(projected, self.heads * width))
        is_mlx = isinstance(projected, mx.array)
        q, k = self.q_norm(q), self.k_norm(k)
        if is_mlx:
            q, k = (self.rope(part.swapaxes(1, 2), position).swapaxes(1, 2) for part in (q, k))
        else:
            q, k = self.rope(q, position), self.rope(k, position)
        rows = mx.array(k.swapaxes(1, 2))
        keys, _ = cache.update_and_fetch(rows, mx.zeros((B, 1, L, 0), rows.dtype))
        return Index(q, (keys if is_mlx else view(keys))[:, 0], q[..., 0])  # the weights are not read


class Attention(MixerModule):
    """Softmax attention of any family; its switches are `GroupedQuery`'s."""

    def __init__(self, mixer: GroupedQuery, hidden_size: int, eps: float):
        super().__init__()
        self.mixer, self.eps = mixer, eps
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        self.q_proj = Linear(hidden_size, queries * (2 if mixer.gate == "joined" else 1), mixer.bias)
        self.k_proj = Linear(hidden_size, keys, mixer.bias)
        if not mixer.value_is_key:
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
        if mixer.blocks is not None and mixer.rotation is not None:
            kind: Any = HeadIndexer if isinstance(mixer.blocks, HeadBlocks) else BlockIndexer
            self.indexer = kind(mixer.blocks, mixer.rotation, hidden_size, eps)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and the arrays that kernels take together; called when all tensors are
        loaded.
        """
        inputs = [self.q_proj, self.k_proj, *([] if self.mixer.value_is_key else [self.v_proj])]
        self._before_gates = len(inputs)
        has_gates = "g_proj" in self and self.g_proj.is_like(self.q_proj)
        self._inputs = Stack(*inputs, *([self.g_proj] if has_gates else []))
        self.o_proj.pack()
        self._weights = None
        if self.mixer.norm == "head" and self.rope is not None and not self.mixer.value_is_key:
            self._weights = packed(self.q_norm.weight, self.k_norm.weight, self.rope.periods)

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        outputs: list[Array] = self._inputs.outputs(x, norm)
        if self.mixer.gate in HEAD_GATES and len(self._inputs.layers) == self._before_gates:
            outputs.append(self.g_proj(x, norm))
        if self.mixer.blocks is not None:
            outputs.append(self.indexer.projected(x, norm))
        return outputs

    def mix(self, parts: Sequence[Array], cache: Any, *more: Any) -> Array:
        if self.mixer.blocks is not None and isinstance(cache, RowCaches):
            return cache.each(lambda row, one: self.mix([part[:, row] for part in parts], one))
        B, L, _ = parts[0].shape
        joined, outputs = self._inputs.parted(parts)
        q, k, v = (outputs[i] for i in ((0, 1, 1) if self.mixer.value_is_key else (0, 1, 2)))
        mixer, heads, kv_heads = self.mixer, self.mixer.heads, self.mixer.kv_heads
        if mixer.norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        norms = (self.q_norm, self.k_norm) if mixer.norm == "head" else (None, None)
        q, k, v = (part.reshape(B, L, n, -1) for part, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        if mixer.blocks is not None:
            v = rms_norm(v, None, self.eps) if mixer.value_norm else v
            index = self.indexer(parts[-1], cache.beside, cache.position)
            return attend_blocks(q, k, v, cache.own, index, mixer.blocks, Terms(norms[0], norms[1], self.rope, scale))
        whole = Whole(joined, self._weights) if isinstance(joined, mx.array) and self._weights else None
        return attend(
            *(q, k, v, cache),
            q_norm=norms[0],
            k_norm=norms[1],
            rope=self.rope,
            scale=scale,
            window=mixer.window,
            sinks=self.get("sinks"),
            value_norm=self.eps if mixer.value_norm else None,
            whole=whole,
        )

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        if self.mixer.value_scale != 1.0:
            out = out * self.mixer.value_scale
        if self.mixer.gate in HEAD_GATES:
            gates = self._inputs.parted(parts)[1][self._before_gates :] or parts[-1:]
            out = gated_heads(out, gates[0], self.mixer.gate)
        return self.o_proj(out, residual=x)
