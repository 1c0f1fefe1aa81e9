"""How the indexers of latent attention score positions and blocks, and the factors of queries that grow."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ...caches.entries import EntriesCache
from ...caches.traced import PLAIN, OnKernels
from ...kinds import Indexer, KeyBlocks
from ...layers import LayerNorm, Linear
from ...ops.backend import AnyArray, Array, kernels_take, library_of
from ...ops.elementwise import split
from ...ops.entry_pool import Pool, pooled
from ...ops.index import IndexTerms, Projections, put_in_ring, refusal
from ...ops.norm import Norm
from ...ops.query_scale import grown_queries
from ...ops.rope import Rope
from .spec import Latent


class Growth(nn.Module):
    """The factors of queries that grow with the position (`grown_queries`)."""

    def __init__(self, heads: int):
        super().__init__()
        self.scale, self.bias = mx.zeros((heads,)), mx.ones((heads,))

    def __call__(self, q: Array, position: int | mx.array) -> Array:
        """q [B, L, heads * D] of tokens from a position on, scaled."""
        return grown_queries(q, position, self.scale, self.bias)


class Scoring(nn.Module):
    """Scores positions with queries from the queries' latent or from the input, and with keys and weights of heads from
    the input, which `wk` and `weights_proj` make together with other layers' outputs.
    """

    def __init__(self, indexer: Indexer, mixer: Latent, hidden_size: int):
        super().__init__()
        if indexer.from_input:
            self.q_input_norm = LayerNorm(hidden_size, indexer.norm_eps)
        if mixer.grows:
            self.softmax_scaling = Growth(indexer.heads)
        self.heads, width = indexer.heads, hidden_size if indexer.from_input else mixer.q_latent
        assert width is not None
        self.wq_b = Linear(width, indexer.heads * indexer.dim)
        self.wk = Linear(hidden_size, indexer.dim)
        self.k_norm, self.rotates_last = LayerNorm(indexer.dim, indexer.norm_eps), indexer.rotates_last
        self.weights_proj = Linear(hidden_size, indexer.heads)
        self.scale = (indexer.heads * indexer.dim) ** -0.5
        self.rope = Rope(indexer.rotation(mixer.rotation)) if mixer.rotation else None

    def of_input(self, x: Array) -> Array:
        """The queries of normed rows x, not scaled by their positions."""
        return self.wq_b(self.q_input_norm(x))

    def __call__(self, queries: Array | None, keys: Array, weights: Array) -> Projections:
        """For `attend_indexed`: of queries (None: no token needs them), and of the outputs of `wk` and
        `weights_proj`."""
        terms = IndexTerms(self.k_norm, self.rope, self.scale, rotates_last=self.rotates_last)
        return Projections(queries, keys, weights, terms)


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
        self.k_norm = LayerNorm(indexer.dim, indexer.norm_eps)
        self.ape = mx.zeros((blocks.ratio, indexer.dim))
        self.weights_proj = Linear(hidden_size, indexer.heads)
        self.scale = (indexer.heads * indexer.dim) ** -0.5

    def __call__(
        self, latent: Array | None, norm: Norm, keys: Array, floats: Sequence[AnyArray], cache: EntriesCache
    ) -> Projections:
        """For `attend_pools`: of the queries' latent, which must be normed by `norm` (None: no token needs queries),
        and of the outputs of `wk`, `weights_proj` and `wgate`. `cache` absorbs the keys; the result has those of all
        whole blocks.
        """
        queries = None if latent is None else self.wq_b(latent, norm)
        (weights, gates), library, kernels = floats, library_of(keys), PLAIN
        rows = library.concatenate([self.k_norm(keys), gates.astype(keys.dtype)], axis=-1)
        if keys.shape[:2] == (1, 1) and kernels_take(keys, refusal, True, self.blocks):
            pool = Pool(keys.shape[-1], self.ratio, gates=keys.shape[-1], bias=self.ape)
            kernels = OnKernels(put_in_ring(keys, gates, self.k_norm), pool.entry)
        _, _, joined = cache.absorb(rows, self._keys, kernels)
        return Projections(queries, joined, weights, IndexTerms(None, None, self.scale))

    def _keys(self, rows: Array, first: int | mx.array, count: int) -> Array:
        """Keys of so many blocks, of what the cache has of their positions."""
        keys, gates = split(rows.reshape(rows.shape[0], -1, self.ratio, rows.shape[-1]), rows.shape[-1] // 2)
        return pooled(keys, gates, self.ape, False, False)
