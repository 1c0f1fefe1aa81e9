"""Attention over a window and compressed entries: projections, and the parts that make and choose entries."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...caches.traced import PLAIN, OnKernels
from ...kinds import Rotation
from ...layers import Caches, Linear, RMSNorm, Stack, normed_with_weights
from ...ops import backend
from ...ops.backend import AnyArray, Array, kernels_take, library_of
from ...ops.elementwise import float32, softmax, split
from ...ops.entry_pool import Pool, pool_refusal, pooled
from ...ops.index import IndexTerms, Projections
from ...ops.launch import in_turn
from ...ops.linear import grouped_linear
from ...ops.norm import rms_norm
from ...ops.rope import Rope, turned
from ...ops.seen import Chosen
from .op import (
    Seen,
    attend_compressed,
    attend_token,
    choose_among,
    choose_entries,
    refusal,
    rounded_entry,
    rounded_key,
    token_inputs,
)
from .spec import Compressed, Compressor

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ("ape",)
FORMS: tuple[str, ...] = ()


class Pooling(nn.Module):
    """Makes entries of `width` values from values and gates of each position, with biases of gates by place, norm and
    rotation.
    """

    def __init__(self, compressor: Compressor, width: int, rotation: Rotation, hidden_size: int, eps: float):
        super().__init__()
        self.overlaps = compressor.overlaps
        made = compressor.series * width
        self.wkv, self.wgate = Linear(hidden_size, made), Linear(hidden_size, made)
        self.ape = mx.zeros((compressor.ratio, made))
        self.norm = RMSNorm(width, eps)
        self.rope = Rope(rotation, compressor.ratio)

    def __call__(self, values: Array, gates: Array, first: int | mx.array, count: int) -> Array:
        """So many entries [B, count, width] from number `first` on, of values and gates [B, n, ratio, .] (`pooled`)."""
        entries = self.norm(pooled(values, gates, self.ape, self.overlaps, values.shape[1] == count))
        return turned(entries[:, :, None], self.rope, first)[:, :, 0]


class SharedPooling(nn.Module):
    """Makes entries that later layers use too (`Compressor.shares`), and from each an index key behind it."""

    def __init__(self, mixer: Compressed, hidden_size: int, eps: float):
        super().__init__()
        compressor = mixer.compressor
        assert compressor is not None and compressor.indexer is not None
        self.mixer, self.rope = mixer, Rope(mixer.rotation, compressor.ratio)
        self.wkv = Linear(hidden_size, mixer.head_dim)
        if compressor.ratio > 1:
            self.wgate = Linear(hidden_size, mixer.head_dim)
        self.norm = RMSNorm(mixer.head_dim, eps)

    def __call__(self, parts: Sequence[Any], first: int | mx.array, index_key: Callable[[Any], Any]) -> Any:
        """Entries from number `first` on, of values and perhaps gates [B, n, ratio, D] of their positions. `index_key`
        makes keys, which are yet to be rotated, of entries that are not rotated either.
        """
        values, *gates = parts
        made = values[:, :, 0]
        if gates:
            made = (float32(values) * softmax(float32(gates[0]).swapaxes(2, 3)).swapaxes(2, 3)).sum(axis=2)
        made = self.norm(made.astype(values.dtype))
        entry, key = (self._turned(one, first) for one in (made, index_key(made)))
        return library_of(made).concatenate(rounded_entry(entry, key, self.mixer), axis=-1)

    def _turned(self, x: Array, first: int | mx.array) -> Array:
        return turned(x[:, :, None], self.rope, first)[:, :, 0]


class EntryIndexer(nn.Module):
    """Scores entries with queries from the queries' latent and weights of heads; the keys are entries themselves."""

    def __init__(self, mixer: Compressed, compressor: Compressor, hidden_size: int, eps: float):
        super().__init__()
        assert compressor.indexer is not None
        self.heads, width = compressor.indexer.heads, compressor.indexer.dim
        self.wq_b = Linear(mixer.q_latent, self.heads * width)
        self.weights_proj = Linear(hidden_size, self.heads)
        if compressor.shares:
            self.wk, self.k_norm = Linear(mixer.head_dim, width), RMSNorm(width, eps)
        elif not compressor.borrows:
            self.compressor: Any = Pooling(compressor, width, mixer.rotation, hidden_size, eps)
        self.scale = (self.heads * width) ** -0.5


class CompressedAttention(nn.Module):
    """Attention of DeepSeek-V4."""

    def __init__(self, mixer: Compressed, hidden_size: int, eps: float):
        super().__init__()
        self.mixer, self.eps = mixer, eps
        width, groups = mixer.heads * mixer.head_dim, mixer.groups
        self.wq_a = Linear(hidden_size, mixer.q_latent)
        self.q_norm = RMSNorm(mixer.q_latent, eps)
        self.wq_b = Linear(mixer.q_latent, width)
        self.wkv = Linear(hidden_size, mixer.head_dim)
        self.kv_norm = RMSNorm(mixer.head_dim, eps)
        self.wo_a = Linear(width // groups, groups * mixer.group_latent)
        self.wo_b = Linear(groups * mixer.group_latent, hidden_size)
        self.attn_sink = mx.zeros((mixer.heads,))
        self.rope, self.back = Rope(mixer.rotation), Rope(mixer.rotation, -1)
        self._make_entries(hidden_size)
        self.arrange()

    def _make_entries(self, hidden_size: int) -> None:
        """The modules that make entries and choose among them."""
        mixer, compressor = self.mixer, self.mixer.compressor
        if compressor is not None:
            self.compressor: Any = Pooling(compressor, mixer.head_dim, mixer.rotation, hidden_size, self.eps)
            if compressor.indexer is not None:
                self.indexer = EntryIndexer(mixer, compressor, hidden_size, self.eps)

    def arrange(self) -> None:
        """Joins the layers that read x; called again once all have their tensors."""
        inputs = [layer for pool in self._pools() for layer in (pool.wkv, pool.wgate)]
        self._inputs = Stack(self.wq_a, self.wkv, *inputs)

    def mixed(self, x: Array, norm: RMSNorm, caches: Caches, *more: Chosen | None) -> Array:
        """The mixer's output from norm(x) [B, L, D], without the residual x."""
        cache = caches[0]
        (B, L, _), position, whole = x.shape, cache.position, cache.whole(x.shape[1])
        on_kernels = kernels_take(x, refusal, B * L, self.mixer)
        joined, (latent, *parts) = self._inputs(x, norm)
        q: AnyArray = self.wq_b(latent, self.q_norm)
        if on_kernels:
            q, row = token_inputs(q, _behind(joined, latent, parts), self.kv_norm, self.rope, position, self.mixer)
        else:
            q = turned(rms_norm(q.reshape(B, L, self.mixer.heads, -1), None, self.eps), self.rope, position)
            key = turned(self.kv_norm(parts[0])[:, :, None], self.rope, position)[:, :, 0]
            row = library_of(x).concatenate([key, *parts[1:]], axis=-1)
        kernels = OnKernels(pool=self._pooled) if on_kernels and self._pools_on_kernels() else PLAIN
        seen = Seen(cache.offset, *cache.absorb(row, self._entries, kernels))
        if whole < L:
            made = self._index(x, norm, latent, seen.entries)
            seen = seen._replace(chosen=choose_entries(made, seen, whole, position, self.mixer))
        if on_kernels:
            out: AnyArray = attend_token(q, seen, self.attn_sink, self.back, position, self.mixer)
        else:
            out = attend_compressed(q, seen, self.attn_sink, self.mixer)
            out = turned(out, self.back, position).reshape(B, L, -1)
        return self.wo_b(grouped_linear(out, self.wo_a, self.mixer.groups))

    def _pools(self) -> list[Any]:
        own = [self.compressor] if "compressor" in self else []
        return [*own, self.indexer.compressor] if "indexer" in self else own

    def _entries(self, rows: Array, first: int | mx.array, count: int) -> Array:
        """So many from number `first` on, of what the cache has of their positions."""
        compressor = self.mixer.compressor
        assert compressor is not None
        rows = rows[..., self.mixer.head_dim :]
        rows = rows.reshape(rows.shape[0], -1, compressor.ratio, rows.shape[-1])
        widths = np.cumsum(compressor.inputs(self.mixer.head_dim)).tolist()
        parts = split(rows, *widths[:-1])
        made = [pool(*parts[2 * i : 2 * i + 2], first, count) for i, pool in enumerate(self._pools())]
        return library_of(rows).concatenate(made, axis=-1)

    def _pools_on_kernels(self) -> bool:
        return not any(pool_refusal(backend.name(), pool.norm.weight.size) for pool in self._pools())

    def _pooled(self, ring: mx.array, offset: mx.array, is_first: bool) -> mx.array:
        """`_entries` of one entry by kernels, one for each part."""
        parts, column = [], self.mixer.head_dim
        for pool in self._pools():
            values, width = pool.wkv.shape[0], pool.norm.weight.size
            turning: Any = {"norm": pool.norm, "rope": pool.rope, "rotates_last": True}
            made = Pool(width, self.mixer.ratio, column, column + values, pool.ape, values // width, **turning)
            parts.append(made.entry(ring, offset, is_first))
            column += 2 * values
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _index(self, x: Array, norm: RMSNorm, latent: Array, entries: Array) -> Projections:
        own = self.indexer
        _, weights = normed_with_weights(x, norm, own.weights_proj)
        terms = IndexTerms(None, self.rope, own.scale, rotates_last=True)
        return Projections(own.wq_b(latent, self.q_norm), entries, weights, terms)


class SharingAttention(CompressedAttention):
    """Attention of DeepSeek-V4.1: layers hand their entries and what an indexer chose among them on to later ones."""

    def _make_entries(self, hidden_size: int) -> None:
        mixer, compressor = self.mixer, self.mixer.compressor
        if compressor is not None and compressor.shares:
            self.compressor = SharedPooling(mixer, hidden_size, self.eps)
        if compressor is not None and compressor.indexer is not None and not compressor.indexer.reuses:
            self.indexer = EntryIndexer(mixer, compressor, hidden_size, self.eps)

    def arrange(self) -> None:
        """Joins the layers that read x; called again once all have their tensors."""
        pool = self.get("compressor", {})
        self._inputs = Stack(self.wq_a, self.wkv, *(pool[name] for name in ("wkv", "wgate") if name in pool))

    def mixed(self, x: Array, norm: RMSNorm, caches: Caches, *more: Chosen | None) -> Array:
        """As `CompressedAttention.mixed`; `more`: what earlier layers hand on."""
        cache = caches[0]
        (B, L, _), position, whole = x.shape, cache.position, cache.whole(x.shape[1])
        chosen: Chosen = (more and more[0]) or Chosen()
        on_kernels = kernels_take(x, refusal, B * L, self.mixer)
        joined, (latent, *parts) = self._inputs(x, norm)
        q: AnyArray = self.wq_b(latent, self.q_norm)
        if on_kernels:
            q, row = token_inputs(q, _behind(joined, latent, parts), self.kv_norm, self.rope, position, self.mixer)
        else:
            q = turned(q.reshape(B, L, self.mixer.heads, -1), self.rope, position)
            key = turned(self.kv_norm(parts[0])[:, :, None], self.rope, position)[:, :, 0]
            row = library_of(x).concatenate([rounded_key(key, self.mixer), *parts[1:]], axis=-1)
        seen = Seen(cache.offset, *cache.absorb(row, self._entries))
        if self.mixer.ratio:
            chosen.entries = seen.entries
        elif self.mixer.seen_ratio:
            seen = seen._replace(entries=chosen.entries)
        if "indexer" in self:
            chosen.positions = None
            if whole < L and seen.entries is not None:
                made = self._index(x, norm, latent, seen.entries)
                chosen.positions, chosen.blocks = choose_among(made, seen, whole, position, self.mixer, chosen.blocks)
        if self.mixer.seen_ratio and whole < L and seen.entries is not None:
            seen = seen._replace(chosen=chosen.positions)
        if on_kernels:
            out: AnyArray = attend_token(q, seen, self.attn_sink, self.back, position, self.mixer)
        else:
            out = turned(attend_compressed(q, seen, self.attn_sink, self.mixer), self.back, position).reshape(B, L, -1)
        return self.wo_b(grouped_linear(out, self.wo_a, self.mixer.groups))

    def _entries(self, rows: Array, first: int | mx.array, count: int) -> Array:
        compressor = self.mixer.compressor
        assert compressor is not None
        rows = rows[..., self.mixer.head_dim :]
        rows = rows.reshape(rows.shape[0], count, compressor.ratio, rows.shape[-1])
        parts = split(rows, *range(self.mixer.head_dim, rows.shape[-1], self.mixer.head_dim))
        return self.compressor(parts, first, lambda made: self.indexer.k_norm(self.indexer.wk(made)))


def _behind(joined: Any, latent: Any, parts: Sequence[Any]) -> Any:
    """What stands behind the latent in the output of the layers that read x: a part of it, if they are `joined`."""
    return mx.concatenate(list(parts), axis=-1) if joined is None else in_turn(joined, latent, parts[0])[1]


def make_module(mixer: Compressed, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values."""
    return (CompressedAttention if mixer.norms_queries else SharingAttention)(mixer, hidden_size, eps)
