"""Attention whose scores have a bias by distance (`RelativeBias`), in MLX's operations, on the CPU too."""

from typing import NamedTuple

import mlx.core as mx

from ...ops.backend import AnyArray, arange, leave, of_kind
from ...ops.positions import Steps
from ...ops.query_scale import scaled_queries
from ...ops.rows import StepRows
from .op import attend_in_parts
from .terms import Terms


class Distances(NamedTuple):
    """The biases of some queries.

    Args:
        biases: [B, heads, L, extent], by distance.
        place: of the first query.
        window: as of `Terms`.
    """

    biases: mx.array
    place: int | mx.array
    window: int | None

    def mask(self, rows: slice, places: slice, mask: AnyArray, positions: int) -> mx.array:
        """What is added to the scores of a part of attention, as `in_parts` yields it. A `mask` of one token over a
        cache's slots (`Positions.mask`) says which it sees, and position p lies in slot p % `positions`.
        """
        if len(getattr(mask, "shape", ())) == 4:
            ages = ((self.place - arange(positions, mx)) % positions)[None]
            return self._added(self.biases, ages, mask)
        before = positions - self.biases.shape[2]
        ages = mx.arange(before + rows.start, before + rows.stop)[:, None] - mx.arange(places.start, places.stop)
        seen = ages >= 0 if self.window is None else (ages >= 0) & (ages < self.window)
        return self._added(self.biases[:, :, rows], ages, seen)

    def _added(self, biases: mx.array, ages: mx.array, seen: mx.array) -> mx.array:
        """[B, heads, R, N] for ages [R, N] and what is seen of them."""
        (*lead, extent), zero = biases.shape, mx.array(0, biases.dtype)
        at = mx.broadcast_to(mx.clip(ages, 0, extent - 1), (*lead, ages.shape[-1]))
        own = mx.where(ages < extent, mx.take_along_axis(biases, at, axis=-1), zero)
        return mx.where(seen, own, mx.array(-mx.inf, biases.dtype))


def attend_biased(
    q: AnyArray, k: AnyArray, v: AnyArray, states: AnyArray, profiles: mx.array, cache: Steps | StepRows, terms: Terms
) -> AnyArray:
    """`attend` with biases states . profiles[:, distance].

    Args:
        states: [B, L, heads, width].
        profiles: [width, extent].
    """
    if isinstance(cache, StepRows):

        def of_row(rows: StepRows, q: AnyArray, k: AnyArray, v: AnyArray, states: AnyArray) -> AnyArray:
            return attend_biased(q, k, v, states, profiles, rows.cache, terms)

        return cache.each((q, k, v, states), of_row)
    made = _attend(leave(q), leave(k), leave(v), leave(states), profiles, cache, terms)
    return of_kind(made, q)


def _attend(
    q: mx.array, k: mx.array, v: mx.array, states: mx.array, profiles: mx.array, cache: Steps, terms: Terms
) -> mx.array:
    """`attend_biased` of one text or a batch of them."""
    position, place = cache.position, cache.offset
    states = scaled_queries(states, position, terms.query_scale).transpose(0, 2, 1, 3)
    distances = Distances(states @ profiles.astype(states.dtype), place, terms.window)
    (B, L), v = q.shape[:2], terms.values(v)
    out = attend_in_parts(terms.queries(q, position), terms.keys(k, position), v, cache, terms, distances.mask)
    return out.reshape(B, L, -1)
