"""What attention needs of a cache: two arrays by position, and the arrays that the step of a single token takes.

The newest positions of a step are in a small array apart from the others, because kernels do not write to the cache.
"""

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .backend import AnyArray, EitherArray
from .launch import Shape

RECENT = 32  # positions whose keys and values are in the small array of a step
Rows = tuple[Shape, Shape]  # (heads, width) of a position in each of a cache's two arrays


class Held(NamedTuple):
    """The contents of a cache before a token, as numpy arrays on the CPU.

    keys, values: [1, kv heads, capacity, .], values or rows of bytes (`kv_rows`), with a window position p in row
        p % capacity; or latents [1, 1, capacity, N] and turned keys [1, 1, capacity, R].
    recent: the newest keys [kv heads, RECENT, .] and then values in one row, or [RECENT, N + R].
    positions: int32, the token's place in the cache, the first of `recent`, the capacity, and the token's rotary
        position.
    """

    keys: AnyArray
    values: AnyArray
    recent: AnyArray
    positions: Any


class Positions(Protocol):
    """A cache of two arrays [B, heads, capacity, width], full to `offset`; the next token has rotary position
    `position`, or the next L tokens have integers [3, L].
    """

    offset: Any
    position: Any
    keys: AnyArray
    values: AnyArray

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """Appends [B, heads, L, width] to each array; returns the arrays and the number of their first rows that the
        new ones may see.
        """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each array and returns the arrays that `mask` belongs to."""

    def mask(self, length: int) -> mx.array | str | None:
        """The mask of the `length` newest positions over these arrays."""

    def whole(self, length: int) -> int:
        """How many of the next `length` tokens attend to all that they see."""


class Steps(Positions, Protocol):
    """A cache that also takes single tokens with the arrays of `Held`."""

    def held(self, dtype: mx.Dtype, here: bool = False, n: int = 1) -> Held:
        """The contents before a token, with entries of `dtype`, with room for n; `here`: as numpy arrays."""

    def advance(self, recent: EitherArray) -> None:
        """Replaces `recent` by a copy with one more token."""
