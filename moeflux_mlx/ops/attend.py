"""Causal grouped-query attention (arXiv:2305.13245) over a cache of keys and values, with an optional output gate."""

from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from . import native
from .backend import Array, stack, view
from .elementwise import sigmoid
from .rope import Rope


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
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=cache.mask(L))
    out = out.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return out if gate is None else out * sigmoid(gate.reshape(B, L, -1))
