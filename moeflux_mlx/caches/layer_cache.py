"""The common interface of all caches; a cache holds the state of a text for one part of a layer.

A layer has a tuple of caches: the mixer's, and behind it one of an indexer's keys or of n-grams, if it has them. Each
cache knows its bytes for a text of any length, its part of a snapshot, how to go back to an earlier position or to any
row of the last step (`Model.step`), and its traced stand-in in a compiled step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np

from ..ops.backend import AnyArray
from ..ops.launch import Shape
from .stand_in import TracedKind

FLOAT_BYTES = 4
MOST_DRAFTS = 4  # rows of a step that may be taken back as if they had never been
StoredPart: TypeAlias = Any  # of a cache in a snapshot: a numpy array, the number of positions, or a dtype
LayerPart = TypeVar("LayerPart")
Same = TypeVar("Same", bound="LayerCache")
Arrays = tuple[mx.array | None, ...]
Shifts = tuple[tuple[int, int], ...]
State = tuple[Any, ...]  # a cache's arrays and, last, how many positions they have absorbed


class JoinedRow(NamedTuple):
    """The state of a sequence as row `row` of `arrays` [R, ...], which hold the states of R sequences."""

    arrays: Sequence[mx.array]
    row: int


WayBack: TypeAlias = Any  # what a cache goes back to within a step: `Arrays`, or a `JoinedRow`


class LayerCache(ABC, Generic[LayerPart]):
    """The interface of all kinds, based on their `state`; `part` is the part of the layer that the cache serves.

    Attributes:
        stored_dtype: of the arrays that a snapshot holds.
        counts: of a layer's first cache, a snapshot says how many positions there are.
        extends_rows: in a snapshot, each row of its array is behind that row of the last array of the cache before.
        restored: (the arrays that a snapshot holds, each as a numpy array; the number of positions; the dtype of
            entries) -> the state that they were taken of.
        axes: the rotary positions [3, L] of the next rows, if some belong to an image; else None.
        position: the next token's rotary position: its place `offset` plus the shift; or `axes`.
        shifts: ascending places, each with the difference between rotary positions and places from there on.
        last_step: marks the last step (`Model.step`) in a text's first cache, until the text goes another way than
            onwards; then None.
    """

    stored_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    counts: bool
    extends_rows: ClassVar[bool] = False
    restored: Callable[..., State]
    state: State
    offset: int

    def __init__(self, part: LayerPart):
        self.part = part
        self.last_step: object = None
        self.axes: np.ndarray | None = None
        self.shifts: Shifts = ()

    @property
    def position(self) -> int | AnyArray:
        if self.axes is not None:
            return self.axes
        return self.offset + (self.shifts[-1][1] if self.shifts else 0)

    @property
    def is_shifted(self) -> bool:
        """Whether any token's rotary position differs from its place."""
        return any(by for _, by in self.shifts)

    def shift(self, by: int, place: int | None = None) -> None:
        """From `place` on, or the next token, a rotary position is the place plus `by`, in all layers of a text alike.
        Going back to before that place removes the shift.
        """
        self.shifts = *self.shifts, (self.offset if place is None else place, by)

    def _shifts_at(self, position: int) -> Shifts:
        return tuple(one for one in self.shifts if one[0] <= position)

    def fetched_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes that a prompt's block needs to read `positions` positions as values of `itemsize` bytes."""
        return 0

    def kept(self) -> Arrays | None:
        """The state that `go_back` needs to return here later; None: no state."""
        return None if self.is_trimmable() else self.state[:-1]

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes of a kept state, with entries of `itemsize` bytes."""
        return 0 if self.is_trimmable() else self.bytes_for(1, itemsize)

    @abstractmethod
    def is_trimmable(self) -> bool:
        """Whether it can go back to any position without a kept state."""

    @abstractmethod
    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position without a kept state."""

    def trim(self, n: int) -> int:
        """Forgets the last n positions if it can go back that far without a kept state; returns how many it forgot."""
        position = max(self.offset - n, 0)
        if not self.reaches(position):
            return 0
        n = self.offset - position
        self.go_back(position, None)
        return n

    @abstractmethod
    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text with that many positions, with entries of `itemsize` bytes."""

    def step_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes that the next token reads and writes after that many positions."""
        return self.bytes_for(positions, itemsize)

    @abstractmethod
    def stored_shapes(self, length: int) -> tuple[Shape, ...]:
        """The shapes of the arrays that a snapshot of `length` positions holds."""

    @abstractmethod
    def stored(self) -> Arrays:
        """The arrays of a single text in a snapshot; None stands for zeros."""

    @abstractmethod
    def empty(self) -> bool:
        """Whether it has absorbed no token."""

    def expect(self, n: int) -> None:
        """Prepares for n more positions that come in several calls, if the size depends on them."""
        self.last_step = None

    def reserve(self, n: int) -> None:  # noqa: B027 (a cache whose size does not depend on positions has room)
        """Makes room for n more positions; there must be some already."""

    @abstractmethod
    def traced(self, n: int) -> TracedKind | None:
        """A function that makes the traced stand-in for the next n tokens; None if no stand-in serves all of them."""

    @abstractmethod
    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        """The arrays of the traced stand-in for the next n tokens."""

    @abstractmethod
    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""

    @property
    def joins(self) -> bool:
        """Whether a step takes the states of several sequences as the rows of the same arrays
        (`RecurrentCache.take_joined`).
        """
        return False

    def separate(self) -> None:
        """Copies a state that is a row of arrays of several sequences, which would stay in memory with it."""

    def way_back(self) -> WayBack | None:
        """The state that `take_back` needs to return here within the same step."""
        return None

    @abstractmethod
    def go_back(self, position: int, kept: WayBack | None) -> None:
        """Goes back to an earlier position with its kept state `kept`."""

    def take_back(self, position: int, way: WayBack | None) -> None:
        """Goes back to before a row of the last step; `way` is the result of `way_back` there."""
        self.go_back(position, way)

    @abstractmethod
    def take_from(self: Same, other: Same, position: int, kept: Arrays | None) -> None:
        """Takes the state that `other` had at `position`, where its kept state was `kept`; later changes of one do not
        affect the other.
        """

    def copy(self: Same) -> Same:
        """A copy; the two share arrays until one of them writes."""
        other = type(self)(self.part)
        arrays = (array if array is None else array[...] for array in self.state[:-1])  # MLX assigns into an object
        other.state, other.shifts = (*arrays, self.offset), self.shifts
        return other

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state[:-1] if array is not None)
