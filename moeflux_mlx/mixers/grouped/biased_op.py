"""Attention whose scores have a bias by distance (`RelativeBias`), perhaps with a sink of each token. On a GPU a token
takes a launch for the biases and those of `op.attend`, on the CPU a call; all else is MLX's operations, on the CPU too.
"""

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ...ops import backend
from ...ops.backend import AnyArray, arange, kernels_take, leave, native_takes, of_kind
from ...ops.elementwise import float32
from ...ops.launch import LEAST_ELEMENTS, Kernel, Launch, Shape
from ...ops.positions import Steps
from ...ops.query_scale import scaled_queries
from ...ops.rope import has_axes
from ...ops.rows import StepRows
from ...ops.tiles import planned
from .op import attend, attend_in_parts, native_refusal, refusal
from .terms import Terms

INPUTS = Kernel("biased_inputs", "q k states q_weight r_weight profiles", "biases next_q next_k")
THREADS = 128  # of a threadgroup


class Clip(Protocol):
    """Shortens heads [B, L, heads, width] to a limit, behind factors [heads, width]."""

    weight: mx.array
    limit: float

    def __call__(self, x: AnyArray) -> AnyArray: ...


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
    clip: Clip | None = None,
) -> AnyArray:
    """`attend` with biases states . profiles[:, distance].

    Args:
        states: [B, L, heads, width].
        clip: shortens the heads of states, as the norms of `terms` do for those of q and k; None: nothing is shortened.
        sinks: [B, L, heads], logits of the softmax's sum; None: there are none.
        profiles: [width, extent].
    """
    if isinstance(cache, StepRows):

        def of_row(rows: StepRows, q: AnyArray, k: AnyArray, v: AnyArray, *more: AnyArray) -> AnyArray:
            return attend_biased(q, k, v, more[0], more[1], profiles, rows.cache, terms, clip)

        return cache.each((q, k, v, states, sinks), of_row)
    position, place = cache.position, cache.offset
    is_alone = q.shape[0] * q.shape[1] == 1 and not has_axes(position)
    if kernels_take(q, refusal, is_alone, q.shape[-1], v.shape[-1]):
        return _attend_on_kernels(q, k, v, states, sinks, profiles, cache, terms, clip)
    if native_takes(q, native_refusal, is_alone):
        return _attend_natively(q, k, v, states, sinks, profiles, cache, terms, clip)
    states = states if clip is None else clip(states)
    states = scaled_queries(leave(states), position, terms.query_scale).transpose(0, 2, 1, 3)
    logits = None if sinks is None else leave(sinks).transpose(0, 2, 1)[..., None]
    biased = Biased(states @ profiles.astype(states.dtype), logits, place, terms.scale, terms.window)
    queries, keys = terms.queries(leave(q), position), terms.keys(leave(k), position)
    out = attend_in_parts(queries, keys, terms.values(leave(v)), cache, terms, biased.part)
    return of_kind(out.reshape(*q.shape[:2], -1), q)


def _attend_on_kernels(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    states: mx.array,
    sinks: mx.array | None,
    profiles: mx.array,
    cache: Steps,
    terms: Terms,
    clip: Clip | None,
) -> AnyArray:
    """`attend_biased` of a single token."""
    own: Any = terms.q_norm if clip is not None else None
    limits = None if clip is None else (clip.limit, own.limit)
    weights = [q, q] if clip is None else [own.weight, clip.weight]
    sizes = (q.shape[2], q.shape[3], k.shape[2]), (states.shape[-1], profiles.shape[1])
    launch = plan_inputs(backend.name(), *sizes, (q.dtype, weights[0].dtype, profiles.dtype), 1 / terms.scale, limits)
    biases, *clipped = launch(q, k, states, *weights, profiles)
    own_sinks = None if sinks is None else sinks.reshape(-1)
    terms = terms._replace(biases=biases, sinks=own_sinks, pieces=None)
    if clip is not None:
        q, k = clipped
        terms = terms._replace(q_norm=None, k_norm=None)
    return attend(q, k, v, cache, terms)


def _attend_natively(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    states: np.ndarray,
    sinks: np.ndarray | None,
    profiles: mx.array,
    cache: Steps,
    terms: Terms,
    clip: Clip | None,
) -> np.ndarray:
    """The same on the CPU."""
    own = states if clip is None else clip(states)
    # Not by `@`: a product this small would wake the threads of numpy's BLAS, and wait for them.
    biases = np.einsum("hw,we->he", own[0, 0] * np.float32(1 / terms.scale), float32(of_kind(profiles, q))).reshape(-1)
    own_sinks: Any = None if sinks is None else sinks.reshape(-1)
    if clip is not None and terms.q_norm is not None and terms.k_norm is not None:
        q, k = terms.q_norm(q), terms.k_norm(k)
        terms = terms._replace(q_norm=None, k_norm=None)
    return attend(q, k, v, cache, terms._replace(biases=biases, sinks=own_sinks))


@planned("attend")
def plan_inputs(
    target: str,
    heads: tuple[int, int, int],
    distances: tuple[int, int],
    types: tuple[mx.Dtype, mx.Dtype, mx.Dtype],
    inverse: float,
    limits: tuple[float, float] | None,
) -> Launch:
    """The launch that makes the biases of a token, and clips its heads.

    Args:
        heads: of queries, their width, and those of keys.
        distances: the width of a state and the extent.
        types: of q, of the weights of clips, of profiles.
        inverse: multiplies biases.
        limits: to which states, and queries and keys, are shortened; None: nothing is.
    """
    count, width, keys = heads
    r_limit, limit = limits or (0.0, 0.0)
    template = {"X": types[0], "W": types[1], "P": types[2], "H": count, "D": width, "KV": keys, "T": THREADS}
    template |= {"WIDTH": distances[0], "EXTENT": distances[1], "INVERSE": inverse}
    template |= {"CLIPS": int(limits is not None), "R_LIMIT": float(r_limit), "LIMIT": float(limit)}
    clipped: list[Shape] = [(1, 1, count, width), (1, 1, keys, width)] if limits else [(LEAST_ELEMENTS,)] * 2
    outputs = [((count, distances[1]), mx.float32), *((shape, types[0]) for shape in clipped)]
    groups = count + (count + keys if limits else 0)
    return Launch(target, INPUTS, template, (groups, 1), THREADS, outputs)
