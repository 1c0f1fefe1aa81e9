"""Experts that are all read once, at loading, and stay in memory.

This source is for files that cannot be mapped, because experts are stored in pieces, and for callers that want the
files closed.
"""

import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.pieces import ExpertFiles, runs_of
from ..ops import backend
from .files import OpenFiles, Preadv, ReadShare
from .memory import adopt, on_device, page_aligned
from .reader import DEFAULT_WORKERS, shares_of
from .source import IoMode
from .whole import WholeExperts

PORTION_BYTES = 32 << 20  # bytes of a portion of a layer; while one portion is read, the next ones are prepared
TOUCHED_BYTES = 16 << 20  # bytes of fresh memory that a thread clears at a time
BATCH_BYTES = 4 << 20  # bytes for a thread that makes several reads at once

ReadProgress = Callable[[int, int], object]
WordsCheck = Callable[[int, int, np.ndarray], None]
T = TypeVar("T")


class Portion(NamedTuple):
    """Experts [first, stop) of a layer, and the whole layer's memory [experts, words]."""

    layer: int
    rows: np.ndarray
    first: int
    stop: int

    @property
    def records(self) -> np.ndarray:
        """[stop - first, words]"""
        return self.rows[self.first : self.stop]

    @property
    def is_last(self) -> bool:
        """Whether this is the layer's last portion."""
        return self.stop == len(self.rows)


Portions = Generator[Portion, None, None]


class ResidentExperts(WholeExperts):
    """Args:
        files: the files of the experts; they are closed when everything has been read.
        decision: one line that says why all experts are kept in memory.
        check: called with records (layer, first expert, [experts, words]) after they have been read.
        arrange: called likewise before `check`, to bring what was read to its form.
        progress: called with the bytes read so far and the total.
        direct, preadv: as for `OpenFiles`.

    Raises:
        ExpertIOError: a file cannot be read, or Metal refuses the memory. Errors of `check`.
    """

    mode = IoMode.RESIDENT

    def __init__(
        self,
        files: ExpertFiles,
        decision: str = "",
        *,
        check: WordsCheck | None = None,
        arrange: WordsCheck | None = None,
        progress: ReadProgress | None = None,
        direct: bool = True,
        preadv: Preadv = os.preadv,
    ):
        super().__init__(files.layout, decision)
        report = progress or (lambda done, total: None)
        with (
            closing(OpenFiles(files.sizes, direct=direct, preadv=preadv)) as opened,
            closing(_read(files, opened, report)) as portions,
        ):
            for portion in portions:
                for use in (arrange, check):
                    if use is not None:
                        use(portion.layer, portion.first, portion.records)
                if portion.is_last:
                    self.add(portion.layer, kept(portion.rows))
            self.note = opened.note


def kept(rows: np.ndarray) -> np.ndarray | mx.array:
    """The layer as kernels read it: the memory itself, or a copy on a device with its own memory."""
    if not backend.has_kernels():
        return rows
    return adopt(rows, "a layer of experts") if backend.name() == "metal" else on_device(rows)


def _read(files: ExpertFiles, opened: OpenFiles, progress: ReadProgress) -> Portions:
    """Yields all layers in filled portions; up to a layer of the following ones is being read meanwhile."""
    done, total = 0, sum(record.size * files.layout.count(layer) for layer, record in files.layout.records.items())
    pool, is_over = ThreadPoolExecutor(DEFAULT_WORKERS, "expert-loader"), False

    def begin(portion: Portion) -> tuple[Portion, list[Future[int]]]:
        target = portion.rows.reshape(-1).view(np.uint8).data
        return portion, [pool.submit(opened.read_all, share, target) for share in _shares(files, opened, portion)]

    portions = _portions(files)
    try:
        for portion, reads in begun_ahead(map(begin, portions), _portions_of_a_layer(files)):
            for read in reads:
                done += _came(read, portion.layer)
                progress(min(done, total), total)
            yield portion
        is_over = True
    finally:
        portions.close()
        # A thread that ends releases its queue, which takes 30 ms; wait for it only if it may still read.
        pool.shutdown(wait=not is_over, cancel_futures=True)


def begun_ahead(every: Iterable[T], count: int) -> Iterator[T]:
    """Yields the same items, but each one only after the `count` items behind it have begun."""
    begun: deque[T] = deque()
    for item in every:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _came(read: "Future[int]", layer: int) -> int:
    """The bytes of a finished read."""
    try:
        return read.result()
    except OSError as error:
        raise ExpertIOError(f"reading the experts of layer {layer} failed: {error}") from error


def _portions_of_a_layer(files: ExpertFiles) -> int:
    """The number of portions, the same for each layer."""
    layout = files.layout
    wanted = max(-(-layout.count(i) // max(PORTION_BYTES // one.stride, 1)) for i, one in layout.records.items())
    return min(wanted, *map(layout.count, layout.records))


def _portions(files: ExpertFiles) -> Portions:
    """Yields portions in cleared memory; if they are copied to a device, two layers' memory is used in turns."""
    layout, number = files.layout, _portions_of_a_layer(files)
    largest = layout.largest_layer // 4
    places = [page_aligned(1, largest).reshape(-1) for _ in range(2)] if backend.name() == "cuda" else []

    def every() -> Portions:
        for i, (layer, record) in enumerate(layout.records.items()):
            count, words = layout.count(layer), record.stride // 4
            room = page_aligned(count, words) if not places else places[i % 2][: count * words].reshape(count, words)
            cuts = [part * count // number for part in range(number + 1)]
            yield from (Portion(layer, room, first, stop) for first, stop in itertools.pairwise(cuts))

    return every() if places else touched(every())


def touched(every: Iterable[Portion]) -> Portions:
    """Yields memory whose pages several threads have touched, so that the system has cleared them; the next piece is
    prepared meanwhile.

    Reading threads would touch the pages as they go, but when two of them reach the same large page at once, both clear
    one (results.tsv, "load"). The first piece is left to them, because nothing could be read meanwhile.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, DEFAULT_WORKERS), "expert-memory") as pool:

        def begin(at: int, portion: Portion) -> tuple[Portion, list[Future[None]]]:
            memory = portion.records.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
            step = TOUCHED_BYTES // mmap.PAGESIZE
            parts = [memory[i : i + step] for i in range(0, len(memory) if at else 0, step)]
            return portion, [pool.submit(part.fill, 0) for part in parts]

        for portion, touches in begun_ahead(itertools.starmap(begin, enumerate(every)), 1):
            wait(touches)
            yield portion


def _shares(files: ExpertFiles, opened: OpenFiles, portion: Portion) -> list[ReadShare]:
    """The reads of a portion in file order, divided among threads."""
    stride, experts = portion.rows.strides[0], range(portion.first, portion.stop)
    pieces = [piece.moved(expert * stride) for expert in experts for piece in files.pieces(portion.layer, expert)]
    runs = runs_of(pieces, portion.stop * stride, opened.run_bytes)
    return [opened.share(some) for some in (shares_of(runs, BATCH_BYTES) if opened.reads_at_once else zip(runs))]
