"""What all caches answer alike: one cache remembers one layer's part of a text.

A cache answers for itself: the bytes it takes for a text of any length, what a snapshot holds of it, how it gets back
to an earlier position or to any row of the last step (`Model.step`), and its traced stand-in in a compiled step.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx

from ..errors import RequestError

FLOAT_BYTES = 4
Shape = tuple[int, ...]
Part = TypeVar("Part")
Same = TypeVar("Same", bound="LayerCache")
Pair = tuple[mx.array | None, mx.array | None]
State = tuple[mx.array | None, mx.array | None, int]  # a cache's two arrays and how many positions they have absorbed


@dataclass(eq=False)
class LastStep:
    """The rows that a cache absorbed last: where they begin, and what is kept for the way back to before the first of
    them and to after each (None: nothing need be)."""

    start: int
    states: list[Pair | None]


class LayerCache(Generic[Part]):
    """What all kinds answer alike, from their `state`; `part` is what the cache serves.

    Attributes:
        position: the next token's rotary position: its place `offset`, further by what `shift` has said.
        last_step: the way back to each row of the last step, until the next one; None where there is no such way.
    """

    state: State
    offset: int

    def __init__(self, part: Part):
        self.part = part
        self.last_step: LastStep | None = None
        self._shifts: tuple[tuple[int, int], ...] = ()  # from which place on, by how much

    @property
    def position(self) -> int:
        return self.offset + (self._shifts[-1][1] if self._shifts else 0)

    @property
    def is_shifted(self) -> bool:
        """Whether a token has a rotary position that is not its place."""
        return any(by for _, by in self._shifts)

    def shift(self, by: int) -> None:
        """From the next token on a rotary position is the place plus `by`, in all layers of a text alike. What goes
        back to before that token forgets it."""
        self._shifts = *self._shifts, (self.offset, by)

    def _shifts_at(self, position: int) -> tuple[tuple[int, int], ...]:
        return tuple(one for one in self._shifts if one[0] <= position)

    def begin_step(self) -> None:
        """The rows that follow make a step; the way back to rows of the step before is dropped."""
        self.last_step = LastStep(self.offset, [self._way_back()])

    def end_row(self) -> None:
        """The cache has absorbed one row more of its step."""
        assert self.last_step is not None
        self.last_step.states.append(self._way_back())

    def rewind(self, rows: int) -> None:
        """Keeps the first so many rows of the last step. Raises RequestError: it has not so many."""
        last = self.last_step
        if last is None or not 0 <= rows < len(last.states):
            there = "it has none" if last is None else f"0 to {len(last.states) - 1} of them are there"
            raise RequestError(f"a cache cannot keep {rows} rows of its last step; {there}")
        self.go_back(last.start + rows, last.states[rows])
        del last.states[rows + 1 :]
        self.last_step = last

    def forget_rows(self) -> None:
        """Drops the way back to rows of the last step."""
        self.last_step = None

    def _way_back(self) -> Pair | None:
        """What `go_back` needs to return here later."""
        return None

    def row_bytes(self, itemsize: int) -> int:
        """What the way back to a row of the last step takes, with entries of `itemsize` bytes."""
        return 0

    def go_back(self, position: int, kept: Pair | None) -> None:
        """To an earlier position, for which `kept` was kept."""
        raise NotImplementedError

    def copy(self: Same) -> Same:
        """Another cache in this one's state; they share arrays until one of the two writes to them."""
        other = type(self)(self.part)
        other.state, other._shifts = self.state, self._shifts
        return other

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state[:2] if array is not None)
