"""The cache of attention over a window and over entries that stand for many positions each."""

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ..ops.attend import Rows
from ..ops.backend import view
from .growing import grown
from .layer_cache import Arrays, Shape, State
from .window import WindowCache


class CompressedCache(WindowCache):
    """A ring of the newest positions [B, 1, slots, row]: their keys, and what entries are yet to be made of; and all
    entries [B, 1, T, entry]. A position's entry is made with the last of its positions.

    What the ring has lost cannot be gone back to, as with every window; entries that were made since are forgotten.
    """

    part: Any  # a `Compressed`, or `KeyBlocks`
    can_trace: ClassVar[bool] = False

    def __init__(self, part: Any):
        super().__init__(part, part.remembered)

    @property
    def rows(self) -> Rows:
        return (1, self.part.row), (1, self.part.entry)

    def entries_of(self, positions: int) -> int:
        """Entries that so many positions have made."""
        return positions // self.part.ratio if self.part.ratio else 0

    def takes_steps(self) -> bool:
        return False

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """What one text takes."""
        entries = -(-self.entries_of(positions) // self.step) * self.step * self.part.entry
        return itemsize * (self.capacity * self.part.row + entries)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """Of the two float32 arrays that are saved."""
        return (min(length, self.window - 1), 1, self.part.row), (self.entries_of(length), 1, self.part.entry)

    def stored(self) -> Arrays:
        """What is saved of a single text, in the order of positions; None: nothing."""
        newest, count = self._newest(self.keys, self.window - 1), self.entries_of(self.offset)
        entries = None if self.values is None or not count else self.values[0, :, :count].swapaxes(0, 1)
        return None if newest is None else newest[0].swapaxes(0, 1), entries

    def restored(self, first: np.ndarray, second: np.ndarray, length: int, dtype: mx.Dtype) -> State:
        """The state that `stored` was taken of, in entries of `dtype`."""
        if not length:
            return None, None, 0
        rows, entries = (mx.array(array).astype(dtype).swapaxes(0, 1)[None] for array in (first, second))
        ring = self._placed(None, rows, length - rows.shape[2], length)
        return ring, entries if entries.size else None, length

    def absorb(self, rows: Any, make: Callable[[Any, int, slice], Any]) -> tuple[Any, int, Any]:
        """Appends rows [B, L, row] of positions, and the entries that end with them.

        Args:
            make: (the newest rows [B, n, row], the place of the first of them, numbers of entries) -> these entries
                [B, ., entry].

        Returns:
            The newest rows, the place of the first of them, and all entries [B, T, entry]; None: there are none.
        """
        first, count, here = self.offset, rows.shape[1], isinstance(rows, np.ndarray)
        appended = self.append_rows(mx.array(rows[:, None]) if here else rows[:, None])
        newest = (view(appended) if here else appended)[:, 0]
        begin = first + count - newest.shape[1]
        ended = slice(self.entries_of(first), self.entries_of(first + count))
        if ended.start < ended.stop:
            entries = make(newest, begin, ended)
            self.put_entries((mx.array(entries) if here else entries)[:, None], ended.start)
        made: Any = view(self.values) if here and ended.stop else self.values
        return newest, begin, made[:, 0, : ended.stop] if ended.stop else None

    def append_rows(self, rows: mx.array) -> mx.array:
        """Appends [B, 1, L, row]; those of the newest positions before, and these."""
        before = self._newest(self.keys, self.window - 1)
        self.keys = self._placed(self.keys, rows, self.offset, self.offset + rows.shape[2])
        self.offset += rows.shape[2]
        return rows if before is None else mx.concatenate([before, rows], axis=2)

    def put_entries(self, entries: mx.array, first: int) -> None:
        """Entries [B, 1, n, entry] from number `first` on."""
        count = entries.shape[2]
        room: Any = grown(self.values, entries.shape, entries.dtype, first, first + count, self.step)
        self.values = mx.slice_update(room, entries, mx.array([first]), axes=(2,))
