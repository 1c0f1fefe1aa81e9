"""What a model remembers between calls, one cache for each layer, in mlx-lm's cache protocol.

`KVCache` and `LatentCache` grow in steps and can be trimmed to an earlier position; `RecurrentCache`
holds a state that has absorbed every token and cannot.
"""

from typing import Any

import mlx.core as mx

from ..ops import kernels


class _Growing:
    """Two arrays [B, heads, capacity, width] that fill from the front; capacity grows by `step`."""

    step = 256

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each array and returns what `mask` is for: all positions so far, or, for
        one token on a GPU, all there is room for."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = _grown(self.keys, keys.shape, keys.dtype, start, self.step)
        self.values = _grown(self.values, values.shape, values.dtype, start, self.step)
        self.keys[..., start : self.offset, :] = keys
        self.values[..., start : self.offset, :] = values
        if _sees_capacity(keys.shape[2]):
            return self.keys, self.values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        assert self.keys is not None and self.values is not None
        for name, array in (("keys", self.keys), ("values", self.values)):
            B, heads, _, width = array.shape
            setattr(self, name, _grown(array, (B, heads, n, width), array.dtype, self.offset, self.step))

    def mask(self, length: int) -> mx.array | str | None:
        """What `mx.fast.scaled_dot_product_attention` needs for `length` new positions, which are in already."""
        if _sees_capacity(length):
            assert self.keys is not None
            return up_to(self.offset - 1, self.keys.shape[2])
        return "causal" if length > 1 else None

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, value: tuple[mx.array | None, mx.array | None, int]) -> None:
        self.keys, self.values, self.offset = value

    @classmethod
    def from_state(cls, state: Any) -> "_Growing":
        cache = cls()
        cache.state = state
        return cache

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forgets the last n positions; returns how many there were to forget."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.keys, self.values) if array is not None)


def _sees_capacity(length: int) -> bool:
    """One token on a GPU attends over the whole capacity, as in the compiled step: so its bits are the same whether the
    experts are in memory or streamed."""
    return length == 1 and kernels.has_kernels()


def up_to(position: int | mx.array, capacity: int) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`."""
    return (mx.arange(capacity) <= position)[None, None, None]


def _grown(array: mx.array | None, new: tuple[int, ...], dtype: mx.Dtype, used: int, step: int) -> mx.array:
    """`array` with room for entries of shape `new` after its first `used` positions, in whole steps."""
    B, heads, L, width = new
    if array is not None and used + L <= array.shape[2]:
        return array
    capacity = (used + L + step - 1) // step * step
    room = mx.zeros((B, heads, capacity - used, width), dtype)
    return room if array is None else mx.concatenate([array[..., :used, :], room], axis=2)


class KVCache(_Growing):
    """Keys (after norm and rotation) and values of grouped-query attention."""


class LatentCache(_Growing):
    """MLA: the normed latent [B, 1, N, kv_lora_rank] and the rotated shared key [B, 1, N, rope]."""


class RecurrentCache:
    """Gated DeltaNet: `conv`, the last raw inputs of the convolution [B, kernel - 1, channels], and
    `state`, float32 [B, value_heads, value_dim, key_dim]."""

    def __init__(self) -> None:
        self.conv: mx.array | None = None
        self.recurrent: mx.array | None = None
        self.offset = 0

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        return self.conv, self.recurrent, self.offset

    @state.setter
    def state(self, value: tuple[mx.array | None, mx.array | None, int]) -> None:
        self.conv, self.recurrent, self.offset = value

    @classmethod
    def from_state(cls, state: Any) -> "RecurrentCache":
        cache = cls()
        cache.state = state
        return cache

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.recurrent is None

    def reserve(self, n: int) -> None:
        """Its size does not depend on positions."""

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.conv, self.recurrent) if array is not None)


Cache = KVCache | LatentCache | RecurrentCache
