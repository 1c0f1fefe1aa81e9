"""The traced stand-ins of caches in a compiled step: arrays of fixed shape, and positions that are arrays."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from ..ops.attend import Held
from .layer_cache import MOST_DRAFTS

REACH = 8  # positions that a ring goes back: as many rows as one step has of a sequence can be taken back
SPARE = REACH + MOST_DRAFTS  # positions of a ring beyond the window, so that drafts that were taken back shorten no way


class Traced(Protocol):
    """The traced stand-in of a cache: arrays of fixed shape, and positions that are arrays."""

    num_inputs: ClassVar[int]  # arrays
    num_later: ClassVar[int]  # arrays besides for each later token of the same step
    num_outputs: ClassVar[int]

    @property
    def arrays(self) -> list[mx.array]:
        """As they are after the token."""
        ...

    def go_on(self, *later: Any) -> None:
        """The next token of the same step: its `num_later` arrays, place, rotary position and mask."""
        ...


class FixedCache:
    """Two arrays [1, heads, capacity, width], full to `offset` (an int32 array of no axes, like `position`).

    `seen` gives the mask [1, 1, 1, capacity] of what one new token sees, the same for all layers.
    """

    num_inputs: ClassVar[int] = 2
    num_later: ClassVar[int] = 0
    num_outputs: ClassVar[int] = 2

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        offset: mx.array,
        position: mx.array,
        seen: Callable[[int], mx.array],
    ):
        self.keys, self.values = keys, values
        self.go_on(offset, position, seen)

    def go_on(self, offset: mx.array, position: mx.array, seen: Callable[[int], mx.array]) -> None:
        """The place, rotary position and mask of the next token."""
        self.offset, self.position, self._seen = offset, position, seen

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def row(self) -> mx.array:
        """Of the next position."""
        return self.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self.row[None]
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values

    def mask(self, length: int) -> mx.array:
        return self._seen(self.keys.shape[2])


class FixedRing(FixedCache):
    """Two arrays [1, heads, window + spare, width] in which position p lies in slot p % (window + spare)."""

    @property
    def row(self) -> mx.array:
        return self.offset % self.keys.shape[2]

    def mask(self, length: int) -> mx.array:
        return seen_in_ring(self.offset, self.keys.shape[2])


class FixedKeys:
    """Two arrays that a step reads, and the newest entries, which it copies with its own."""

    num_inputs: ClassVar[int] = 4
    num_later: ClassVar[int] = 1
    num_outputs: ClassVar[int] = 1

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        recent: mx.array,
        positions: mx.array,
        *_: Any,
    ):
        self._held = Held(keys, values, recent, positions)

    @property
    def arrays(self) -> list[mx.array]:
        return [self._held.recent]

    @property
    def position(self) -> mx.array:
        """The rotary position of the next token, an int32 array of no axes."""
        return self._held.positions[3]

    def held(self, dtype: mx.Dtype) -> Held:
        return self._held

    def advance(self, recent: mx.array) -> None:
        self._held = self._held._replace(recent=recent)

    def go_on(self, positions: mx.array, *_: Any) -> None:
        """The place of the next token among what is held."""
        self._held = self._held._replace(positions=positions)


class FixedState:
    """A recurrent cache's two arrays; what it computes depends on no position."""

    num_inputs: ClassVar[int] = 2
    num_later: ClassVar[int] = 0
    num_outputs: ClassVar[int] = 2

    def __init__(self, conv: mx.array, recurrent: mx.array, *_: Any):
        self.conv, self.recurrent, self.offset = conv, recurrent, 0  # which nobody reads

    def go_on(self, *_: Any) -> None:
        """No position matters."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.conv, self.recurrent]


def up_to(position: int | mx.array, capacity: int) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`."""
    return (mx.arange(capacity) <= position)[None, None, None]


def seen_in_ring(position: int | mx.array, capacity: int) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`, over the slots of a ring that has `SPARE` more positions
    than the token sees."""
    age = (position - mx.arange(capacity)) % capacity  # of the last position up to `position` that has the slot
    return ((age < capacity - SPARE) & (age <= position))[None, None, None]
