"""Attention whose scores have a bias by distance (`RelativeBias`), perhaps with a sink of each token, in MLX's
operations, on the CPU too.
"""

from typing import NamedTuple

import mlx.core as mx

from ...ops.backend import AnyArray, arange, leave, of_kind
from ...ops.positions import Steps
from ...ops.query_scale import scaled_queries
from ...ops.rows import StepRows
from .op import attend_in_parts
from .terms import Terms


class Biased(NamedTuple):
    """What some queries add to their scores.

    Args:
        biases: [B, heads, L, extent], by distance.
        sinks: [B, heads, L, 1], logits of the softmax's sum; None: there are none.
        place: of the first query.
        scale, window: as of `Terms`.
    """

    biases: mx.array
    sinks: mx.array | None
    place: int | mx.array
    scale: float
    window: int | None

    def part(
        self, q: mx.array, k: mx.array, v: mx.array, rows: slice, places: slice, mask: AnyArray, positions: int
    ) -> mx.array:
        """A part of attention, [B, heads, R, V]. A `mask` of one token over a cache's slots (`Positions.mask`) says
        which it sees, and position p lies in slot p % `positions`.
        """
        if len(getattr(mask, "shape", ())) == 4:
            ages, seen = ((self.place - arange(positions, mx)) % positions)[None], mask
        else:
            before = positions - self.biases.shape[2]
            ages = mx.arange(before + rows.start, before + rows.stop)[:, None] - mx.arange(places.start, places.stop)
            seen = ages >= 0 if self.window is None else (ages >= 0) & (ages < self.window)
        added = _by_age(self.biases[:, :, rows], ages, seen)
        if self.sinks is None:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=added)
        return _with_sinks(q * self.scale, k, v, added, self.sinks[:, :, rows])


def _by_age(biases: mx.array, ages: mx.array, seen: mx.array) -> mx.array:
    """[B, heads, R, N] for ages [R, N] and what is seen of them."""
    (*lead, extent), zero = biases.shape, mx.array(0, biases.dtype)
    at = mx.broadcast_to(mx.clip(ages, 0, extent - 1), (*lead, ages.shape[-1]))
    own = mx.where(ages < extent, mx.take_along_axis(biases, at, axis=-1), zero)
    return mx.where(seen, own, mx.array(-mx.inf, biases.dtype))


def _with_sinks(q: mx.array, k: mx.array, v: mx.array, added: mx.array, sinks: mx.array) -> mx.array:
    """Attention of scaled queries [B, heads, R, D], with a logit more of each in the softmax's sum."""
    B, heads, R, _ = q.shape
    grouped = B, k.shape[1], -1, R
    scores = q.reshape(*grouped, q.shape[-1]) @ k[:, :, None].swapaxes(-1, -2) + added.reshape(*grouped, k.shape[2])
    weights = mx.softmax(mx.concatenate([scores, sinks.reshape(*grouped, 1)], axis=-1), axis=-1, precise=True)
    return (weights[..., :-1] @ v[:, :, None]).reshape(B, heads, R, -1)


def attend_biased(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    states: AnyArray,
    sinks: AnyArray,
    profiles: mx.array,
    cache: Steps | StepRows,
    terms: Terms,
) -> AnyArray:
    """`attend` with biases states . profiles[:, distance].

    Args:
        states: [B, L, heads, width].
        sinks: [B, L, heads], logits of the softmax's sum; None: there are none.
        profiles: [width, extent].
    """
    if isinstance(cache, StepRows):

        def of_row(rows: StepRows, q: AnyArray, k: AnyArray, v: AnyArray, *more: AnyArray) -> AnyArray:
            return attend_biased(q, k, v, more[0], more[1], profiles, rows.cache, terms)

        return cache.each((q, k, v, states, sinks), of_row)
    position, place = cache.position, cache.offset
    states = scaled_queries(leave(states), position, terms.query_scale).transpose(0, 2, 1, 3)
    logits = None if sinks is None else leave(sinks).transpose(0, 2, 1)[..., None]
    biased = Biased(states @ profiles.astype(states.dtype), logits, place, terms.scale, terms.window)
    queries, keys = terms.queries(leave(q), position), terms.keys(leave(k), position)
    out = attend_in_parts(queries, keys, terms.values(leave(v)), cache, terms, biased.part)
    return of_kind(out.reshape(*q.shape[:2], -1), q)
