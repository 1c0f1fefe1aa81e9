"""The parameters of grouped-query attention beside its queries, keys and values."""

from typing import NamedTuple

import mlx.core as mx

from ...kinds import QueryFactor
from ...ops.backend import AnyArray, Array
from ...ops.launch import ArrayPiece
from ...ops.norm import Norm, rms_norm
from ...ops.query_scale import scaled_queries
from ...ops.rope import Rope, laid_out


class Terms(NamedTuple):
    """The parameters of attention.

    Args:
        q_norm, k_norm: norms of each head of q and k with the same eps; None: no norm, or q and k are normed already.
        rope: rotates q and k by their rotary positions; None: no rotation.
        window: how many positions a query sees, its own included; None: all. With a window, the cache must be one of
            that window.
        sinks: [heads], logits that are added to the softmax's sum only; None: no sinks.
        value_norm: epsilon of a norm without weight of each head of v, equal to that of the other norms; None: no norm.
        pieces: those of q_norm's weight, k_norm's and rope.periods in one array, if kernels take them so.
        query_scale: scales queries by their rotary positions; None: they are not scaled.
        chunked: whether a query sees, of its own chunk of `window` positions, those up to its own.
        rotates_first: whether q and k are rotated before they are normed.
        biases: float32, what is added to a token's products of q and k by distance: [heads, extent] for kernels, [heads
            * extent] for the native form; None: nothing.
    """

    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope | None
    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    value_norm: float | None = None
    pieces: list[ArrayPiece] | None = None
    query_scale: QueryFactor | None = None
    chunked: bool = False
    rotates_first: bool = False
    biases: AnyArray = None

    def values(self, v: Array) -> Array:
        """The stored form of values."""
        return v if self.value_norm is None else rms_norm(v, None, self.value_norm)

    def keys(self, k: Array, position: int | AnyArray) -> Array:
        """Keys [B, L, heads, D] normed and rotated, in attention's layout: [B, heads, L, D] for MLX."""
        return self._turned(k, self.k_norm, position)

    def queries(self, q: Array, position: int | AnyArray) -> Array:
        """Queries normed, scaled and rotated, in the same layout."""
        return self._turned(q, self.q_norm, position, self.query_scale)

    def _turned(
        self, x: Array, norm: Norm | None, position: int | AnyArray, query_scale: QueryFactor | None = None
    ) -> Array:
        before, behind = (None, norm) if self.rotates_first else (norm, None)
        x = laid_out(scaled_queries(x if before is None else before(x), position, query_scale))
        x = x if self.rope is None else self.rope(x, position)
        return x if behind is None else behind(x)

    @property
    def eps(self) -> float:
        """The epsilon of all norms."""
        return self.q_norm.eps if self.q_norm else self.value_norm or 0.0

    @property
    def limits(self) -> tuple[int | None, bool, bool, bool, bool, int]:
        """The parameters on which a kernel's text depends."""
        extent = 0 if self.biases is None else self.biases.shape[-1]
        switches = self.sinks is not None, self.value_norm is not None, self.chunked, self.rotates_first
        return self.window, *switches, extent
