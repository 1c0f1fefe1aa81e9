"""The cache of a recurrent mixer: a state that has absorbed every token and cannot be cut."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx

from ..ops.launch import Shape
from ..ops.rows import as_rows
from .layer_cache import FLOAT_BYTES, Arrays, JoinedRow, LayerCache, Same, State, StoredPart, WayBack
from .stand_in import Traced, TracedKind


class Absorbed:
    """What operations see of such a state: `arrays` [B, ...], None before the first token; and the tokens' number."""

    arrays: list[mx.array | None]
    offset: Any = 0

    @property
    def conv(self) -> mx.array | None:
        """The last raw inputs of a convolution."""
        return self.arrays[0]

    @property
    def recurrent(self) -> mx.array | None:
        """The second array."""
        return self.arrays[1]

    def absorb(self, arrays: Sequence[mx.array], tokens: int) -> None:
        """Takes the arrays as they are after `tokens` more tokens."""
        self.arrays = list(arrays)
        self.offset = self.offset + tokens  # not in place: all stand-ins of a step have the same array


class FixedState(Absorbed, Traced):
    """The traced stand-in of a cache with two arrays; what is computed of them depends on no position."""


class RecurrentCache(Absorbed, LayerCache[Any]):
    """Arrays [B, *shape], whose shapes `part` says: `conv` [B, *conv_shape], the last raw inputs of a convolution, and
    `recurrent`, float32 [B, *state_shape].
    """

    counts = False
    stand_in: ClassVar[TracedKind] = FixedState

    def __init__(self, part: Any):
        super().__init__(part)
        self.joined: JoinedRow | None = None
        self._arrays: list[mx.array | None] = self._none()

    @property
    def arrays(self) -> list[mx.array | None]:
        """The sequence's own arrays [B, ...], None before the first token."""
        self.separate()
        return self._arrays

    @arrays.setter
    def arrays(self, value: list[mx.array | None]) -> None:
        self._arrays, self.joined = value, None

    def _none(self) -> list[mx.array | None]:
        return [None] * len(self.stored_shapes(0))

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text of any length; only the convolution's state has entries of `itemsize` bytes."""
        conv, *others = (math.prod(shape) for shape in self.stored_shapes(positions))
        return conv * itemsize + sum(others) * FLOAT_BYTES

    def step_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes that the next token reads, and writes back."""
        return 2 * self.bytes_for(positions, itemsize)

    def stored_shapes(self, length: int) -> tuple[Shape, ...]:
        """The shapes of the float32 arrays that a snapshot holds."""
        return self.part.conv_shape, self.part.state_shape

    def stored(self) -> Arrays:
        """The arrays of a single text in a snapshot; None stands for zeros."""
        return tuple(None if array is None else array[0] for array in self.arrays)

    def restored(self, *stored: StoredPart) -> State:
        """The state that `stored` was taken of: the arrays, the length, and the dtype of the convolution's part."""
        conv, *others, length, dtype = stored
        return mx.array(conv)[None].astype(dtype), *(mx.array(array)[None] for array in others), length

    @property
    def state(self) -> State:
        return *self.arrays, self.offset

    @state.setter
    def state(self, value: State) -> None:
        *self.arrays, self.offset = value
        self.last_step, self.shifts = None, ()

    def way_back(self) -> WayBack:
        return self.joined or tuple(self._arrays)

    def empty(self) -> bool:
        return self.joined is None and self._arrays[0] is None

    def traced(self, n: int) -> TracedKind:
        """A function that makes the traced stand-in for the next n tokens."""
        return self.stand_in

    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        """The arrays of the traced stand-in for the next n tokens."""
        return self.arrays

    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""
        self.absorb(arrays, 1)

    def take_joined(self, arrays: Sequence[mx.array], row: int) -> None:
        """Takes a row of the arrays after a step, which hold the states of all of its sequences."""
        self._arrays, self.joined = [], JoinedRow(arrays, row)
        self.offset += 1

    def separate(self) -> None:
        if self.joined is not None:
            arrays, row = self.joined
            self.arrays = [mx.contiguous(array[row : row + 1]) for array in arrays]
            mx.async_eval(self._arrays)  # otherwise the copies would keep the arrays of all sequences

    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position with nothing kept."""
        return position == 0

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    def go_back(self, position: int, kept: WayBack | None) -> None:
        """Goes back to an earlier position with its kept arrays; None: to the beginning."""
        if isinstance(kept, JoinedRow):
            self._arrays, self.joined = [], kept
        else:
            self.arrays = list(kept or self._none())
        self.offset, self.last_step, self.shifts = position, None, self._shifts_at(position)

    def take_from(self: Same, other: Same, position: int, kept: Arrays | None) -> None:
        """Takes the state of `other` at `position`, whose arrays are `kept`; they are never written to."""
        self.go_back(position, kept)
        self.shifts = other._shifts_at(position)


def joined_arrays(caches: Sequence[RecurrentCache]) -> Sequence[mx.array]:
    """The states of `RecurrentCache`s of several sequences as arrays [R, ...]: those of the last step, if it had the
    same sequences in the same order, else copies.
    """
    first, count = caches[0].joined, len(caches)
    if first is not None and len(first.arrays[0]) == count:
        rows = (one.joined for one in caches)
        if all(row is not None and row.arrays is first.arrays and row.row == i for i, row in enumerate(rows)):
            return first.arrays
    return as_rows([cast(list[mx.array], one.arrays) for one in caches])
