"""What all caches answer alike: one cache remembers one layer's part of a text.

A cache answers for itself: the bytes it takes for a text of any length, what a snapshot holds of it, how it gets back
to an earlier position or to any row of the last step (`Model.step`), and its traced stand-in in a compiled step.
"""

from typing import Generic, TypeVar

import mlx.core as mx

FLOAT_BYTES = 4
Shape = tuple[int, ...]
Part = TypeVar("Part")
Same = TypeVar("Same", bound="LayerCache")
Pair = tuple[mx.array | None, mx.array | None]
State = tuple[mx.array | None, mx.array | None, int]  # a cache's two arrays and how many positions they have absorbed


class LayerCache(Generic[Part]):
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
