"""The rows of a step, each with the cache that absorbs it. Operations with a state take the rows one after the
other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .backend import Array, library_of


@dataclass(frozen=True)
class RowCaches:
    """Replaces one layer's cache if the rows [1, R, ...] belong to several sequences, or several to one.

    Args:
        caches: the cache of each row, in order; the rows of one sequence are consecutive and have the same cache.
        begin: called with the number of a row before its cache absorbs it.
    """

    caches: Sequence[Any]
    begin: Callable[[int], None]

    def each(
        self,
        compute: Callable[[slice, Any], Array],
        together: Callable[[slice, Sequence[Any]], Array] | None = None,
        most: int = 1,
    ) -> Array:
        """Calls `compute` with each row [1, 1, ...], its place and its cache, and joins the results to [1, R, ...].
        `together` does the same for up to `most` rows of different sequences, with their places and caches.
        """
        parts = []
        for rows in self._runs(1 if together is None else most):
            for i in range(rows.start, rows.stop):
                self.begin(i)
            caches = self.caches[rows]
            if together is None or len(caches) == 1:
                parts.append(compute(rows, caches[0]))
            else:
                parts.append(together(rows, caches))
        if len(parts) == 1:
            return parts[0]
        library = library_of(parts[0])
        return library.concatenate(parts, axis=1)

    def _runs(self, most: int) -> Iterator[slice]:
        """Runs of 1, 2, 4, ... consecutive rows with different caches, at most `most`. Each number of rows needs its
        own compiled kernel, and a new number should not appear whenever a sequence joins.
        """
        start, count = 0, len(self.caches)
        while start < count:
            alike = next((i for i in range(start + 1, count) if self.caches[i] in self.caches[start:i]), count)
            size = 1 << (min(most, alike - start).bit_length() - 1)
            yield slice(start, start + size)
            start += size
