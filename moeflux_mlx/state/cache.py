"""What a model remembers between calls, one cache for each layer, in mlx-lm's cache protocol.

A cache is made for the part of a layer that it serves, and answers for itself: the bytes it takes for a text of any
length, what a snapshot holds of it, how it gets back to an earlier position or to any row of the last step
(`Model.step`), and its traced stand-in in a compiled step. `KVCache` and `LatentCache` grow in steps and can be
trimmed; `RecurrentCache` holds a state that has absorbed every token and cannot.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from ..kinds import Delta, GroupedQuery, Latent, Mixer
from ..ops import attend, backend, latent
from ..ops.attend import RECENT, Held, Rows
from ..ops.backend import view

FLOAT_BYTES = 4
Shape = tuple[int, ...]
Part = TypeVar("Part")
Same = TypeVar("Same", bound="_Cache")
Pair = tuple[mx.array | None, mx.array | None]
State = tuple[mx.array | None, mx.array | None, int]  # a cache's two arrays and how many positions they have absorbed


class Traced(Protocol):
    """What stands for a cache while a step is traced: arrays of fixed shape, and positions that are arrays."""

    takes: ClassVar[int]  # arrays
    gives: ClassVar[int]

    @property
    def arrays(self) -> list[mx.array]:
        """As they are after the step."""
        ...


class FixedCache:
    """Two arrays [1, heads, capacity, width], full to `offset` (an int32 array of no axes, like `position`).

    `seen` gives the mask [1, 1, 1, capacity] of what one new token sees, the same for all layers.
    """

    takes: ClassVar[int] = 2
    gives: ClassVar[int] = 2

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        offset: mx.array,
        position: mx.array,
        seen: Callable[[int], mx.array],
    ):
        self.keys, self.values, self._seen = keys, values, seen
        self.offset, self.position = offset, position

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self.offset[None]
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values

    def mask(self, length: int) -> mx.array:
        return self._seen(self.keys.shape[2])


class FixedKeys:
    """Two arrays that a step reads, and the newest entries, which it copies with its own."""

    takes: ClassVar[int] = 4
    gives: ClassVar[int] = 1

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

    def held(self, dtype: mx.Dtype) -> Held:
        return self._held

    def advance(self, recent: mx.array) -> None:
        self._held = self._held._replace(recent=recent)


class FixedState:
    """A recurrent cache's two arrays; what it computes depends on no position."""

    takes: ClassVar[int] = 2
    gives: ClassVar[int] = 2

    def __init__(self, conv: mx.array, recurrent: mx.array, *_: Any):
        self.conv, self.recurrent, self.offset = conv, recurrent, 0  # which nobody reads

    @property
    def arrays(self) -> list[mx.array]:
        return [self.conv, self.recurrent]


class _Cache(Generic[Part]):
    """What all kinds answer alike, from their `state`; `part` is what the cache serves.

    Attributes:
        position: the next token's rotary position: its place `offset`, further by what `shift` has said.
        last_step: marks the last step (`Model.step`) in the cache of a text's first layer, until the text goes another
            way than onwards; then None.
    """

    state: State
    offset: int

    def __init__(self, part: Part):
        self.part = part
        self.last_step: object = None
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

    def way_back(self) -> Pair | None:
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


class _Growing(_Cache[Part]):
    """Two arrays [B, heads, capacity, width] that fill from the front; capacity grows by `step`."""

    step = 256
    counts: ClassVar[bool] = True  # a snapshot holds as much as there are positions
    traced: Any = FixedCache

    def __init__(self, part: Part):
        super().__init__(part)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = self._expected = 0

    @property
    def rows(self) -> Rows:
        """(heads, width) of one position in each array."""
        raise NotImplementedError

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """What one text of that many positions takes, in entries of `itemsize` bytes."""
        return -(-positions // self.step) * self.step * itemsize * sum(heads * width for heads, width in self.rows)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """Of the two float32 arrays that a snapshot holds."""
        first, second = self.rows
        return (length, *first), (length, *second)

    def stored(self) -> Pair:
        """What a snapshot holds of a single text; None: zeros."""
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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, heads, L, width] to each array and returns what `mask` is for: all positions so far, or, for
        one token on a GPU, all there is room for."""
        self._settle()
        start, self.offset = self.offset, self.offset + keys.shape[2]
        length = max(self.offset, self._expected)
        self._expected = length if length > self.offset else 0
        self.keys = _grown(self.keys, keys.shape, keys.dtype, start, length, self.step)
        self.values = _grown(self.values, values.shape, values.dtype, start, length, self.step)
        self.keys[..., start : self.offset, :] = keys
        self.values[..., start : self.offset, :] = values
        if _sees_capacity(keys.shape[2]):
            return self.keys, self.values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def _settle(self) -> None:
        """Brings all entries into the two arrays."""

    def step_arrays(self) -> list[mx.array | None]:
        """What stands for the cache in a compiled step; there is room for its token."""
        return [self.keys, self.values]

    def take_step(self, arrays: list[mx.array]) -> None:
        """What the step has made of them."""
        self.keys, self.values = arrays
        self.offset += 1

    def expect(self, n: int) -> None:
        """n more positions are to come, in several calls: room is made for all of them at once."""
        self._expected, self.last_step = max(self.offset + n, self._expected), None

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        assert self.keys is not None and self.values is not None
        for name, array in (("keys", self.keys), ("values", self.values)):
            B, heads, _, width = array.shape
            shape = B, heads, n, width
            setattr(self, name, _grown(array, shape, array.dtype, self.offset, self.offset + n, self.step))

    def mask(self, length: int) -> mx.array | str | None:
        """What `mx.fast.scaled_dot_product_attention` needs for `length` new positions, which are in already."""
        if _sees_capacity(length):
            assert self.keys is not None
            return up_to(self.offset - 1, self.keys.shape[2])
        return "causal" if length > 1 else None

    @property
    def state(self) -> State:
        self._settle()
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, value: State) -> None:
        self._settle()
        self.keys, self.values, self.offset = value
        self.last_step, self._shifts = None, ()

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forgets the last n positions; returns how many there were to forget."""
        n = min(self.offset, n)
        self.go_back(self.offset - n, None)
        return n

    def go_back(self, position: int, kept: Pair | None) -> None:
        """To an earlier position; nothing need be kept for it."""
        self._settle()
        self.offset, self._expected, self.last_step = position, 0, None
        self._shifts = self._shifts_at(position)

    def take_from(self, other: Any, position: int, kept: Pair | None) -> None:
        """Becomes what `other` was at `position`; neither sees what the other one absorbs later."""
        capacity = -(-position // self.step) * self.step
        self._settle()
        keys, values, _ = other.state
        if position and keys is not None:
            self.keys, self.values = (mx.contiguous(a[..., :capacity, :]) for a in (keys, values))
        self.offset, self.last_step, self._shifts = position, None, other._shifts_at(position)


def _sees_capacity(length: int) -> bool:
    """One token on a GPU attends over the whole capacity, as in the compiled step: so its bits are the same whether the
    experts are in memory or streamed."""
    return length == 1 and backend.has_kernels()


def up_to(position: int | mx.array, capacity: int) -> mx.array:
    """The mask [1, 1, 1, capacity] of a token at `position`."""
    return (mx.arange(capacity) <= position)[None, None, None]


def _grown(array: mx.array | None, new: Shape, dtype: mx.Dtype, used: int, length: int, step: int) -> mx.array:
    """`array` with room for entries of shape `new` after its first `used` positions: if it has none, for `length`
    positions in whole steps."""
    B, heads, L, width = new
    if array is not None and used + L <= array.shape[2]:
        return array
    capacity = (length + step - 1) // step * step
    room = mx.zeros((B, heads, capacity - used, width), dtype)
    return room if array is None else mx.concatenate([array[..., :used, :], room], axis=2)


@lru_cache(8)
def _positions(offset: int, begun: int, capacity: int, position: int) -> mx.array:
    """Of `Held`, one array for all layers."""
    return mx.array([offset, begun, capacity, position], mx.int32)


@lru_cache(8)
def _no_recent(shape: Shape, dtype: mx.Dtype) -> mx.array:
    """Of `Held`, before the first token; evaluated, because what is not belongs to the thread that made it."""
    recent = mx.zeros(shape, dtype)
    mx.eval(recent)
    return recent


class _Stepping(_Growing[Part]):
    """One that adds single tokens to `recent`, an array of their own, until it is full or somebody asks for the others:
    on a GPU to a copy of it, on the CPU to a numpy array that nobody else has."""

    def __init__(self, part: Part):
        super().__init__(part)
        self._recent: Any = None  # mx.array | np.ndarray | None
        self._begun = 0  # the first position of `recent`

    def takes_steps(self) -> bool:
        """Whether there are kernels for a single token of this part."""
        raise NotImplementedError

    @property
    def recent_shape(self) -> Shape:
        raise NotImplementedError

    @staticmethod
    def parts(recent: Any, length: int, width: int) -> tuple[Any, Any]:
        """Of its first positions, [1, heads, length, .] for each array; `width` is the first one's."""
        raise NotImplementedError

    def held(self, dtype: mx.Dtype, here: bool = False) -> Held:
        """What there is before a token, in entries of `dtype`; `here`: as numpy arrays."""
        if self._recent is None or self.offset - self._begun == RECENT:
            self._settle()
            if self.keys is None:
                self.keys, self.values = (mx.zeros((1, heads, self.step, width), dtype) for heads, width in self.rows)
            shape = self.recent_shape
            empty: Any = np.empty(shape, np.float32) if here else _no_recent(shape, dtype)
            self._recent, self._begun = empty, self.offset
        assert self.keys is not None and self.values is not None
        positions = self.offset, self._begun, self.keys.shape[2], self.position
        if here:
            return Held(view(self.keys), view(self.values), self._recent, positions)
        return Held(self.keys, self.values, self._recent, _positions(*positions))

    def advance(self, recent: Any) -> None:
        """`recent` with one token more takes its place."""
        self._recent = recent
        self.offset += 1

    @property
    def traced(self) -> Any:
        return FixedKeys if self.takes_steps() else FixedCache

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        if not self.takes_steps():
            super().reserve(n)

    def step_arrays(self) -> list[mx.array | None]:
        if not self.takes_steps():
            return super().step_arrays()
        assert self.keys is not None
        return list(self.held(self.keys.dtype))

    def take_step(self, arrays: list[mx.array]) -> None:
        if len(arrays) == FixedKeys.gives:
            self.advance(arrays[0])
        else:
            super().take_step(arrays)

    def _settle(self) -> None:
        if self._recent is None or self.offset == self._begun:
            self._recent = None
            return
        assert self.keys is not None and self.values is not None
        kept = []
        parts = self.parts(self._recent, self.offset - self._begun, self.keys.shape[3])
        for array, part in zip((self.keys, self.values), parts, strict=True):
            new = mx.array(part) if isinstance(part, np.ndarray) else part
            room = _grown(array, new.shape, new.dtype, self._begun, self.offset, self.step)
            room[..., self._begun : self.offset, :] = new
            kept.append(room)
        (self.keys, self.values), self._recent = kept, None  # at last: whoever is interrupted has lost nothing


class KVCache(_Stepping[GroupedQuery]):
    """Keys (after norm and rotation) and values of grouped-query attention."""

    @property
    def rows(self) -> Rows:
        return ((self.part.kv_heads, self.part.head_dim),) * 2

    def takes_steps(self) -> bool:
        return attend.takes_step(self.part.head_dim)

    @property
    def recent_shape(self) -> Shape:
        return 2, self.part.kv_heads, RECENT, self.part.head_dim

    @staticmethod
    def parts(recent: mx.array, length: int, width: int) -> tuple[mx.array, mx.array]:
        return recent[0, None, :, :length], recent[1, None, :, :length]


class LatentCache(_Stepping[Latent]):
    """MLA: the normed latent [B, 1, N, latent] and the rotated shared key [B, 1, N, rotated]."""

    @property
    def rows(self) -> Rows:
        return (1, self.part.latent), (1, self.part.rotation.dims)

    def takes_steps(self) -> bool:
        return latent.takes_step(self.part.latent, self.part.rotation.dims)

    @property
    def recent_shape(self) -> Shape:
        return RECENT, self.part.latent + self.part.rotation.dims

    @staticmethod
    def parts(recent: mx.array, length: int, width: int) -> tuple[mx.array, mx.array]:
        entries = recent[None, None, :length]
        return entries[..., :width], entries[..., width:]


class RecurrentCache(_Cache[Delta]):
    """Gated DeltaNet: `conv`, the last raw inputs of the convolution [B, taps - 1, channels], and
    `recurrent`, float32 [B, value_heads, value_dim, key_dim]."""

    counts: ClassVar[bool] = False
    traced: Any = FixedState

    def __init__(self, part: Delta):
        super().__init__(part)
        self.conv: mx.array | None = None
        self.recurrent: mx.array | None = None
        self.offset = 0

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """What one text takes, however long it is; only the convolution's state has entries of `itemsize` bytes."""
        conv, recurrent = (int(np.prod(shape)) for shape in self.stored_shapes(positions))
        return conv * itemsize + recurrent * FLOAT_BYTES

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """Of the two float32 arrays that a snapshot holds."""
        part = self.part
        return (part.taps - 1, part.channels), (part.value_heads, part.value_dim, part.key_dim)

    def stored(self) -> Pair:
        """What a snapshot holds of a single text; None: zeros."""
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
        self.last_step, self._shifts = None, ()

    def way_back(self) -> Pair:
        return self.conv, self.recurrent

    def row_bytes(self, itemsize: int) -> int:
        """What the way back to a row of the last step takes: a whole state."""
        return self.bytes_for(1, itemsize)

    def empty(self) -> bool:
        return self.recurrent is None

    def step_arrays(self) -> list[mx.array | None]:
        """What stands for the cache in a compiled step."""
        return [self.conv, self.recurrent]

    def take_step(self, arrays: list[mx.array]) -> None:
        """What the step has made of them."""
        self.conv, self.recurrent = arrays
        self.offset += 1

    def expect(self, n: int) -> None:
        """Its size does not depend on positions."""
        self.last_step = None

    def reserve(self, n: int) -> None:
        """Its size does not depend on positions."""

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    def go_back(self, position: int, kept: Pair | None) -> None:
        """To an earlier position, whose arrays were kept; None: to the beginning."""
        self.conv, self.recurrent = kept or (None, None)
        self.offset, self.last_step, self._shifts = position, None, self._shifts_at(position)

    def take_from(self, other: Any, position: int, kept: Pair | None) -> None:
        """Becomes what `other` was at `position`, whose arrays are `kept`: nobody writes to them."""
        self.go_back(position, kept)
        self._shifts = other._shifts_at(position)


Cache = KVCache | LatentCache | RecurrentCache


def make_cache(mixer: Mixer) -> Cache:
    """An empty cache for a layer with this mixer."""
    match mixer:
        case GroupedQuery():
            return KVCache(mixer)
        case Latent():
            return LatentCache(mixer)
        case Delta():
            return RecurrentCache(mixer)


def uncut_bytes(mixers: Iterable[Mixer], itemsize: int) -> int:
    """What one text's states take in the layers whose caches cannot be cut, with entries of `itemsize` bytes."""
    return sum(make_cache(mixer).row_bytes(itemsize) for mixer in mixers)
