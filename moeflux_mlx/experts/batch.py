"""Several reads at once, with Linux's asynchronous direct I/O in native code.

When a call returns, no read is in progress. A read that fails or is short is reported, and its bytes are not moved. If
the extension is not built, or the system does not support such reads, there is no queue, and the caller uses another
way of reading. A queue serves one thread.
"""

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..formats.packed import FilePiece, Run
from ..installation import module_if_here

RUN_NUMBERS, PIECE_NUMBERS = 6, 3  # the native code's fields of each


extension = module_if_here("moeflux_mlx.experts._reads")


def available() -> bool:
    """Whether the extension was built."""
    return extension is not None


class Queue:
    """A queue of reads. Only to be made if `available()`. Raises OSError: the system refuses another queue."""

    def __init__(self) -> None:
        assert extension is not None
        self._native, self._queue = extension, extension.queue()

    def read(
        self, files: "array[int]", numbers: bytes, target: memoryview, scratch: memoryview
    ) -> tuple[int, list[int]]:
        """Reads the pieces of some runs into their places in `target`.

        Args:
            files: the descriptors that `numbers` point to.
            numbers: the runs, as `encode` writes them.
            scratch: memory for the windows of unaligned runs; its size limits how many are read together.

        Returns:
            The bytes read for runs whose pieces are in place, and the indices of the failed runs.
        """
        nbytes, others = self._native.read(self._queue, files, target, scratch, numbers)
        return nbytes, others


def encode(runs: Sequence[Run], files: Mapping[Path, int]) -> bytes:
    """Encodes `runs` for the native code, with file numbers; small enough to be kept for every expert."""
    numbers: list[int] = []
    for run in runs:
        first, last = run.window
        place = run.pieces[0].place if run.is_aligned else -1
        numbers += (files[run.path], first, last - first, run.stop - first, place, len(run.pieces))
        for piece in run.pieces:
            numbers += (piece.offset - first, piece.place, piece.length)
    return array("q", numbers).tobytes()


def decode(numbers: bytes, paths: Sequence[Path]) -> list[Run]:
    """The runs that `encode` wrote."""
    values, runs, at = array("q", numbers), [], 0
    while at < len(values):
        file, first, _, needed, place, count = values[at : at + RUN_NUMBERS]
        at += RUN_NUMBERS
        stop = at + PIECE_NUMBERS * count
        some = [values[i : i + PIECE_NUMBERS] for i in range(at, stop, PIECE_NUMBERS)]
        pieces = tuple([FilePiece(paths[file], first + start, length, goal) for start, goal, length in some])
        runs.append(Run(paths[file], pieces[0].offset, first + needed, pieces, is_aligned=place >= 0))
        at = stop
    return runs
