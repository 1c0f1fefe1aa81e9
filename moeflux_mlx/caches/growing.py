"""What caches of every position have in common: two arrays that grow in steps and can be cut."""

from abc import abstractmethod
from functools import lru_cache
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..ops import backend
from ..ops.backend import EitherArray, leave, view
from ..ops.launch import Shape
from ..ops.positions import RECENT, Held, Rows
from .layer_cache import Arrays, LayerCache, LayerPart, State
from .stand_in import TracedKind
from .traced import FixedCache, FixedChosen, FixedChosenKeys, FixedKeys, up_to

Alike = TypeVar("Alike", bound="Growing[Any]")


class Growing(LayerCache[LayerPart]):
    """Two arrays [B, heads, capacity, width] that fill from the front; capacity grows by `step`."""

    step = 256
    counts = True
    traced_whole: TracedKind = FixedCache  # the stand-in for a token that attends to all positions

    def __init__(self, part: LayerPart):
        super().__init__(part)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = self._expected = 0

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """(heads, width) of one position in each array."""

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text with that many positions, in entries of `itemsize` bytes."""
        return -(-positions // self.step) * self.step * itemsize * sum(heads * width for heads, width in self.rows)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """The shapes of the two arrays that a snapshot holds."""
        first, second = self.rows
        return (length, *first), (length, *second)

    def stored(self) -> Arrays:
        """The arrays of a single text in a snapshot; None stands for zeros."""
        first, second = (
            None if array is None else array[0, :, : self.offset].swapaxes(0, 1) for array in self.state[:2]
        )
        return first, second

    def restored(self, first: np.ndarray, second: np.ndarray, length: int, dtype: mx.Dtype) -> State:
        """The state that `stored` was taken of, in entries of `dtype`."""
        if not length:
            return None, None, 0
        pads = [(0, 0), (0, 0), (0, -length % self.step), (0, 0)]
        keys, values = (mx.pad(mx.array(a).astype(dtype).swapaxes(0, 1)[None], pads) for a in (first, second))
        return keys, values, length

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """Appends [B, heads, L, width] to each array.

        Returns:
            Two arrays whose first rows are what the new positions may see, in order; how many rows these are.
        """
        return self._append(keys, values)

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """`append` of what the arrays hold."""
        self._settle()
        start, self.offset = self.offset, self.offset + keys.shape[2]
        length = max(self.offset, self._expected)
        self._expected = length if length > self.offset else 0
        self.keys = self._placed(self.keys, keys, start, length)
        self.values = self._placed(self.values, values, start, length)
        return self.keys, self.values, self.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each array and returns the arrays that `mask` belongs to: all positions that
        the new ones may see, or, for one token on a GPU, the whole capacity.
        """
        first, second, count = self._append(keys, values)
        if sees_capacity(keys.shape[2]):
            assert self.keys is not None and self.values is not None
            return self.keys, self.values
        return first[..., :count, :], second[..., :count, :]

    def _placed(self, array: mx.array | None, new: mx.array, start: int, length: int) -> mx.array:
        """`array` with the entries of positions from `start` on, and with room for `length` positions."""
        room = grown(array, new.shape, new.dtype, start, length, self.step)
        if new.shape == room.shape:
            return mx.contiguous(new)  # which assigning would not copy: all that it is a part of would stay
        room[..., start : start + new.shape[2], :] = new
        return room

    def _settle(self) -> None:
        """Brings all entries into the two arrays."""

    def whole(self, length: int) -> int:
        """How many of the next `length` tokens attend to all that they see."""
        part: Any = self.part
        return int(part.seeing_all(self.offset, length))

    def traced(self, n: int) -> TracedKind | None:
        """A function that makes the traced stand-in for the next n tokens; None if only some of them attend to all
        positions.
        """
        whole = self.whole(n)
        return None if 0 < whole < n else self.traced_whole if whole else FixedChosen

    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        """The arrays of the traced stand-in for the next n tokens; there is room for them."""
        return [self.keys, self.values]

    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""
        self.offset += 1
        self.keys, self.values = arrays

    def expect(self, n: int) -> None:
        """Makes room at once for n more positions that come in several calls."""
        self._expected, self.last_step = max(self.offset + n, self._expected), None

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        self._settle()
        assert self.keys is not None and self.values is not None
        for name, array in (("keys", self.keys), ("values", self.values)):
            B, heads, _, width = array.shape
            shape = B, heads, n, width
            setattr(self, name, grown(array, shape, array.dtype, self.offset, self.offset + n, self.step))

    def mask(self, length: int) -> mx.array | str | None:
        """The mask for `mx.fast.scaled_dot_product_attention` of `length` new positions, which are already in the
        cache.
        """
        if sees_capacity(length):
            assert self.keys is not None
            return up_to(self.offset - 1, self.keys.shape[2])
        return "causal" if length > 1 else None

    @property
    def state(self) -> State:
        self._settle()
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, value: State) -> None:
        self._become(value)

    def _become(self, state: State) -> None:
        self._settle()
        self.keys, self.values, self.offset = state
        self.last_step, self.shifts = None, ()

    def empty(self) -> bool:
        return self.offset == 0

    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position without a kept state."""
        return True

    def is_trimmable(self) -> bool:
        return True

    def go_back(self, position: int, kept: Arrays | None) -> None:
        """Goes back to an earlier position; needs no kept state."""
        self._settle()
        self.offset, self._expected, self.last_step = position, 0, None
        self.shifts = self._shifts_at(position)

    def take_from(self: Alike, other: Alike, position: int, kept: Arrays | None) -> None:
        """Copies the state that `other` had at `position`; later changes of one do not affect the other."""
        capacity = -(-position // self.step) * self.step
        self._settle()
        keys, values, _ = other.state
        if position and keys is not None:
            self.keys, self.values = (mx.contiguous(a[..., :capacity, :]) for a in (keys, values))
        self.offset, self.last_step, self.shifts = position, None, other._shifts_at(position)


def sees_capacity(length: int) -> bool:
    """One token on a GPU attends over the whole capacity, as in the compiled step: so its bits are the same whether the
    experts are in memory or streamed."""
    return length == 1 and backend.has_kernels()


def grown(array: mx.array | None, new: Shape, dtype: mx.Dtype, used: int, length: int, step: int) -> mx.array:
    """`array` with room for entries of shape `new` after its first `used` positions: if it has none, for `length`
    positions in whole steps."""
    B, heads, L, width = new
    if array is not None and used + L <= array.shape[2]:
        return array
    capacity = (length + step - 1) // step * step
    room = mx.zeros((B, heads, capacity - used, width), dtype)
    return room if array is None else mx.concatenate([array[..., :used, :], room], axis=2)


@lru_cache(64)
def _positions(begun: int, capacity: int, shift: int) -> list[mx.array]:
    """`Held.positions` of each token that `recent` has room for, whose rotary position is its place plus `shift`; all
    layers share them.

    They are filled together and are evaluated: when the host fills an array of more than 8 bytes, MLX 0.32 for CUDA
    allocates managed memory and waits for a copy, which took 0.1 ms on an H200.
    """
    places = np.arange(begun, begun + RECENT)
    columns = [places, np.full_like(places, begun), np.full_like(places, capacity), places + shift]
    rows = list(mx.array(np.stack(columns, axis=1).astype(np.int32)))
    mx.async_eval(rows)
    return rows


@lru_cache(8)
def _no_recent(shape: Shape, dtype: mx.Dtype) -> mx.array:
    """`Held.recent` before the first token; evaluated, because a lazy array belongs to its thread."""
    recent = mx.zeros(shape, dtype)
    mx.eval(recent)
    return recent


class Stepping(Growing[LayerPart]):
    """A cache that appends single tokens to a separate array `recent`, until it is full or the other arrays are needed:
    on a GPU to a copy of it, on the CPU to a numpy array that no other object uses.
    """

    def __init__(self, part: LayerPart):
        super().__init__(part)
        self._recent: EitherArray | None = None
        self._begun = 0  # the first position of `recent`

    @abstractmethod
    def takes_steps(self) -> bool:
        """Whether there are kernels for the next token alone, of the mixer and of all that it asks of this cache."""

    @property
    def recent_shape(self) -> Shape:
        raise NotImplementedError

    def parts(self, recent: EitherArray, length: int) -> tuple[EitherArray, EitherArray]:
        """The first positions of each array, [1, heads, length, .]."""
        raise NotImplementedError

    def held(self, dtype: mx.Dtype, here: bool = False, n: int = 1) -> Held:
        """The contents before a token, in entries of `dtype`, with room for n; `here`: as numpy arrays."""
        if self._recent is None or self.offset - self._begun + n > RECENT:
            self._settle()
            if self.keys is None:
                empty_rows = (mx.zeros((1, heads, 0, width), dtype) for heads, width in self.rows)
                self.keys, self.values = (self._placed(None, array, 0, 1) for array in empty_rows)
            shape = self.recent_shape
            empty: Any = np.empty(shape, view(self.keys).dtype) if here else _no_recent(shape, dtype)
            self._recent, self._begun = empty, self.offset
        assert self.keys is not None and self.values is not None
        if here:
            places = self.offset, self._begun, self.keys.shape[2], self.position
            return Held(view(self.keys), view(self.values), self._recent, places)
        return Held(self.keys, self.values, self._recent, self._positions(1)[0])

    def _positions(self, n: int) -> list[mx.array]:
        """`Held.positions` of the next n tokens."""
        assert self.keys is not None
        first = self.offset - self._begun
        return _positions(self._begun, self.keys.shape[2], self.position - self.offset)[first : first + n]

    def advance(self, recent: EitherArray) -> None:
        """`recent` with one token more takes its place."""
        self._recent = recent
        self.offset += 1

    def traced(self, n: int) -> TracedKind | None:
        kind = super().traced(n)
        if kind is None or not self.takes_steps():
            return kind
        return FixedChosenKeys if kind is FixedChosen else FixedKeys

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        if not self.takes_steps():
            super().reserve(n)

    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        if not self.takes_steps():
            return super().step_arrays(n)
        assert self.keys is not None
        held = self.held(self.keys.dtype, n=n)
        return [*held, *self._positions(n)[1:]]

    def take_step(self, arrays: list[mx.array]) -> None:
        if len(arrays) == FixedKeys.num_outputs:
            self.advance(arrays[0])
        else:
            super().take_step(arrays)

    def _settle(self) -> None:
        if self._recent is None or self.offset == self._begun:
            self._recent = None
            return
        kept = []
        for array, part in zip(
            (self.keys, self.values), self.parts(self._recent, self.offset - self._begun), strict=True
        ):
            kept.append(self._placed(array, leave(part), self._begun, self.offset))
        (self.keys, self.values), self._recent = kept, None  # last, so that an interrupt loses nothing
