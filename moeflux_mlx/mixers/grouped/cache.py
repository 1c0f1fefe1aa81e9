"""The caches of grouped-query attention: keys and values of all positions or of a window; and with them the keys by
which blocks are chosen.

In 8 bits, the arrays hold rows of bytes (`ops/kv_rows.py`); all else is as in the caches that hold values. A row is
rounded once, on arrival, and every token attends to the rounded row, including the token itself. So cuts, rewinds,
copies and files keep the same bytes.
"""

from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ...caches.convolution import ConvCache
from ...caches.entries import EntriesCache
from ...caches.growing import Stepping
from ...caches.keys import KeyCache
from ...caches.layer_cache import FLOAT_BYTES, LayerCache, State
from ...caches.ring import Ring
from ...caches.traced import FixedCache, FixedChunks, FixedRing
from ...kinds import HeadBlocks, Indexer
from ...ops import index
from ...ops.backend import EitherArray
from ...ops.kv_rows import decode, encode, row_bytes
from ...ops.launch import Shape
from ...ops.positions import RECENT, Held, Rows
from . import op as attend
from .spec import GroupedQuery

CODES = mx.uint8


def make_caches(mixer: GroupedQuery) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer: keys and values; if it attends to blocks, the keys by which they are
    chosen; and the last inputs of convolutions.
    """
    convolutions = (mixer.convolution, mixer.branches, mixer.branches)
    return *_of_keys(mixer), *(ConvCache(one) for one in convolutions if one is not None)


def _of_keys(mixer: GroupedQuery) -> tuple[LayerCache, ...]:
    if mixer.blocks is not None:
        return KVCache(mixer), (
            HeadKeyCache(mixer) if isinstance(mixer.blocks, HeadBlocks) else EntriesCache(mixer.blocks)
        )
    if mixer.kv_bits == 8:
        return (QuantizedKVCache(mixer) if mixer.window is None else QuantizedWindowCache(mixer),)
    return (KVCache(mixer) if mixer.window is None else WindowCache(mixer),)


def _takes_steps(part: GroupedQuery) -> bool:
    """Whether there are kernels for a token alone of the attention, and of the choice of its blocks."""
    return attend.takes_step(part.head_dim, part.value_width) and (part.blocks is None or index.takes_step(part.blocks))


class KVCache(Stepping[GroupedQuery]):
    """Keys (after norm and rotation) and values of grouped-query attention."""

    @property
    def rows(self) -> Rows:
        return (self.part.kv_heads, self.part.head_dim), (self.part.kv_heads, self.part.value_width)

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)

    @property
    def recent_shape(self) -> Shape:
        return (RECENT * sum(heads * width for heads, width in self.rows),)

    def parts(self, recent: EitherArray, length: int) -> tuple[EitherArray, EitherArray]:
        (heads, width), (_, value_width) = self.rows
        end = RECENT * heads * width
        keys, values = (
            recent[:end].reshape(1, heads, RECENT, width),
            recent[end:].reshape(1, heads, RECENT, value_width),
        )
        return keys[:, :, :length], values[:, :, :length]


class WindowCache(Ring[GroupedQuery], KVCache):
    """Keys and values of a window, or of a chunk and the ones before it."""

    stand_ins: ClassVar[tuple[Any, Any]] = FixedRing, FixedChunks  # of a window, of a chunk

    def __init__(self, part: GroupedQuery):
        assert part.window is not None
        super().__init__(part, part.window, part.chunked)
        self.traced_whole = self.stand_ins[part.chunked]


class HeadKeyCache(KeyCache[GroupedQuery]):
    """The keys by which blocks are chosen for each key head."""

    @property
    def indexer(self) -> Indexer:
        assert self.part.blocks is not None
        return self.part.blocks.indexer

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)


class _FixedRows(FixedCache):
    """The traced stand-in of a cache of all positions."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = super().update_and_fetch(encode(keys), encode(values))
        return _like(keys, rows[0]), _like(values, rows[1])


class _FixedRingRows(_FixedRows, FixedRing):
    """The traced stand-in of a window's cache."""


class _FixedChunkRows(_FixedRows, FixedChunks):
    """The traced stand-in of a chunk's cache."""


class QuantizedKVCache(KVCache):
    """Keys and values of all positions, given and fetched as values."""

    stored_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    traced_whole = _FixedRows

    @property
    def rows(self) -> Rows:
        """(heads, bytes) of one position in each array."""
        first, second = ((heads, row_bytes(width)) for heads, width in super().rows)
        return first, second

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text with that many positions; independent of the activations' dtype."""
        return super().bytes_for(positions, CODES.size)

    def fetched_bytes(self, positions: int, itemsize: int) -> int:
        """Additional bytes of a prompt's block that sees `positions` positions: all their values in float32."""
        return positions * sum(heads * width for heads, width in super().rows) * (FLOAT_BYTES + itemsize)

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """Appends [B, heads, L, width] to each array.

        Returns:
            Two arrays of all that the new positions may see, in order, as values of the same dtype; how many rows.
        """
        first, second, count = self._append(encode(keys), encode(values))
        return _like(keys, first[..., :count, :]), _like(values, second[..., :count, :]), count

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each array and returns what `mask` is for, as values of the same dtype."""
        rows = super().update_and_fetch(encode(keys), encode(values))
        return _like(keys, rows[0]), _like(values, rows[1])

    def restored(self, first: np.ndarray, second: np.ndarray, length: int, dtype: mx.Dtype) -> State:
        """The state that `stored` was taken of."""
        return super().restored(first, second, length, CODES)

    def held(self, dtype: mx.Dtype, here: bool = False, n: int = 1) -> Held:
        """The contents before a token, as bytes, with room for n; `here`: as numpy arrays."""
        return super().held(CODES, here, n)


class QuantizedWindowCache(QuantizedKVCache, WindowCache):
    """Keys and values of a window, or of a chunk and the ones before it."""

    traced_whole = _FixedRingRows
    stand_ins = _FixedRingRows, _FixedChunkRows


def _like(new: mx.array, rows: mx.array) -> mx.array:
    """Rows as values of the width and dtype of the new ones."""
    return decode(rows, new.shape[-1], new.dtype)
