"""The cache of attention over a window and over entries that summarise many positions each."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..ops.backend import AnyArray, leave, library_of, of_kind
from ..ops.launch import Shape
from ..ops.positions import Rows
from .growing import grown, sees_capacity
from .layer_cache import Arrays, State
from .ring import Ring
from .traced import PLAIN, EntriesKind, OnKernels


class EntriesCache(Ring[Any]):
    """A ring of the newest positions [B, 1, slots, row]: their keys, and what entries are yet to be made of; and all
    entries [B, 1, T, entry]. An entry is made when the last of its positions arrives. The cache can go back only to
    positions that the ring still covers; later entries are then dropped.

    `part` says of how many positions an entry is made (`ratio`, `overlap`), the widths of both (`row`, `entry`), the
    window (`remembered`), and which tokens attend to all entries (`seeing_all`), as `KeyBlocks` does.
    """

    def __init__(self, part: Any):
        super().__init__(part, part.remembered)

    @property
    def rows(self) -> Rows:
        return (1, self.part.row), (1, self.part.entry)

    def entries_of(self, positions: int) -> int:
        """The number of entries of this many positions."""
        return positions // self.part.ratio if self.part.ratio else 0

    def takes_steps(self) -> bool:
        return False

    def bytes_for(self, positions: int, itemsize: int) -> int:
        """Bytes of one text."""
        entries = -(-self.entries_of(positions) // self.step) * self.step * self.part.entry
        return itemsize * (self.capacity * self.part.row + entries)

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        """The shapes of the two float32 arrays that are saved."""
        return (min(length, self.window - 1), 1, self.part.row), (self.entries_of(length), 1, self.part.entry)

    def stored(self) -> Arrays:
        """The arrays that are saved of a single text, in the order of positions; None if empty."""
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

    def absorb(
        self, rows: AnyArray, make: Callable[[AnyArray, int | mx.array, int], AnyArray], kernels: OnKernels = PLAIN
    ) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Appends rows [B, L, row] of positions, and the entries that end with them.

        Args:
            make: (the rows [B, n, row] that entries are made of, the number of the first entry, how many) -> these
                entries [B, ., entry]. The rows begin with those of the `overlap`, if the entry is not the first.
            kernels: of a single token.

        Returns:
            The newest rows [B, n, row], their places [n], and all entries [B, T, entry]; None: there are none. Places
            below 0 and entries behind those that the positions make stand for nothing.
        """
        first, count = self.offset, rows.shape[1]
        if sees_capacity(count) and not self.empty():  # as in the compiled step
            self.reserve(1)
            stand_in = cast(EntriesKind, self.traced(1))(*self.step_arrays(), mx.array(first), None, None)
            found = stand_in.absorb(rows, make, kernels)
            self.take_step(stand_in.arrays)
            return found
        newest = of_kind(self.append_rows(leave(rows)[:, None]), rows)[:, 0]
        begin, ratio = first + count - newest.shape[1], self.part.ratio
        start, stop = self.entries_of(first), self.entries_of(first + count)
        if start < stop:
            before = self.part.overlap if start else 0
            entries = make(newest[:, start * ratio - before - begin : stop * ratio - begin], start, stop - start)
            self.put_entries(leave(entries)[:, None], start)
        places = library_of(rows).arange(begin, first + count)
        return newest, places, of_kind(self.values, rows)[:, 0, :stop] if stop else None

    def whole(self, length: int) -> int:
        """How many of the next `length` tokens attend to all entries that they see."""
        return int(self.part.seeing_all(self.offset, length))

    def reserve(self, n: int) -> None:
        """Makes room for the entries of n more positions."""
        if self.part.ratio:
            assert self.keys is not None
            made, wanted = self.entries_of(self.offset), max(self.entries_of(self.offset + n), 1)
            shape = self.keys.shape[0], 1, wanted - made, self.part.entry
            self.values = grown(self.values, shape, self.keys.dtype, made, wanted, self.step)

    def traced(self, n: int) -> EntriesKind | None:
        """A function that makes the traced stand-in for the next n tokens; None if only some of them see all entries,
        or if several would make the first entry.
        """
        made, whole = [self.entries_of(self.offset + i) for i in range(n + 1)], self.whole(n)
        is_first = made[0] == 0 < made[n]
        if 0 < whole < n or (is_first and n > 1):
            return None
        return EntriesKind(self.part, tuple(one < after for one, after in pairwise(made)), is_first, whole > 0)

    def step_arrays(self, n: int = 1) -> list[mx.array | None]:
        """The arrays of the traced stand-in for the next n tokens."""
        return [self.keys, self.values] if self.part.ratio else [self.keys]

    def take_step(self, arrays: list[mx.array]) -> None:
        """Takes the arrays after the step."""
        self.offset += 1
        self.keys, *entries = arrays
        self.values = entries[0] if entries else None

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
