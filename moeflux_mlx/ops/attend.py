"""Causal grouped-query attention (arXiv:2305.13245) over a cache of keys and values, with an optional output gate.

On a GPU a token takes two launches, which write no key or value to the cache: a few of the newest come as an array of
their own, which is copied with one more at each token. MLX's attention would take a dozen, and copies the whole cache
where the token before is still being computed.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from . import backend, native
from .backend import Array, stack, view
from .elementwise import sigmoid
from .launch import Kernel, Launch, Shape, ceildiv, number
from .norm import Norm
from .rope import Rope

ATTEND_STEP = Kernel(
    "attend_step",
    "q k v q_weight k_weight periods eps magnitude scale positions keys values recent",
    "parts stats next",
)
ATTEND_COMBINE = Kernel("attend_combine", "parts stats gate positions", "out")
RECENT = 32  # positions whose keys and values are kept apart
HEADS = 8  # of queries in a threadgroup: with 256 values each they and their weights take 17 KB of its memory
WIDEST = 256
SCORES = 1 << 27  # that exist at once: where MLX has no fused attention it keeps all of a call's
Rows = tuple[Shape, Shape]  # (heads, width) of a position in each of a cache's two arrays


def in_parts(heads: int, rows: int, positions: int, mask: Any) -> Iterator[tuple[slice, slice, Any]]:
    """Cuts the rows of a causal attention so that each part's scores are within `SCORES`.

    Yields the rows of a part, the positions that they see, and their mask. Only a causal one of many rows is cut.
    """
    size = max(SCORES // (heads * positions), 1)
    if rows <= size or mask != "causal":
        yield slice(0, rows), slice(0, positions), mask
        return
    before = positions - rows
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield slice(start, stop), slice(0, before + stop), "causal" if stop - start > 1 else None


class Held(NamedTuple):
    """What a cache has before a token.

    keys, values: [1, kv heads, capacity, D], or latents [1, 1, capacity, N] and turned keys [1, 1, capacity, R].
    recent: [2, kv heads, RECENT, D], the newest keys and values, or [RECENT, N + R].
    positions: int32, the token's own, the first of `recent`, and the capacity.
    """

    keys: mx.array
    values: mx.array
    recent: mx.array
    positions: mx.array


class Positions(Protocol):
    """A cache of two arrays [B, heads, capacity, width], full to `offset`."""

    offset: Any
    keys: Any
    values: Any

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each and returns what `mask` is for."""
        ...

    def mask(self, length: int) -> mx.array | str | None:
        """What of that the `length` newest positions see."""
        ...


class Steps(Positions, Protocol):
    """One that also takes single tokens with the arrays of `Held`."""

    def held(self, rows: Rows, dtype: mx.Dtype) -> Held:
        """What there is before a token, with such rows of a position in such entries."""
        ...

    def advance(self, recent: mx.array) -> None:
        """`recent` with one token more takes its place."""
        ...


def attend(
    q: Array, k: Array, v: Array, cache: Steps, *, q_norm: Norm, k_norm: Norm, rope: Rope, scale: float
) -> Array:
    """softmax(scale * q k) v over all that `cache` has seen and the new positions up to each query's own.

    Args:
        q: [B, L, heads, D], or [B, L, heads, 2 D] with a gate behind each query; its sigmoid multiplies the result.
        k, v: [B, L, kv heads, D], appended to `cache`, k normed and turned.
        q_norm, k_norm: of each head of q and k.
        rope: turns q and k by their positions.

    Returns:
        [B, L, heads * D]
    """
    B, L, _, D = k.shape
    if B * L == 1 and isinstance(q, mx.array) and takes_step(D):
        return _step(q, k, v, cache, (q_norm, k_norm), rope, scale)
    position = cache.offset
    q, gate = (q, None) if q.shape[-1] == D else (q[..., :D], q[..., D:])
    if isinstance(q, np.ndarray):
        q, k = rope(q_norm(q), position), rope(k_norm(k), position)
        cache.update_and_fetch(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
        mx.eval(cache.keys, cache.values)  # one wait for both
        keys, values = view(cache.keys), view(cache.values)
        out = stack([native.attend(q[i], keys[i], values[i], cache.offset, scale) for i in range(B)])
        if gate is not None:
            out *= sigmoid(gate)
        return out.reshape(B, L, -1)
    q, k = (rope(part.transpose(0, 2, 1, 3), position) for part in (q_norm(q), k_norm(k)))
    k, v = cache.update_and_fetch(k, v.transpose(0, 2, 1, 3))  # [B, heads, L, D]
    parts = []
    for rows, seen, mask in in_parts(q.shape[1], L, k.shape[2], cache.mask(L)):
        part = mx.fast.scaled_dot_product_attention(q[:, :, rows], k[:, :, seen], v[:, :, seen], scale=scale, mask=mask)
        parts.append(part.transpose(0, 2, 1, 3))
    out = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)).reshape(B, L, -1)
    return out if gate is None else out * sigmoid(gate.reshape(B, L, -1))


# ---- the kernels for one token


def takes_step(width: int) -> bool:
    """Whether single tokens with heads of that width take the kernels here."""
    return backend.has_kernels() and width % 32 == 0 and width <= WIDEST


def _step(
    q: mx.array, k: mx.array, v: mx.array, cache: Steps, norms: tuple[Norm, Norm], rope: Rope, scale: float
) -> mx.array:
    """`attend` for one token: [1, 1, heads * D]."""
    q_norm, k_norm = norms
    assert q_norm.eps == k_norm.eps
    held = cache.held((k.shape[2:], k.shape[2:]), k.dtype)
    types = q.dtype, q_norm.weight.dtype
    step, combine = _plan(backend.name(), q.shape, k.shape, types, held.keys.shape[2], rope.dims, rope.interleaved)
    numbers = number(q_norm.eps), number(rope.magnitude), number(scale)
    weights = q_norm.weight, k_norm.weight
    parts, stats, recent = step(
        q, k, v, *weights, rope.periods, *numbers, held.positions, held.keys, held.values, held.recent
    )
    cache.advance(recent)
    return combine(parts, stats, q, held.positions)[0]


@lru_cache(512)
def _plan(
    target: str,
    q: Shape,
    k: Shape,
    types: tuple[mx.Dtype, mx.Dtype],
    capacity: int,
    dims: int,
    interleaved: bool,
) -> tuple[Launch, Launch]:
    (heads, stride), (kv_heads, width) = q[2:], k[2:]
    shared = heads // kv_heads
    abreast = max(n for n in range(1, HEADS + 1) if shared % n == 0)
    sizes = {"X": types[0], "H": heads, "D": width}
    template = sizes | {"W": types[1], "STRIDE": stride, "KV": kv_heads, "GH": abreast}
    template |= {"DIMS": dims, "NEXT": int(interleaved), "RECENT": RECENT}
    pieces = ceildiv(capacity + RECENT, width)
    outputs = [((pieces, heads, width), mx.float32), ((pieces, heads, 2), mx.float32)]
    recent = (2, kv_heads, RECENT, width), types[0]
    step = Launch(target, ATTEND_STEP, template, (pieces, heads // abreast), width, [*outputs, recent])
    out = [((1, 1, heads * width), types[0])]
    return step, Launch(target, ATTEND_COMBINE, sizes | {"GATE": int(stride > width)}, (heads, 1), width, out)
