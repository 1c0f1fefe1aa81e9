"""The rows of a step: for each the caches of its sequence. An operation says which of them it computes together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import mlx.core as mx

from . import backend
from .backend import AnyArray, Array, library_of

# Rows of a step that share a launch, if each has its own arrays: Metal gives a kernel at most 31 arrays.
TOGETHER = {"metal": 4, "cuda": 8}
# What a sequence has for one part of a layer: its cache, or that cache's traced stand-in. Each operation says what it
# needs of its own, as `positions.Positions` does for attention.
AnyCache: TypeAlias = Any
RowArgument: TypeAlias = Any  # of an operation's `plan_row`: what the launches of one row depend on
BeginRow = Callable[[int], None]


@dataclass(frozen=True)
class RowSizes:
    """What the launches for some rows depend on.

    Args:
        count: how many rows there are.
        in_order: whether they are tokens of one sequence.
        widths: values from one row to the next in each input that has all of them; of a lone row none.
    """

    count: int = 1
    in_order: bool = False
    widths: tuple[int, ...] = ()


ALONE = RowSizes()


@dataclass(frozen=True)
class StepRows:
    """Replaces one cache of a layer if the rows [1, R, ...] belong to several sequences, or several to one.

    Args:
        caches: the cache of each row, in order; the rows of one sequence are consecutive and have the same cache.
        begin: called with the number of a row before its cache absorbs it.
        first: the number of the first row.
        joined: a state whose arrays [R, ...] hold those of all rows, in place of the caches', of R sequences.
    """

    caches: Sequence[AnyCache]
    begin: BeginRow = lambda row: None
    first: int = 0
    joined: AnyCache | None = None

    @property
    def in_order(self) -> bool:
        """Whether these are several rows of one sequence; of some that are computed together, all are or none."""
        return len(self.caches) > 1 and self.caches[0] is self.caches[1]

    @property
    def sequences(self) -> Sequence[AnyCache]:
        """The cache of each sequence of rows that are computed together, or what they have instead of caches."""
        if self.joined is not None:
            return [self.joined]
        return self.caches[:1] if self.in_order else self.caches

    def sizes(self, widths: Sequence[int]) -> RowSizes:
        """The sizes of rows that are computed together; `widths`: as of `RowSizes`, unless there is only one row."""
        return ALONE if len(self.caches) == 1 else RowSizes(len(self.caches), self.in_order, tuple(widths))

    def absorbing(self) -> Iterator[AnyCache]:
        """Yields the cache that is to absorb each row, of rows that are computed together; if they are `joined`, what
        is to absorb all."""
        if self.joined is not None:
            yield self.joined
            return
        for i, cache in enumerate(self.caches):
            if i and self.in_order:
                self.begin(self.first + i)
            yield cache

    def absorb(self, arrays: Sequence[mx.array]) -> None:
        """Has each sequence take its row of arrays [R, ...], their states after one token more of each."""
        whole = len(self.sequences) == 1
        for i, state in enumerate(self.absorbing()):
            state.absorb(arrays if whole else [array[i : i + 1] for array in arrays], 1)

    @property
    def cache(self) -> AnyCache:
        """The cache of the only sequence."""
        (one,) = self.sequences
        return one

    def each(
        self,
        parts: Sequence[Array | None],
        compute: Callable[..., AnyArray],
        together: bool = False,
        in_order: bool = False,
    ) -> AnyArray:
        """The results of all rows, [1, R, ...].

        Args:
            parts: arrays [1, R, ...], or None in place of some.
            compute: (rows, *parts) -> their results.
            together: whether it takes rows of several sequences; else, one row.
            in_order: whether it then also takes several rows of one sequence.
        """
        if self.joined is not None:
            return compute(self, *parts)
        results = []
        for run in self._runs(TOGETHER[backend.name()] if together else 1, together and in_order):
            rows = StepRows(self.caches[run], self.begin, run.start)
            for i in range(run.start, run.start + len(rows.sequences)):
                self.begin(i)
            results.append(compute(rows, *(None if part is None else part[:, run] for part in parts)))
        return results[0] if len(results) == 1 else library_of(results[0]).concatenate(results, axis=1)

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


def begin_row(rows: Sequence[StepRows], i: int) -> list[AnyCache]:
    """Begins a row in all caches of a layer, and returns the caches of its sequence."""
    for one in rows:
        one.begin(i)
    return [one.caches[i] for one in rows]


def each_alone(rows: Sequence[StepRows], parts: Sequence[Array], compute: Callable[..., AnyArray]) -> Array:
    """The results of all rows [1, R, ...], computed one by one.

    Args:
        rows: for each cache of a layer.
        parts: arrays [1, R, ...].
        compute: (the number of the row, the caches of its sequence, *its parts) -> its results.
    """
    results = [
        compute(i, begin_row(rows, i), *(part[:, i : i + 1] for part in parts)) for i in range(len(rows[0].caches))
    ]
    return results[0] if len(results) == 1 else library_of(results[0]).concatenate(results, axis=1)


def as_rows(states: Sequence[Sequence[mx.array]]) -> Sequence[mx.array]:
    """The arrays [1, ...] of each of R states as the rows of arrays [R, ...]; those of a single one as they are."""
    return states[0] if len(states) == 1 else [mx.concatenate(list(parts)) for parts in zip(*states, strict=True)]
