"""Brings packed expert blocks into memory: mapped files, or `pread` into a pool of slots.

It knows bytes, files and which expert was used last; it does not know what a transformer is.
"""

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .errors import ExpertIOError
from .io_mode import IoMode
from .packed import PackedExperts

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass
class LoaderStats:
    """Counts since the last `reset_stats`. A hit is an expert that was in the pool when asked for."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0


@dataclass
class ExpertBatch:
    """`blob` [S, words] uint32 and, for each requested id, its row there (`slots`, int32, ids' shape)."""

    blob: mx.array
    slots: np.ndarray


class ExpertLoader:
    """Serves the experts of every MoE layer of one model.

    Args:
        packed: the opened files.
        mode: mapped, or read into a pool.
        cache_bytes: size of the pool in pread mode; at least one layer's request must fit.

    Raises:
        ExpertIOError: a read failed, a file became shorter while open, or the loader is closed.
    """

    def __init__(self, packed: PackedExperts, *, mode: IoMode, cache_bytes: int | None = None):
        self.layout = packed.layout
        self.mode = mode
        self.decision = mode.value  # one line that says why this mode; whoever chose it fills it in
        self.stats = LoaderStats()
        self._closed = False
        self._files = {layer: os.open(path, os.O_RDONLY) for layer, path in packed.paths.items()}
        self._layers: dict[int, np.ndarray | mx.array] = {}
        if mode is IoMode.MMAP:
            self._layers = {layer: self._map(fd) for layer, fd in self._files.items()}
        else:
            self._pool = SlotPool(
                cache_bytes or DEFAULT_CACHE_BYTES, self.layout.expert_stride, self.layout.num_experts
            )

    def resident(self, layer: int) -> mx.array | None:
        """The whole layer as one array [num_experts, words] that kernels can index by id, if there is one."""
        blob = self._layers.get(layer)
        return blob if isinstance(blob, mx.array) else None

    def acquire(self, layer: int, ids: np.ndarray) -> ExpertBatch:
        """The blocks of `ids` (any shape, repeats allowed), read before anything is cast or computed."""
        if self._closed:
            raise ExpertIOError("the expert loader is closed; load the model again")
        wanted, inverse = np.unique(ids, return_inverse=True)
        rows = self._layers[layer][wanted] if self.mode is IoMode.MMAP else self._from_pool(layer, wanted)
        return ExpertBatch(mx.array(rows), inverse.reshape(ids.shape).astype(np.int32))

    def reset_stats(self) -> None:
        self.stats = LoaderStats()

    def close(self) -> None:
        self._closed = True
        for fd in self._files.values():
            os.close(fd)
        self._files, self._layers = {}, {}

    def _map(self, fd: int) -> np.ndarray | mx.array:
        """The file as [num_experts, words]: adopted by Metal, copied by CUDA, left mapped for the CPU."""
        mapped = mmap.mmap(fd, self.layout.layer_bytes, prot=mmap.PROT_READ)
        rows = np.frombuffer(mapped, np.uint32).reshape(self.layout.num_experts, -1)
        if mx.default_device() == mx.gpu:
            return mx.from_dlpack(rows, copy=False) if mx.metal.is_available() else mx.array(rows)
        return rows

    def _from_pool(self, layer: int, wanted: np.ndarray) -> np.ndarray:
        """Rows of the pool, copied out in the order of `wanted`."""
        rows = np.empty((len(wanted), self.layout.words), np.uint32)
        for i, expert in enumerate(wanted.tolist()):
            slot = self._pool.find((layer, expert))
            if slot is None:
                self.stats.misses += 1
                slot = self._read(layer, expert)
            else:
                self.stats.hits += 1
            rows[i] = self._pool.rows[slot]
        return rows

    def _read(self, layer: int, expert: int) -> int:
        slot = self._pool.take()
        target, done = memoryview(self._pool.rows[slot]).cast("B"), 0
        start = expert * self.layout.expert_stride
        while done < len(target):
            try:
                got = os.preadv(self._files[layer], [target[done:]], start + done)
            except OSError as error:
                self._pool.give_back(slot)
                raise ExpertIOError(f"reading expert {expert} of layer {layer} failed: {error}") from error
            if got == 0:
                self._pool.give_back(slot)
                raise ExpertIOError(
                    f"layer {layer} ended {len(target) - done} bytes early; was its file replaced?"
                )
            done += got
        self.stats.bytes_read += done
        self._pool.put((layer, expert), slot)
        return slot


class SlotPool:
    """Page-aligned slots for expert blocks, reused in least-recently-used order."""

    def __init__(self, cache_bytes: int, stride: int, least: int):
        slots = max(cache_bytes // stride, least)
        self._memory = mmap.mmap(-1, slots * stride)
        self.rows = np.frombuffer(self._memory, np.uint32).reshape(slots, -1)
        self._free = list(range(slots))
        self._used: OrderedDict[tuple[int, int], int] = OrderedDict()

    def find(self, key: tuple[int, int]) -> int | None:
        """The slot that holds `key` (layer, expert), which counts as a use of it."""
        slot = self._used.get(key)
        if slot is not None:
            self._used.move_to_end(key)
        return slot

    def take(self) -> int:
        """A slot that nobody holds, evicting the least recently used block if need be."""
        return self._free.pop() if self._free else self._used.popitem(last=False)[1]

    def put(self, key: tuple[int, int], slot: int) -> None:
        self._used[key] = slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
