"""Several reads at once, through Linux's asynchronous direct I/O in native code.

It promises that when a call returns nothing is read any more, and that a read that fails or falls short is told and
moves nothing. Where the extension is not built, or the system has no such reads, there is no queue: whoever wants one
reads in another way. A queue serves one thread.
"""

import importlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ..formats.pieces import Run

MOST_READS = 32  # that the native code takes in one call


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("moeflux_mlx.experts._reads")
    except ImportError:
        return None


_reads = _load()


def available() -> bool:
    """Whether the extension was built."""
    return _reads is not None


class Queue:
    """Raises OSError: the system has no asynchronous reads, or no more of them. Only where they are `available`."""

    def __init__(self) -> None:
        assert _reads is not None
        self._native, self._queue = _reads, _reads.queue()

    def read(
        self, files: Mapping[Path, int], runs: Sequence[Run], target: memoryview, scratch: memoryview
    ) -> list[int]:
        """Brings the pieces of `runs` to their places in `target`.

        Returns:
            For each run the bytes that came, or minus an errno. Where they reach the run's end its pieces are in place.
        """
        numbers: list[int] = []
        for run in runs:
            first, last = run.window
            place = run.pieces[0].place if run.is_aligned else -1
            numbers += (files[run.path], first, last - first, run.stop - first, place, len(run.pieces))
            for piece in run.pieces:
                numbers += (piece.offset - first, piece.place, piece.length)
        found: list[int] = self._native.read(self._queue, target, scratch, array("q", numbers))
        return found


def batches_of(runs: Sequence[Run], room: int) -> Iterator[list[Run]]:
    """The runs in groups of which each may be one call: what is not read to its place fits scratch memory of `room`."""
    batch: list[Run] = []
    held = 0
    for run in runs:
        first, last = run.window
        size = 0 if run.is_aligned else last - first
        if batch and (held + size > room or len(batch) == MOST_READS):
            yield batch
            batch, held = [], 0
        batch.append(run)
        held += size
    yield batch
