"""Queries, or the scores of a token, scaled by the token's position."""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import mlx.core as mx

from ..kinds import QueryFactor, QueryGrowth, QueryLog
from .backend import AnyArray, Array, library_of, of_kind
from .launch import Input


def query_factors(positions: Array, by: QueryFactor, library: ModuleType) -> AnyArray:
    """The float32 factors of queries at integer positions, with operations of numpy or MLX."""
    if isinstance(by, QueryGrowth):
        return library.exp(by.exponent * library.log1p((positions + 1).astype(library.float32) / by.length))
    if isinstance(by, QueryLog):
        share = (positions + 1).astype(library.float32) / by.floor
        return 1.0 + by.beta * library.log(library.maximum(share, 1.0))
    stretches = (positions + by.first) // by.original_max_position_embeddings
    return 1.0 + by.beta * library.log1p(stretches.astype(library.float32))


def scaled_queries(q: Array, offset: int | mx.array, by: QueryFactor | None) -> Array:
    """q [B, L, heads, D] of positions from `offset`, scaled; None: as they are."""
    if by is None:
        return q
    library = library_of(q)
    factors = query_factors(library.arange(q.shape[1]) + offset, by, library)
    return (q * factors[:, None, None]).astype(q.dtype)


def grown_queries(q: Array, offset: int | mx.array, scale: mx.array, bias: mx.array) -> Array:
    """q [B, L, heads * D] of positions from `offset`, times scale * log(position + 1) + bias of each head, in float32
    (transformers, `MistralLarge4TextSoftmaxScaling`).
    """
    (B, L, _), library = q.shape, library_of(q)
    own, more = of_kind(scale, q), of_kind(bias, q)
    first = library.array(offset)
    places = first.reshape(1, 1, 1) if L == 1 else library.arange(L)[:, None, None] + first
    factors = (_factors_of_one if L == 1 and library is mx else _factors)(places, own, more)
    return (q.reshape(B, L, len(scale), -1) * factors).astype(q.dtype).reshape(q.shape)


def _factors(places: Array, scale: Array, bias: Array) -> Array:
    """[L, heads, 1] of places [L, 1, 1]."""
    library = library_of(places)
    logs = library.log1p(places.astype(library.float32))
    return logs * scale[:, None].astype(library.float32) + bias[:, None].astype(library.float32)


# Compiled, a product and a sum round once: a layer outside of the compiled step must round like one inside of it.
_factors_of_one = mx.compile(_factors)


def score_scale(positions: Sequence[mx.array], scale: float, by: QueryFactor | None) -> Input:
    """The factor of a token's scores, with `positions` as of `Held`: a number, or an array with one per row."""
    return scale if by is None else _scaling(scale, by)(*(own[3:] for own in positions))


@lru_cache(16)
def _scaling(scale: float, by: QueryFactor) -> AnyArray:
    """A function of the tokens' positions; compiled it is one launch for one of them."""
    return mx.compile(lambda *positions: scale * query_factors(mx.concatenate(list(positions)), by, mx))
