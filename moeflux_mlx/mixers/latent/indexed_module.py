"""Latent attention over chosen positions or blocks: the projections of the indexer and of the attention."""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...caches.entries import EntriesCache
from ...caches.traced import PLAIN, OnKernels
from ...kinds import Indexer, KeyBlocks
from ...layers import Linear, RMSNorm, Stack, normed_with_weights
from ...ops.backend import Array, library_of
from ...ops.elementwise import float32, split
from ...ops.entry_pool import Pool, pooled
from ...ops.index import IndexTerms, Projections, put_in_ring, takes_step
from ...ops.norm import Norm, layer_norm
from ...ops.rope import Rope
from ...ops.rows import RowCaches
from ...ops.seen import Chosen
from .indexed_op import attend_indexed, attend_pools
from .module import MLA
from .op import Queries, Up
from .spec import Latent

INDEX_NORM_EPS = 1e-6  # epsilon of the keys' norm, fixed in the published model code


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (arXiv:1607.06450)."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = mx.ones((dims,)), mx.zeros((dims,)), eps

    def __call__(self, x: Array) -> Array:
        return layer_norm(x, self.weight, self.bias, self.eps)


class Scoring(nn.Module):
    """Scores positions with queries from the queries' latent, and with keys and weights of heads from the input, which
    `wk` and `weights_proj` make together with other layers' outputs.
    """

    def __init__(self, indexer: Indexer, mixer: Latent, hidden_size: int):
        super().__init__()
        assert mixer.q_latent is not None and mixer.rotation is not None
        self.heads = indexer.heads
        self.wq_b = Linear(mixer.q_latent, indexer.heads * indexer.dim)
        self.wk = Linear(hidden_size, indexer.dim)
        self.k_norm = LayerNorm(indexer.dim, INDEX_NORM_EPS)
        self.weights_proj = Linear(hidden_size, indexer.heads)
        self.scale = (indexer.heads * indexer.dim) ** -0.5
        self.rope = Rope(indexer.rotation(mixer.rotation))

    def __call__(self, latent: Array | None, norm: Norm, keys: Array, weights: Array) -> Projections:
        """For `attend_indexed`: of the queries' latent, which must be normed by `norm` (None: no token needs queries),
        and of the outputs of `wk` and `weights_proj`."""
        queries = None if latent is None else self.wq_b(latent, norm)
        return Projections(queries, keys, weights, IndexTerms(self.k_norm, self.rope, self.scale))


class IndexedMLA(MLA):
    """`MLA` over the positions that an indexer chooses."""

    def __init__(self, mixer: Latent, hidden_size: int, split_latent: bool = False):
        assert mixer.indexer is not None
        super().__init__(mixer, hidden_size, split_latent)
        self.rule = mixer.indexer
        if not self.rule.reuses:
            self.indexer = Scoring(self.rule, mixer, hidden_size)
            self.arrange()

    def _reading_x(self) -> list[Linear]:
        return [*super()._reading_x(), *([self.indexer.wk] if "indexer" in self else [])]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        if self.rule.reuses:
            return super().begin(x, norm)
        made: Any = normed_with_weights(x, norm, self.indexer.weights_proj)
        return [made[1], *self._inputs.outputs(made[0])]

    def mix(self, parts: Sequence[Array], cache: Any, *more: Chosen | None) -> Array:
        """As `MLA.mix`; `more`: what the last layer with an indexer chose for these tokens."""
        chosen = (more and more[0]) or Chosen()
        if isinstance(cache, RowCaches):
            return cache.each(
                lambda row, one: self._mix([part[:, row] for part in parts], one, chosen.of_row(row.start))
            )
        return self._mix(parts, cache, chosen)

    def _mix(self, parts: Sequence[Array], cache: Any, chosen: Chosen) -> Array:
        made: Projections | None = None
        if self.rule.reuses:
            _, (q, kv) = self._inputs.parted(parts)
        else:
            _, (q, kv, keys) = self._inputs.parted(parts[1:])
            length = q.shape[1]
            latent = None if cache.own.whole(length) == length else q
            made = self.indexer(latent, self.q_a_layernorm, keys, parts[0])
        return attend_indexed(
            *(q, kv, cache, Queries(self.heads, Up(self.q_b_proj, self.q_a_layernorm), self.query_scale)),
            *(self._key(), self._value()),
            made=made,
            indexer=self.rule,
            chosen=chosen,
            norm=self.kv_a_layernorm,
            rope=self.rope,
            scale=self.scale,
        )


class PoolScoring(nn.Module):
    """Scores blocks as `Scoring` does positions, but keys are not rotated, and the keys of a block are joined by its
    positions' gates.
    """

    def __init__(self, blocks: KeyBlocks, mixer: Latent, hidden_size: int):
        super().__init__()
        assert mixer.q_latent is not None
        indexer = blocks.indexer
        self.blocks, self.ratio = blocks, blocks.ratio
        self.wq_b = Linear(mixer.q_latent, indexer.heads * indexer.dim)
        self.wk, self.wgate = Linear(hidden_size, indexer.dim), Linear(hidden_size, indexer.dim)
        self.k_norm = LayerNorm(indexer.dim, INDEX_NORM_EPS)
        self.ape = mx.zeros((blocks.ratio, indexer.dim))
        self.weights_proj = Linear(hidden_size, indexer.heads)
        self.scale = (indexer.heads * indexer.dim) ** -0.5

    def __call__(
        self, latent: Array | None, norm: Norm, keys: Array, floats: Sequence[Array], cache: EntriesCache
    ) -> Projections:
        """For `attend_pools`: of the queries' latent, which must be normed by `norm` (None: no token needs queries),
        and of the outputs of `wk`, `weights_proj` and `wgate`. `cache` absorbs the keys; the result has those of all
        whole blocks.
        """
        queries = None if latent is None else self.wq_b(latent, norm)
        (weights, gates), library, kernels = floats, library_of(keys), PLAIN
        rows = library.concatenate([self.k_norm(keys), gates.astype(keys.dtype)], axis=-1)
        if isinstance(keys, mx.array) and keys.shape[:2] == (1, 1) and takes_step(self.blocks):
            pool = Pool(keys.shape[-1], self.ratio, gates=keys.shape[-1], bias=self.ape)
            kernels = OnKernels(put_in_ring(keys, gates, self.k_norm), pool.entry)
        _, _, joined = cache.absorb(rows, self._keys, kernels)
        return Projections(queries, joined, weights, IndexTerms(None, None, self.scale))

    def _keys(self, rows: Any, first: Any, count: int) -> Any:
        """Keys of so many blocks, of what the cache has of their positions."""
        keys, gates = split(rows.reshape(rows.shape[0], -1, self.ratio, rows.shape[-1]), rows.shape[-1] // 2)
        return pooled(keys, gates, self.ape, False, False)


class PooledMLA(MLA):
    """`MLA` over the blocks of positions that an indexer chooses."""

    kept_float32: ClassVar[tuple[str, ...]] = ("ape",)

    def __init__(self, mixer: Latent, hidden_size: int, split_latent: bool = False):
        assert mixer.blocks is not None
        super().__init__(mixer, hidden_size, split_latent)
        self.blocks = mixer.blocks
        self.indexer = PoolScoring(mixer.blocks, mixer, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once all have their tensors."""
        super().arrange()
        if "indexer" in self:
            self._floats = Stack(self.indexer.weights_proj, self.indexer.wgate)

    def _reading_x(self) -> list[Linear]:
        return [*super()._reading_x(), *([self.indexer.wk] if "indexer" in self else [])]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        weights_proj, wgate = self._floats.layers
        made: Any = normed_with_weights(x, norm, self._floats.stacked or weights_proj)
        more: list[Any] = [] if self._floats.stacked else [wgate(float32(made[0]))]
        return [*made[1:], *more, *self._inputs.outputs(made[0])]

    def mix(self, parts: Sequence[Array], cache: Any, *more: Any) -> Array:
        if isinstance(cache, RowCaches):
            return cache.each(lambda row, one: self.mix([part[:, row] for part in parts], one))
        _, floats = self._floats.parted(parts)
        _, (q, kv, keys) = self._inputs.parted(parts[1 if self._floats.stacked else 2 :])
        latent = None if cache.own.whole(q.shape[1]) == q.shape[1] else q
        return attend_pools(
            *(q, kv, cache.own, Queries(self.heads, Up(self.q_b_proj, self.q_a_layernorm), self.query_scale)),
            *(self._key(), self._value()),
            made=self.indexer(latent, self.q_a_layernorm, keys, floats, cache.beside),
            blocks=self.blocks,
            norm=self.kv_a_layernorm,
            rope=self.rope,
            scale=self.scale,
        )
