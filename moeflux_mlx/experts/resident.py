"""Experts that are read once, all of them, into memory of their own; nothing is ever evicted.

It is for files that cannot be mapped, because experts lie in pieces in them, and for whoever wants the files closed.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.pieces import ExpertFiles, Run, runs_of
from ..ops import backend
from .files import OpenFiles, Preadv
from .memory import adopt, on_device, page_aligned
from .reader import DEFAULT_WORKERS
from .source import IoMode
from .whole import WholeExperts

Progress = Callable[[int, int], object]
Check = Callable[[int, np.ndarray], None]


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
    layout, memory = files.layout, _memory(files)
    done, waiting = 0, deque[tuple[int, np.ndarray, list[Future[int]]]]()
    total = sum(record.size for record in layout.records.values()) * layout.num_experts
    with ThreadPoolExecutor(DEFAULT_WORKERS, "expert-loader") as pool:
        try:
            for layer in (*layout.moe_layers, None):
                if layer is not None:
                    rows = next(memory)
                    target = rows.reshape(-1).view(np.uint8).data
                    reads = [pool.submit(opened.read, run, target) for run in _runs(files, layer)]
                    waiting.append((layer, rows, reads))
                while len(waiting) > (layer is not None):
                    ready, filled, reads = waiting.popleft()
                    for read in reads:
                        done += _came(read, ready)
                        progress(min(done, total), total)
                    yield ready, filled
        finally:
            pool.shutdown(cancel_futures=True)


def _came(read: "Future[int]", layer: int) -> int:
    """Bytes that a finished read brought."""
    try:
        return read.result()
    except OSError as error:
        raise ExpertIOError(f"reading the experts of layer {layer} failed: {error}") from error


def _memory(files: ExpertFiles) -> Iterator[np.ndarray]:
    """For one layer after the other; where it is copied to a device, two places in turn."""
    layout = files.layout
    shared: list[np.ndarray] = []
    if backend.name() == "cuda":
        shared = [page_aligned(1, layout.largest_layer // 4) for _ in range(2)]
    for i, layer in enumerate(layout.moe_layers):
        words = layout.layer_bytes(layer) // 4
        memory = shared[i % 2][0, :words] if shared else page_aligned(1, words)
        yield memory.reshape(layout.num_experts, -1)


def _runs(files: ExpertFiles, layer: int) -> list[Run]:
    """The reads of a whole layer, in the order of its files."""
    layout = files.layout
    stride = layout.records[layer].stride
    experts = range(layout.num_experts)
    pieces = [piece.moved(expert * stride) for expert in experts for piece in files.pieces(layer, expert)]
    return runs_of(pieces, layout.layer_bytes(layer))
