"""Two caches of one layer as one: the second holds what the first does not."""

from typing import Any

import mlx.core as mx

from .layer_cache import Arrays, LayerCache, Shape, Shifts, State
from .traced import JoinedKind


class JoinedCache(LayerCache[Any]):
    """Two caches that absorb the same tokens: `own`, the mixer's, and `beside`. Its arrays are those of both."""

    def __init__(self, part: Any, own: Any, beside: Any):
        self.own, self.beside = own, beside
        super().__init__(part)
        self.counts: bool = own.counts

    @property
    def _both(self) -> tuple[Any, Any]:
        return self.own, self.beside

    @property
    def offset(self) -> int:
        return int(self.own.offset)

    @offset.setter
    def offset(self, value: int) -> None:
        for one in self._both:
            one.offset = value

    @property
    def position(self) -> int:
        return int(self.own.position)

    @property
    def shifts(self) -> Shifts:
        return self.own.shifts

    @shifts.setter
    def shifts(self, value: Shifts) -> None:
        for one in self._both:
            one.shifts = value

    @property
    def is_shifted(self) -> bool:
        return bool(self.own.is_shifted)

    def shift(self, by: int, place: int | None = None) -> None:
        for one in self._both:
            one.shift(by, place)

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text."""
        return sum(one.bytes_for(positions, itemsize) for one in self._both)

    def stored_shapes(self, length: int) -> tuple[Shape, ...]:
        """The shapes of the arrays that are saved."""
        return *self.own.stored_shapes(length), *self.beside.stored_shapes(length)

    def stored(self) -> Arrays:
        """The arrays that are saved of a single text."""
        return *self.own.stored(), *self.beside.stored()

    def restored(self, *stored: Any) -> State:
        """The state that `stored` was taken of: the arrays, the length, and the dtype of entries."""
        *arrays, length, dtype = stored
        first, second = self._parted(arrays)
        own, beside = self.own.restored(*first, length, dtype), self.beside.restored(*second, length, dtype)
        return *own[:-1], *beside

    def _parted(self, arrays: Any) -> tuple[Any, Any]:
        """Splits the arrays of both caches into those of each."""
        count = len(self.own.state) - 1
        return tuple(arrays[:count]), tuple(arrays[count:])

    @property
    def state(self) -> State:
        return *self.own.state[:-1], *self.beside.state

    @state.setter
    def state(self, value: State) -> None:
        *arrays, offset = value
        for one, some in zip(self._both, self._parted(arrays), strict=True):
            one.state = *some, offset
        self.last_step = None

    def copy(self) -> Any:
        """Another cache in this one's state; they share arrays until one of the two writes to them."""
        other = type(self)(self.part)  # type: ignore[call-arg]
        other.own, other.beside = self.own.copy(), self.beside.copy()
        return other

    def empty(self) -> bool:
        return bool(self.own.empty())

    def expect(self, n: int) -> None:
        """n more positions are to come, in several calls."""
        for one in self._both:
            one.expect(n)
        self.last_step = None

    def reserve(self, n: int) -> None:
        """Makes room for n more positions; there must be some already."""
        for one in self._both:
            one.reserve(n)

    def traced(self, n: int) -> JoinedKind | None:
        """A function that makes the traced stand-in of both for the next n tokens; None if one of them has none."""
        own, beside = (one.traced(n) for one in self._both)
        return None if own is None or beside is None else JoinedKind(own, beside)

    def step_arrays(self, n: int = 1) -> list[mx.array]:
        """The arrays of the traced stand-in for the next n tokens."""
        first, later = list[mx.array](), [list[mx.array]() for _ in range(n - 1)]
        for one in self._both:
            arrays, kind = one.step_arrays(n), one.traced(n)
            first += arrays[: kind.num_inputs]
            for i, own in enumerate(later):
                own += arrays[kind.num_inputs :][i * kind.num_later : (i + 1) * kind.num_later]
        return first + [array for own in later for array in own]

    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""
        count = self.own.traced(1).num_outputs
        self.own.take_step(arrays[:count])
        self.beside.take_step(arrays[count:])

    def fetched_bytes(self, positions: int, itemsize: int) -> int:
        return sum(one.fetched_bytes(positions, itemsize) for one in self._both)

    def is_trimmable(self) -> bool:
        return all(one.is_trimmable() for one in self._both)

    def reaches(self, position: int) -> bool:
        """Whether it can go back to that position with nothing kept."""
        return all(one.reaches(position) for one in self._both)

    def kept(self) -> Arrays | None:
        """The kept states of both; a cache that can be cut has none."""
        return _all(self.own.kept(), self.beside.kept())

    def kept_bytes(self, itemsize: int) -> int:
        return sum(one.kept_bytes(itemsize) for one in self._both)

    def way_back(self) -> Arrays | None:
        return _all(self.own.way_back(), self.beside.way_back())

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of the way back to a row of the last step."""
        return sum(one.row_bytes(itemsize) for one in self._both)

    def go_back(self, position: int, kept: Arrays | None) -> None:
        """Goes back to an earlier position with its kept state `kept`."""
        for one, some in zip(self._both, self._of_each(kept, "kept"), strict=True):
            one.go_back(position, some)
        self.last_step = None

    def take_back(self, position: int, way: Arrays | None) -> None:
        """Goes back to before a row of the last step; `way` is the result of `way_back` there."""
        for one, some in zip(self._both, self._of_each(way, "way_back"), strict=True):
            one.take_back(position, some)
        self.last_step = None

    def take_from(self, other: Any, position: int, kept: Arrays | None) -> None:
        """Copies the state of `other` at `position`, with its kept state `kept`; the two are then independent."""
        pairs = zip(self._both, other._both, other._of_each(kept, "kept"), strict=True)
        for one, its, some in pairs:
            one.take_from(its, position, some)
        self.last_step = None

    def _of_each(self, kept: Arrays | None, name: str) -> tuple[Arrays | None, Arrays | None]:
        """The arrays of each cache, of those that its method `name` gave of both."""
        if kept is None:
            return None, None
        own = getattr(self.own, name)()
        count = 0 if own is None else len(own)
        return kept[:count] if count else None, kept[count:] or None


def _all(first: Arrays | None, second: Arrays | None) -> Arrays | None:
    """The arrays of both; None: there are none."""
    return (*(first or ()), *(second or ())) or None
