"""The rows of a step, each with the cache that absorbs it. Operations with a state take the rows one after the
other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .backend import Array, library_of

Begin = Callable[[int], None]


@dataclass(frozen=True)
class RowCaches:
    """Replaces one layer's cache if the rows [1, R, ...] belong to several sequences, or several to one.

    Args:
        caches: the cache of each row, in order; the rows of one sequence are consecutive and have the same cache.
        begin: called with the number of a row before its cache absorbs it.
    """

    caches: Sequence[Any]
    begin: Begin

    def each(
        self,
        compute: Callable[[slice, Any], Array],
        together: Callable[[slice, Sequence[Any]], Array] | None = None,
        most: int = 1,
        in_order: Callable[[slice, Any, Begin], Array] | None = None,
    ) -> Array:
        """Calls `compute` with each row [1, 1, ...], its place and its cache, and joins the results to [1, R, ...].

        Args:
            together: the same for up to `most` rows of different sequences, with their places and caches.
            in_order: the same for several rows of one sequence; it calls `begin` itself, which it is given.
        """
        parts = []
        for rows in self._runs(1 if together is None else most, in_order is not None):
            caches = self.caches[rows]
            if in_order is not None and len(caches) > 1 and caches[0] is caches[1]:
                parts.append(in_order(rows, caches[0], self.begin))
                continue
            for i in range(rows.start, rows.stop):
                self.begin(i)
            if together is None or len(caches) == 1:
                parts.append(compute(rows, caches[0]))
            else:
                parts.append(together(rows, caches))
        if len(parts) == 1:
            return parts[0]
        library = library_of(parts[0])
        return library.concatenate(parts, axis=1)

    def _runs(self, most: int, joins: bool) -> Iterator[slice]:
        """If `joins` is set, all rows of each sequence that has several. Of the others runs of 1, 2, 4, ... rows with
        different caches, at most `most`. Each number of rows needs its own compiled kernel, and a new number should not
        appear whenever a sequence joins.
        """
        count = len(self.caches)
        follows = [i > 0 and self.caches[i] is self.caches[i - 1] for i in range(count)]  # a row of the same sequence
        several = [one or other for one, other in zip(follows, [*follows[1:], False], strict=True)]
        if joins:  # cut around those sequences
            cuts = [i for i in range(1, count) if not follows[i] and (several[i] or several[i - 1])]
        else:
            cuts = [i for i in range(1, count) if follows[i]]
        for start, end in pairwise([0, *cuts, count]):
            if joins and several[start]:
                yield slice(start, end)
                continue
            while start < end:
                size = 1 << (min(most, end - start).bit_length() - 1)
                yield slice(start, start + size)
                start += size
