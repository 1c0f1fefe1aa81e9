"""The rows of a step, each with the cache that absorbs it: operations with a state take them one after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .backend import Array, library_of


@dataclass(frozen=True)
class RowCaches:
    """Takes the place of one layer's cache where rows [1, R, ...] are of several sequences, or several of one.

    Args:
        caches: of each row, in order; rows of one sequence have the same one, one behind the other.
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
        """What `compute` makes of each row [1, 1, ...], given its place and its cache, joined to [1, R, ...].

        `together` does the same for up to `most` rows of different sequences, given their place and their caches.
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
        """At most so many rows with different caches, one behind the other; 1, 2, 4, ... of them.

        A kernel is compiled for each number of rows, and a number must not be the first when a sequence joins.
        """
        start, count = 0, len(self.caches)
        while start < count:
            alike = next((i for i in range(start + 1, count) if self.caches[i] in self.caches[start:i]), count)
            size = 1 << (min(most, alike - start).bit_length() - 1)
            yield slice(start, start + size)
            start += size
