"""Where each row of a prompt's experts goes among the rows of MLX's products: in blocks of an expert with few rows, or
in a batched product of experts with similar row counts. The host decides by the row counts alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# An expert that fills less than an eighth of a block is multiplied row by row: a block has the arithmetic of all of its
# rows, in whose time an Apple GPU reads an expert of 4 bits about four times (computed from bandwidths and rates).
LEAST_FILLED = 8
STEPS, LEAST_STEP = 4, 32  # rows are padded to one of this many sizes per doubling, at least this far apart
NO_OWNERS = np.zeros(0, np.uint32)

# The bits of a batched product may depend on its size, so each of several processes uses the sizes of a single one: for
# each wave, the rows of all its experts, and which experts are the process's own.
Among = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Experts of one wave that are multiplied in the same way.

    Args:
        experts: their indices in the wave.
        rows: number of places of each; 0: as many as needed, in blocks.
        block: rows of a block.
        start: the place of their first row among all places.
        owners: where `rows` is 0, each block's number among `experts`.
        seats: the index of each among the experts that a single process would multiply together.
        size: the number of these.
    """

    experts: slice
    rows: int
    block: int
    start: int
    owners: np.ndarray
    seats: np.ndarray
    size: int

    def parts(self, most: int) -> Iterator[tuple[slice, int]]:
        """The groups of at most `most` experts that are multiplied together, with the size of their product."""
        for first in range(0, self.size, max(most, 1)):
            last = min(first + max(most, 1), self.size)
            begin, end = np.searchsorted(self.seats, [first, last]).tolist()
            if begin < end:
                yield slice(begin, end), last - first


def arrange(
    waves: Sequence[np.ndarray], block: int, dense: int, among: Sequence[Among] | None = None
) -> tuple[list[list[Batch]], np.ndarray, np.ndarray]:
    """Assigns to each row, sorted by wave and expert, its place among the rows of the products.

    Args:
        waves: for each wave the row counts of its experts, preferably with similar counts next to each other.
        block: the rows that a product with codes takes at a time, if the expert has enough of them.
        dense: the number of rows from which an expert is dequantised.
        among: as `GroupedRows` has it.

    Returns:
        The batches of each wave; each row's place, int32 [N]; the row at each place, int32 [P]: surplus places of an
        expert repeat its first row.
    """
    counts = np.concatenate(waves)
    sizes = sizes_of(counts, block, dense)
    taken = np.where(sizes > 0, sizes, counts - counts % sizes)  # whole blocks: a remainder is at most 0
    first = np.cumsum(taken) - taken  # the first of each expert's places
    batches, start = [], 0
    for i, wave in enumerate(waves):
        part = slice(start, start + len(wave))
        every, own = (wave, np.arange(len(wave))) if among is None else among[i]
        runs = np.cumsum(np.diff(sizes_of(every, block, dense), prepend=0) != 0)  # neighbours of one size
        batches.append(list(_batches(sizes[part], taken[part], int(first[start]), runs, own)))
        start = part.stop
    counts, taken, first = (array.astype(np.int32) for array in (counts, taken, first))
    begin = np.cumsum(counts, dtype=np.int32) - counts  # the first of each expert's rows
    own = np.arange(counts.sum(), dtype=np.int32) + np.repeat(first - begin, counts)
    local = np.arange(taken.sum(), dtype=np.int32) - np.repeat(first, taken)
    source = np.where(local < np.repeat(counts, taken), local, 0) + np.repeat(begin, taken)
    return batches, own, source


def _batches(sizes: np.ndarray, taken: np.ndarray, start: int, runs: np.ndarray, own: np.ndarray) -> Iterator[Batch]:
    """One batch for each of the `runs` of a single process that contains some of the experts `own`."""
    cuts = [0, *(np.flatnonzero(np.diff(runs[own])) + 1).tolist(), len(sizes)]
    for one, end in pairwise(cuts):
        rows, block = max(int(sizes[one]), 0), max(-int(sizes[one]), 0)
        begin, stop = bounds_of(runs, runs[own[one]])
        owners = NO_OWNERS if rows else np.repeat(np.arange(end - one, dtype=np.uint32), taken[one:end] // block)
        yield Batch(slice(one, end), rows, block, start, owners, own[one:end] - begin, stop - begin)
        start += int(taken[one:end].sum())


def bounds_of(runs: np.ndarray, run: int) -> tuple[int, int]:
    """Where a run begins and ends among the ascending numbers of runs [N]."""
    begin, stop = np.searchsorted(runs, [run, run + 1]).tolist()
    return begin, stop


def sizes_of(counts: np.ndarray, block: int, dense: int) -> np.ndarray:
    """The number of places in a batched product for experts with these row counts; below 0: they are multiplied in
    blocks of so many rows.
    """
    blocks = np.where(counts * LEAST_FILLED < block, 1, block)
    return np.where(counts < dense, -blocks, filled(counts))


def filled(counts: np.ndarray) -> np.ndarray:
    """The sizes of batched products for these row counts."""
    power = 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
    step = np.maximum(power // (2 * STEPS), LEAST_STEP)
    return -(-counts // step) * step
