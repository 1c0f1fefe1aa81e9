"""Experts that are read once, all of them, into memory of their own; nothing is ever evicted.

It is for files that cannot be mapped, because experts lie in pieces in them, and for whoever wants the files closed.
"""

import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.pieces import ExpertFiles, runs_of
from ..ops import backend
from .files import OpenFiles, Preadv, Share
from .memory import adopt, on_device, page_aligned
from .reader import DEFAULT_WORKERS
from .source import IoMode
from .whole import WholeExperts

TOUCHED_BYTES = 32 << 20  # of fresh memory, at a time

Progress = Callable[[int, int], object]
Check = Callable[[int, np.ndarray], None]
T = TypeVar("T")


class ResidentExperts(WholeExperts):
    """Args:
        files: where the experts lie; they are closed once all is read.
        decision: why all are kept.
        check: looks at each layer's records, [experts, words], once they are read.
        progress: called with the bytes read so far, and in all.
        direct, preadv: as for `OpenFiles`.

    Raises:
        ExpertIOError: a file cannot be read, or memory is not taken by Metal. What `check` raises.
    """

    mode = IoMode.RESIDENT

    def __init__(
        self,
        files: ExpertFiles,
        decision: str = "",
        *,
        check: Check | None = None,
        progress: Progress | None = None,
        direct: bool = True,
        preadv: Preadv = os.preadv,
    ):
        super().__init__(files.layout, decision)
        opened = OpenFiles(files.sizes, direct=direct, preadv=preadv)
        try:
            for layer, rows in _read_layers(files, opened, progress or (lambda done, total: None)):
                if check is not None:
                    check(layer, rows)
                self._layers[layer] = _kept(rows)
            self.note = opened.note
        finally:
            opened.close()


def _kept(rows: np.ndarray) -> np.ndarray | mx.array:
    """As kernels read it: the memory itself, or a copy on a device with memory of its own."""
    if not backend.has_kernels():
        return rows
    return adopt(rows, "a layer of experts") if backend.name() == "metal" else on_device(rows)


def _read_layers(files: ExpertFiles, opened: OpenFiles, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    """Each layer's memory [experts, words], filled. While one is taken in, the next is being read."""
    done, total = 0, sum(record.size for record in files.layout.records.values()) * files.layout.num_experts
    with ThreadPoolExecutor(DEFAULT_WORKERS, "expert-loader") as pool:

        def begin(layer: int, rows: np.ndarray) -> tuple[int, np.ndarray, list[Future[int]]]:
            target = rows.reshape(-1).view(np.uint8).data
            return layer, rows, [pool.submit(opened.read_all, share, target) for share in _shares(files, opened, layer)]

        try:
            for layer, rows, reads in _one_ahead(map(begin, files.layout.moe_layers, _memory(files))):
                for read in reads:
                    done += _came(read, layer)
                    progress(min(done, total), total)
                yield layer, rows
        finally:
            pool.shutdown(cancel_futures=True)


def _one_ahead(every: Iterator[T]) -> Iterator[T]:
    """The same; each is begun before the one ahead of it is given."""
    before = next(every, None)
    for item in every:
        if before is not None:
            yield before
        before = item
    if before is not None:
        yield before


def _came(read: "Future[int]", layer: int) -> int:
    """Bytes that a finished read brought."""
    try:
        return read.result()
    except OSError as error:
        raise ExpertIOError(f"reading the experts of layer {layer} failed: {error}") from error


def _memory(files: ExpertFiles) -> Iterator[np.ndarray]:
    """For one layer after the other; where it is copied to a device, two places in turn."""
    layout = files.layout
    words = [layout.records[layer].stride // 4 for layer in layout.moe_layers]
    if backend.name() == "cuda":
        places = [page_aligned(layout.num_experts, max(words)) for _ in range(2)]
        return (places[i % 2].reshape(-1)[: layout.num_experts * n].reshape(-1, n) for i, n in enumerate(words))
    return _touched(page_aligned(layout.num_experts, n) for n in words)


def _touched(every: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Memory that the system has given and cleared, by several threads; the next while this one is being filled.

    The threads that read would have it cleared as they go, but where two of them come to one large page at once both
    clear one (results.tsv, "load"). The first is left to them: nothing could be read meanwhile.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, DEFAULT_WORKERS), "expert-memory") as pool:

        def begin(rows: np.ndarray) -> tuple[np.ndarray, list[Future[None]]]:
            memory = rows.reshape(-1).view(np.uint8)
            parts = [memory[at : at + TOUCHED_BYTES : mmap.PAGESIZE] for at in range(0, len(memory), TOUCHED_BYTES)]
            return rows, [pool.submit(part.fill, 0) for part in parts]

        first = ((rows, list[Future[None]]()) for rows in itertools.islice(every, 1))
        for rows, touches in _one_ahead(itertools.chain(first, map(begin, every))):
            wait(touches)
            yield rows


def _shares(files: ExpertFiles, opened: OpenFiles, layer: int) -> Iterator[Share]:
    """The reads of a whole layer, one after the other, in the order of its files."""
    layout = files.layout
    stride = layout.records[layer].stride
    experts = range(layout.num_experts)
    pieces = [piece.moved(expert * stride) for expert in experts for piece in files.pieces(layer, expert)]
    return (opened.share([run]) for run in runs_of(pieces, layout.layer_bytes(layer)))
