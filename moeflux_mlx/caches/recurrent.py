"""The cache of a recurrent mixer: a state that has absorbed every token and cannot be cut."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from .layer_cache import FLOAT_BYTES, Arrays, LayerCache, Shape, State
from .traced import FixedState


class RecurrentCache(LayerCache[Any]):
    """`conv`, the last raw inputs of a convolution [B, *conv_shape], and `recurrent`, float32 [B, *state_shape]; `part`
    says both shapes.
    """

    counts = False

    def __init__(self, part: Any):
        super().__init__(part)
        self.conv: mx.array | None = None
        self.recurrent: mx.array | None = None
        self.offset = 0

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text of any length; only the convolution's state has entries of `itemsize` bytes."""
        conv, recurrent = (math.prod(shape) for shape in self.stored_shapes(positions))
        return conv * itemsize + recurrent * FLOAT_BYTES

    def step_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes that the next token reads, and writes back."""
        return 2 * self.bytes_for(positions, itemsize)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """The shapes of the two float32 arrays that a snapshot holds."""
        return self.part.conv_shape, self.part.state_shape

    def stored(self) -> Arrays:
        """The arrays of a single text in a snapshot; None stands for zeros."""
        first, second = (None if array is None else array[0] for array in (self.conv, self.recurrent))
        return first, second

    def restored(self, first: np.ndarray, second: np.ndarray, length: int, dtype: mx.Dtype) -> State:
        """The state that `stored` was taken of, its convolution's part in `dtype`."""
        return mx.array(first)[None].astype(dtype), mx.array(second)[None], length

    @property
    def state(self) -> State:
        return self.conv, self.recurrent, self.offset

    @state.setter
    def state(self, value: State) -> None:
        self.conv, self.recurrent, self.offset = value
        self.last_step, self.shifts = None, ()

    def absorb(self, conv: mx.array, recurrent: mx.array, tokens: int) -> None:
        """Takes both arrays as they are after `tokens` more tokens."""
        self.conv, self.recurrent = conv, recurrent
        self.offset += tokens

    def way_back(self) -> Arrays:
        return self.conv, self.recurrent

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of the way back to a row of the last step: a whole state."""
        return self.bytes_for(1, itemsize)

    def empty(self) -> bool:
        return self.recurrent is None

    def traced(self, n: int) -> type[FixedState]:
        """A function that makes the traced stand-in for the next n tokens."""
        return FixedState

    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        """The arrays of the traced stand-in for the next n tokens."""
        return [self.conv, self.recurrent]

    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""
        conv, recurrent = arrays
        self.absorb(conv, recurrent, 1)

    def expect(self, n: int) -> None:
        """Does nothing: the cache's size does not depend on positions."""
        self.last_step = None

    def reserve(self, n: int) -> None:
        """Does nothing: the cache's size does not depend on positions."""

    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position with nothing kept."""
        return position == 0

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    def go_back(self, position: int, kept: Arrays | None) -> None:
        """Goes back to an earlier position with its kept arrays; None: to the beginning."""
        self.conv, self.recurrent = kept or (None, None)
        self.offset, self.last_step, self.shifts = position, None, self._shifts_at(position)

    def take_from(self, other: Any, position: int, kept: Arrays | None) -> None:
        """Takes the state of `other` at `position`, whose arrays are `kept`; they are never written to."""
        self.go_back(position, kept)
        self.shifts = other._shifts_at(position)
