"""The traced stand-ins of caches in a compiled step: arrays of fixed shape, and positions that are arrays.

Where control flow depends on the position, each case has a graph of its own: a cache's `traced` says which case it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import mlx.core as mx

from ..ops.backend import arange
from ..ops.positions import Held
from .layer_cache import MOST_DRAFTS
from .stand_in import StepInput, Traced

REACH = 8  # positions that a ring can go back: the rows of one sequence in a step
SPARE = REACH + MOST_DRAFTS  # positions of a ring beyond the window, so that rejected drafts do not limit the way back


class OnKernels(NamedTuple):
    """Kernels that absorb a single token, or None for plain operations.

    put: the ring [1, 1, slots, row] with the token's row, from the ring and the token's place. pool: the entry
    [1, 1, 1, entry] that ends with the token, from the ring, the token's place, and whether it is the first entry.
    """

    put: Callable[[mx.array, mx.array], mx.array] | None = None
    pool: Callable[[mx.array, mx.array, bool], mx.array] | None = None


PLAIN = OnKernels()


class FixedCache(Traced):
    """Two arrays [1, heads, capacity, width], full to `offset`."""

    @property
    def capacity(self) -> int:
        return cast(int, self.arrays[0].shape[2])

    @property
    def row(self) -> mx.array:
        """Of the next position."""
        return cast(mx.array, self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        pairs, start = zip(self.arrays, (keys, values), strict=True), self.row[None]
        first, second = self.arrays = [mx.slice_update(array, new, start, axes=(2,)) for array, new in pairs]
        return first, second

    def mask(self, length: int) -> mx.array:
        return self._seen(self.capacity)

    def whole(self, length: int) -> int:
        return length


class FixedChosen(FixedCache):
    """The same of a token that attends to some of the positions."""

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return *self.update_and_fetch(keys, values), self.offset + 1

    def whole(self, length: int) -> int:
        return 0


class FixedRing(FixedCache):
    """Two arrays [1, heads, window + spare, width] in which position p lies in slot p % (window + spare)."""

    @property
    def row(self) -> mx.array:
        return self.offset % self.capacity

    def mask(self, length: int) -> mx.array:
        return seen_in_ring(self.offset, self.capacity)


class FixedChunks(FixedRing):
    """The same of a token that sees its own chunk of as many positions."""

    def mask(self, length: int) -> mx.array:
        return seen_in_ring(self.offset, self.capacity, chunked=True)


class FixedKeys(Traced):
    """Two arrays that a step reads, and the newest entries, which it copies with its own."""

    num_inputs, num_later, num_outputs = 4, 1, 1

    def __init__(self, keys: mx.array, values: mx.array, *given: StepInput):
        self._cached = keys, values
        super().__init__(*given)

    def held(self, dtype: mx.Dtype, here: bool = False, n: int = 1) -> Held:
        return Held(*self._cached, self.arrays[0], self._positions)

    def advance(self, recent: mx.array) -> None:
        self.arrays = [recent]

    def go_on(self, *later: StepInput) -> None:
        """As of all stand-ins; the array is the token's `Held.positions`."""
        self._positions, *place = later
        super().go_on(*place)

    def whole(self, length: int) -> int:
        return length


class FixedChosenKeys(FixedKeys):
    """The same of tokens that attend to some of the positions."""

    def whole(self, length: int) -> int:
        return 0


@dataclass(frozen=True)
class EntriesKind:
    """Makes a `FixedEntries`.

    Args:
        part: as of an `EntriesCache`.
        ends: of each token, whether it ends an entry. is_first: that is the first one.
        sees_all: the tokens attend to all entries.
    """

    part: Any
    ends: tuple[bool, ...]
    is_first: bool
    sees_all: bool
    num_later: ClassVar[int] = 0

    @property
    def num_inputs(self) -> int:
        return 2 if self.part.ratio else 1

    @property
    def num_outputs(self) -> int:
        return self.num_inputs

    def __call__(self, *given: StepInput) -> "FixedEntries":
        return FixedEntries(self, *given)


class FixedEntries(Traced):
    """A ring [B, 1, slots, row] of what is remembered of the newest positions, and if there are any all entries
    [B, 1, capacity, entry]."""

    def __init__(self, kind: EntriesKind, *given: StepInput):
        super().__init__(*given)
        self._kind, self._ends = kind, iter(kind.ends)

    def whole(self, length: int) -> int:
        return length if self._kind.sees_all else 0

    def absorb(
        self, rows: mx.array, make: Callable[..., mx.array], kernels: OnKernels = PLAIN
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """As `EntriesCache.absorb`, of a token's rows [B, 1, row]; the positions come in the order of slots."""
        kind, (ring, *entries), part = self._kind, self.arrays, self._kind.part
        slots = ring.shape[2]
        if kernels.put is None:
            ring = mx.slice_update(ring, rows[:, None], (self.offset % slots)[None], axes=(2,))
        else:
            ring = kernels.put(ring, self.offset)
        if next(self._ends):
            count, number = part.ratio + (0 if kind.is_first else part.overlap), self.offset // part.ratio
            if kernels.pool is None:
                newest = ring[:, 0, (self.offset - count + 1 + arange(count, mx)) % slots]
                entry = make(newest, number, 1)[:, None]
            else:
                entry = kernels.pool(ring, self.offset, kind.is_first)
            entries = [mx.slice_update(entries[0], entry, number[None], axes=(2,))]
        self.arrays = [ring, *entries]
        places = self.offset - (self.offset - arange(slots, mx)) % slots
        return ring[:, 0], places, entries[0][:, 0] if entries else None


def up_to(position: int | mx.array, capacity: int) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`."""
    return (arange(capacity, mx) <= position)[None, None, None]


def seen_in_ring(position: int | mx.array, capacity: int, chunked: bool = False) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`, over the slots of a ring that has `SPARE` more positions
    than a window, or, if `chunked`, than the chunks of which the token sees its own."""
    age = (position - arange(capacity, mx)) % capacity  # of the last position up to `position` that has the slot
    window = capacity - SPARE
    if chunked:
        return (age <= position % window)[None, None, None]
    return ((age < window) & (age <= position))[None, None, None]
