"""A ring of the newest positions, in two arrays or in one."""

from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..ops.launch import Shape
from .growing import Stepping, sees_capacity
from .layer_cache import Arrays, LayerPart, Same, State
from .traced import REACH, SPARE, FixedRing, seen_in_ring


class Ring(Stepping[LayerPart]):
    """The newest `window + SPARE` positions: position p lies in slot p % capacity.

    It can go back only as far as it still holds all positions that the next token sees (`reaches`); going further back
    needs a kept state.
    """

    traced_whole = FixedRing

    def __init__(self, part: LayerPart, window: int, chunked: bool = False):
        """`chunked`: a token sees, of its own chunk of `window` positions, those up to its own."""
        super().__init__(part)
        self.window, self.chunked = window, chunked
        self.capacity = self.window + SPARE
        self._lost = 0  # positions before this one have been overwritten

    @property
    def first(self) -> int:
        """The first position that is still held, also after drafts were taken back."""
        return max(self._lost, self.offset - self.window - REACH)

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text of any length."""
        return self.capacity * itemsize * sum(heads * width for heads, width in self.rows)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """The shapes of the two arrays that are saved: the positions that the next token sees."""
        return super().stored_shapes(min(length, self.window - 1))

    def stored(self) -> Arrays:
        """The arrays that are saved of a single text, in the order of positions; None if empty."""
        newest = (self._newest(array, self.window - 1) for array in self.state[:2])
        first, second = (None if array is None else array[0].swapaxes(0, 1) for array in newest)
        return first, second

    def restored(self, first: np.ndarray, second: np.ndarray, length: int, dtype: mx.Dtype) -> State:
        """The state that `stored` was taken of, in entries of `dtype`."""
        if not length:
            return None, None, 0
        entries = (mx.array(array).astype(dtype).swapaxes(0, 1)[None] for array in (first, second))
        keys, values = (self._placed(None, array, length - array.shape[2], length) for array in entries)
        return keys, values, length

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """Returns two arrays with what the first new position sees of the earlier ones, and the new ones; how many
        rows."""
        self._settle()
        before = [self._newest(array, self.window - 1) for array in (self.keys, self.values)]
        super()._append(keys, values)
        first, second = (
            new if old is None else mx.concatenate([old, new], axis=2)
            for old, new in zip(before, (keys, values), strict=True)
        )
        return first, second, first.shape[2]

    def mask(self, length: int) -> mx.array | str | None:
        """The mask for `mx.fast.scaled_dot_product_attention` of `length` new positions, which are already in the
        cache. If there are several, the operation itself limits each to its window.
        """
        if sees_capacity(length):
            return seen_in_ring(self.offset - 1, self.capacity, self.chunked)
        return "causal" if length > 1 else None

    def expect(self, n: int) -> None:
        """Does nothing: the cache's size does not depend on positions."""
        self.last_step = None

    def reserve(self, n: int) -> None:
        """Does nothing: the cache's size does not depend on positions."""

    def _become(self, state: State) -> None:
        super()._become(state)
        self._lost = max(self.offset - self.window + 1, 0)

    def copy(self: Same) -> Same:
        """A copy as of all caches; it can go back as far as this one."""
        other: Any = super().copy()
        other._lost = self._lost  # type: ignore[attr-defined]
        return other

    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position with nothing kept."""
        return max(position - self.window + 1, 0) >= self.first

    def is_trimmable(self) -> bool:
        return False

    def go_back(self, position: int, kept: Arrays | None) -> None:
        """Goes back to an earlier position with its state `kept`, or to one that it `reaches`.

        Raises:
            RequestError: nothing was kept, and positions that attention sees from there are not held any more.
        """
        shifts = self._shifts_at(position)
        if kept is not None or position == 0:
            self._recent = None
            self.state = (*(kept or (None, None)), position)
        elif not self.reaches(position):
            raise RequestError(
                f"a cache of {self.capacity} positions cannot go back from {self.offset} to {position}: it holds none "
                f"before {self.first}, and attention sees {self.window}; keep a state there"
            )
        else:
            self._settle()
            self._lost = self.first  # before `offset` says less
            self.offset, self.last_step = position, None
        self.shifts = shifts

    def take_back(self, position: int, way: Arrays | None) -> None:
        """Goes back to before a row of the last step; a few rows were written beyond those that `first` counts."""
        lost = max(self._lost, self.offset - self.capacity)
        super().take_back(position, way)
        self._lost = lost

    def take_from(self, other: "Ring[LayerPart]", position: int, kept: Arrays | None) -> None:
        """Becomes what `other` was at `position`, whose arrays are `kept` or still held; nobody writes to them."""
        if kept is None:
            self.state, self._lost = other.state, other.first
            self.go_back(position, None)
        else:
            self.go_back(position, kept)
        self.shifts = other._shifts_at(position)

    def _newest(self, array: mx.array | None, most: int) -> mx.array | None:
        """The last positions of an array, at most `most`, in order; None if there are none."""
        count = min(self.offset, most)
        if array is None or not count:
            return None
        start, end = (self.offset - count) % self.capacity, self.offset % self.capacity
        if start < end:
            return array[..., start:end, :]
        return mx.concatenate([array[..., start:, :], array[..., :end, :]], axis=2)

    def _placed(self, array: mx.array | None, new: mx.array, start: int, length: int) -> mx.array:
        """Another array with the entries of positions from `start` on."""
        B, heads, count, width = new.shape
        if array is None:
            array = mx.zeros((B, heads, self.capacity, width), new.dtype)
        kept = min(count, self.capacity)
        at, new = (start + count - kept) % self.capacity, new[..., count - kept :, :]
        turn = min(self.capacity - at, kept)  # rows up to the last slot
        array = mx.slice_update(array, new[..., :turn, :], mx.array([at]), axes=(2,))
        return array if turn == kept else mx.slice_update(array, new[..., turn:, :], mx.array([0]), axes=(2,))
