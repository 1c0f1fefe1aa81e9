"""Causal grouped-query attention (arXiv:2305.13245) over a cache of keys and values, with an optional output gate."""

from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from . import native
from .backend import Array, stack, view
from .elementwise import sigmoid
from .rope import Rope

SCORES = 1 << 27  # that exist at once: where MLX has no fused attention it keeps all of a call's


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


def attend(
    q: Array, k: Array, v: Array, cache: Positions, *, rope: Rope, scale: float, gate: Array | None = None
) -> Array:
    """softmax(scale * q k) v over all that `cache` has seen and the new positions up to each query's own.

    Args:
        q: [B, L, heads, D], normed.
        k, v: [B, L, kv heads, D], appended to `cache`, k rotated.
        rope: turns q and k by their positions.
        gate: [B, L, heads, D]; its sigmoid multiplies the result.

    Returns:
        [B, L, heads * D]
    """
    B, L = q.shape[:2]
    position = cache.offset
    if isinstance(q, np.ndarray):
        q, k = rope(q, position), rope(k, position)
        cache.update_and_fetch(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
        mx.eval(cache.keys, cache.values)  # one wait for both
        keys, values = view(cache.keys), view(cache.values)
        out = stack([native.attend(q[i], keys[i], values[i], cache.offset, scale) for i in range(B)])
        if gate is not None:
            out *= sigmoid(gate)
        return out.reshape(B, L, -1)
    q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v))  # [B, heads, L, D]
    q, k = rope(q, position), rope(k, position)
    k, v = cache.update_and_fetch(k, v)
    parts = []
    for rows, seen, mask in in_parts(q.shape[1], L, k.shape[2], cache.mask(L)):
        part = mx.fast.scaled_dot_product_attention(q[:, :, rows], k[:, :, seen], v[:, :, seen], scale=scale, mask=mask)
        parts.append(part.transpose(0, 2, 1, 3))
    out = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)).reshape(B, L, -1)
    return out if gate is None else out * sigmoid(gate.reshape(B, L, -1))
