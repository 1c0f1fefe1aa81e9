"""Brings packed expert blocks into memory: mapped files, or direct reads into a pool of slots.

In pread mode the pool is the only cache: least recently used blocks give way, a block that somebody may
still read does not, and reads run on worker threads while the caller computes. It knows bytes, files and
which expert was used when; it does not know what a transformer is.

Methods are called from one thread at a time: the thread that builds and evaluates MLX graphs.
"""

import mmap
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from .errors import ExpertIOError
from .io_mode import IoMode
from .layout import ExpertLayout
from .packed import PackedExperts
from .reader import DEFAULT_WORKERS, ExpertReader

DEFAULT_CACHE_BYTES = 2 << 30

Key = tuple[int, int]  # layer, expert


@dataclass
class LoaderStats:
    """Counts since the last `reset_stats`, in experts, bytes and seconds.

    A hit was in the pool when asked for; `prefetch_hits` are those that a prefetch brought. `late` are
    misses that a prefetch had already begun to read. `wasted` were read ahead and dropped unused.
    """

    hits: int = 0
    misses: int = 0
    prefetch_hits: int = 0
    late: int = 0
    prefetched: int = 0
    wasted: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass
class ExpertBatch:
    """Experts asked for together: unique `keys`, and for each requested id its place among them.

    `inverse` (int32) and `ready` (bool: in memory when asked for) have the shape of the ids.
    """

    loader: "ExpertLoader"
    keys: list[Key]
    inverse: np.ndarray
    ready: np.ndarray

    def wait(self) -> None:
        """Blocks until every expert is in memory.

        Raises:
            ExpertIOError: a read failed; no failed block is kept, the others are.
        """
        self.loader.finish(self.keys)

    def weights(self) -> "tuple[np.ndarray | mx.array, np.ndarray]":
        """(blob [S, words] uint32, slots int32 in the shape of the ids): what kernels index.

        On the CPU the blob is the mapping or the pool itself, as numpy; on a GPU an mx.array. Rows whose
        read has not finished hold anything; on CUDA call `wait` first.
        """
        blob, rows = self.loader.locate(self.keys)
        return blob, rows[self.inverse]

    def release(self, out: "mx.array | None" = None) -> None:
        """Lets the blocks be overwritten once `out`, the output of all that reads them, is evaluated.

        None means that the reading is over.
        """
        self.loader.protect(self.keys, out)


class ExpertLoader:
    """Serves the experts of every MoE layer of one model.

    Args:
        packed: the opened files.
        mode: mapped, or read into a pool.
        cache_bytes: size of the pool in pread mode.
        least_slots: blocks that one request may ask for; the pool is never smaller.
        workers: reading threads.
        reader: replaces the default reader (direct I/O), in tests.

    Raises:
        ExpertIOError: a file cannot be opened.
    """

    def __init__(
        self,
        packed: PackedExperts,
        *,
        mode: IoMode,
        cache_bytes: int | None = None,
        least_slots: int | None = None,
        workers: int = DEFAULT_WORKERS,
        reader: ExpertReader | None = None,
    ):
        self.layout = packed.layout
        self.mode = mode
        self.decision = mode.value  # one line that says why this mode; whoever chose it fills it in
        self.stats = LoaderStats()
        self._closed = False
        self._layers: dict[int, np.ndarray | mx.array] = {}
        self._pool: SlotPool | None = None
        if mode is IoMode.MMAP:
            self._layers = {layer: _map(path, self.layout) for layer, path in packed.paths.items()}
            return
        self._reader = reader or ExpertReader(packed, workers=workers)
        least = least_slots or self.layout.num_experts
        self._pool = SlotPool(self.layout, cache_bytes or DEFAULT_CACHE_BYTES, least)
        self._ahead: list[Key] = []  # the one generation of speculative reads

    @property
    def note(self) -> str:
        """What the user should know once: direct I/O was refused."""
        return self._reader.note if self._pool is not None else ""

    @property
    def record_bytes(self) -> int:
        """Bytes that reading one expert takes from the disk."""
        return self._reader.record_bytes if self._pool is not None else self.layout.expert_size

    @property
    def slots(self) -> int:
        """Blocks that the pool holds; 0 when files are mapped."""
        return 0 if self._pool is None else self._pool.slots

    @property
    def resident_blocks(self) -> int:
        return 0 if self._pool is None else len(self._pool)

    @property
    def in_flight(self) -> list[Key]:
        """Blocks whose read is under way."""
        return [] if self._pool is None else self._pool.in_flight()

    def resident(self, layer: int) -> mx.array | None:
        """The whole layer as one array [num_experts, words] that kernels can index by id, if there is one."""
        blob = self._layers.get(layer)
        return blob if isinstance(blob, mx.array) else None

    def acquire(self, layer: int, ids: np.ndarray) -> ExpertBatch:
        """Asks for the blocks of `ids` (any shape, repeats allowed); the missing ones begin to be read.

        Raises:
            ExpertIOError: the loader is closed.
            ValueError: more different experts than the pool has slots.
        """
        if self._closed:
            raise ExpertIOError("the expert loader is closed; load the model again")
        wanted, inverse = np.unique(ids, return_inverse=True)
        keys = [(layer, expert) for expert in wanted.tolist()]
        ready = np.ones(len(keys), bool) if self._pool is None else self._admit(self._pool, keys)
        inverse = inverse.reshape(ids.shape).astype(np.int32)
        return ExpertBatch(self, keys, inverse, ready[inverse])

    def prefetch(self, layer: int, ids: Sequence[int]) -> int:
        """Begins to read blocks that may be wanted next; returns how many.

        What the last prefetch queued and nobody has begun to read is dropped first. A block in use is
        never evicted for a guess.
        """
        pool = self._pool
        if pool is None or self._closed:
            return 0
        self._drop_queued(pool)
        for expert in ids:
            key = (layer, int(expert))
            if key in pool:
                continue
            slot = pool.claim(self.stats, for_guess=True)
            if slot is None:
                break
            slot.speculative = True
            slot.future = self._reader.submit(*key, pool.memory(slot), speculative=True)
            pool.put(key, slot)
            self._ahead.append(key)
        self.stats.prefetched += len(self._ahead)
        return len(self._ahead)

    def prefetch_next(self, layer: int, held: np.ndarray, ids: np.ndarray) -> None:
        """`prefetch` for blocks that will be asked for next, without evicting `held` of the same layer."""
        if self._pool is not None:
            for expert in held.tolist():
                self._pool.find((layer, expert))  # now the most recently used
            self.prefetch(layer, ids.tolist())

    def wait_for(self, layer: int) -> None:
        """Blocks until no read of `layer` is under way. Failed guesses are forgotten."""
        self._settle([key for key in self.in_flight if key[0] == layer])

    def drain(self) -> None:
        """Blocks until no read is under way. Failed guesses are forgotten."""
        self._settle(self.in_flight)

    def invalidate(self) -> None:
        """Forgets every block in the pool, so that the next request reads the files again."""
        if self._pool is not None:
            self.drain()
            self._pool.clear(self.stats)

    def reset_stats(self) -> None:
        self.stats = LoaderStats()

    def close(self) -> None:
        """Stops the threads and closes the files; whatever is asked for later raises ExpertIOError."""
        if not self._closed and self._pool is not None:
            self._reader.close()
            self._pool.clear(self.stats)
        self._closed, self._layers = True, {}

    # What a batch calls.

    def finish(self, keys: list[Key]) -> None:
        pool = self._pool
        if pool is None:
            return
        start, failure = time.perf_counter(), None
        for key in keys:
            failure = self._arrived(pool, key) or failure
        self.stats.wait_seconds += time.perf_counter() - start
        if failure is not None:
            for key in keys:
                pool.unpin(key)
            raise failure

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array, np.ndarray]:
        if self._closed:
            raise ExpertIOError("the expert loader is closed; load the model again")
        if self._pool is not None:
            return self._pool.locate(keys)
        return self._layers[keys[0][0]], np.array([expert for _, expert in keys], np.int32)

    def protect(self, keys: list[Key], out: mx.array | None) -> None:
        if self._pool is not None:
            for key in keys:
                self._pool.unpin(key, out)

    # Inside.

    def _admit(self, pool: "SlotPool", keys: list[Key]) -> np.ndarray:
        """Pins the blocks of `keys` and submits the missing reads; tells which are in memory."""
        if len(keys) > pool.slots:
            raise ValueError(f"{len(keys)} experts were asked for at once; the pool has {pool.slots} slots")
        pool.unpin_all()
        missing, ready = [], np.zeros(len(keys), bool)
        for i, key in enumerate(keys):
            slot = self._usable(pool, key)
            if slot is None:
                missing.append(key)
                continue
            pool.pin(key)
            ready[i] = slot.future is None
            self._count(slot)
        for key in missing:
            self.stats.misses += 1
            slot = pool.claim(self.stats)
            assert slot is not None  # there are at least as many slots as keys
            slot.future = self._reader.submit(*key, pool.memory(slot))
            pool.put(key, slot)
            pool.pin(key)
        return ready

    def _usable(self, pool: "SlotPool", key: Key) -> "Slot | None":
        """The block's slot, unless it is absent or its speculative read failed or was cancelled."""
        slot = pool.find(key)
        if slot is not None and slot.future is not None and slot.future.done():
            return pool.get(key) if self._arrived(pool, key) is None else None
        return slot

    def _count(self, slot: "Slot") -> None:
        if slot.future is None:
            self.stats.hits += 1
            self.stats.prefetch_hits += slot.speculative
        else:
            self.stats.misses += 1
            self.stats.late += 1
            self._reader.promote(slot.future)
        slot.speculative = False

    def _arrived(self, pool: "SlotPool", key: Key) -> ExpertIOError | None:
        """Waits for one block; a failed one is dropped and its error returned."""
        slot = pool.get(key)
        if slot is None or slot.future is None:
            return None
        try:
            self.stats.bytes_read += slot.future.result()
        except CancelledError:
            pool.drop(key)
            return ExpertIOError("the expert loader was closed while reading")
        except ExpertIOError as error:
            pool.drop(key)
            return error
        slot.future = None
        pool.arrived(slot)
        return None

    def _drop_queued(self, pool: "SlotPool") -> None:
        for key in self._ahead:
            slot = pool.get(key)
            if slot is not None and slot.speculative and slot.future is not None and slot.future.cancel():
                pool.drop(key)
                self.stats.prefetched -= 1
        self._ahead = []

    def _settle(self, keys: list[Key]) -> None:
        for key in keys:
            assert self._pool is not None
            self._arrived(self._pool, key)


@dataclass
class Slot:
    """One block in memory or on its way. `guard` must be evaluated before the memory is used again."""

    index: int
    future: "Future[int] | None" = None
    guard: mx.array | None = None
    device: mx.array | None = None
    speculative: bool = False


class SlotPool:
    """Page-aligned memory for blocks, and which block is where, in least-recently-used order.

    The CPU and Metal read the memory in place (Metal adopts it once). CUDA gets a copy of each block in
    an array of its own, because MLX would copy the whole pool if a pool array were updated.
    """

    def __init__(self, layout: ExpertLayout, cache_bytes: int, least_slots: int):
        self.slots = max(cache_bytes // layout.expert_stride, least_slots)
        self._memory = mmap.mmap(-1, self.slots * layout.expert_stride)
        self.rows = np.frombuffer(self._memory, np.uint32).reshape(self.slots, -1)
        on_gpu = mx.default_device() == mx.gpu
        self._copied = on_gpu and not mx.metal.is_available()
        self._adopted = mx.from_dlpack(self.rows, copy=False) if on_gpu and not self._copied else None
        self._free = list(range(self.slots))
        self._used: OrderedDict[Key, Slot] = OrderedDict()
        self._pinned: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def __len__(self) -> int:
        return len(self._used)

    def get(self, key: Key) -> Slot | None:
        return self._used.get(key)

    def find(self, key: Key) -> Slot | None:
        """Like `get`, and counts as a use."""
        slot = self._used.get(key)
        if slot is not None:
            self._used.move_to_end(key)
        return slot

    def put(self, key: Key, slot: Slot) -> None:
        self._used[key] = slot

    def claim(self, stats: LoaderStats, for_guess: bool = False) -> Slot | None:
        """A slot whose memory nobody reads; evicts the least recently used block if none is free.

        For a guess, None when every block is pinned or still arriving.
        """
        if self._free:
            return Slot(self._free.pop())
        idle = self._oldest(arriving=False)
        if idle is None and not for_guess:
            idle = self._oldest(arriving=True)
        if idle is None:
            return None
        old = self._used.pop(idle)
        if old.future is not None and not old.future.cancel() and old.future.exception() is None:
            stats.bytes_read += old.future.result()
        stats.wasted += old.speculative
        if old.guard is not None:
            mx.eval(old.guard)
        return Slot(old.index)

    def _oldest(self, arriving: bool) -> Key | None:
        """The least recently used block that is not pinned, among those arriving or those here."""
        for key, slot in self._used.items():
            if (slot.future is not None) == arriving and key not in self._pinned:
                return key
        return None

    def memory(self, slot: Slot) -> memoryview:
        return memoryview(self.rows[slot.index]).cast("B")

    def arrived(self, slot: Slot) -> None:
        if self._copied:
            slot.device = mx.array(self.rows[slot.index])

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array, np.ndarray]:
        """(blob, row of each key)."""
        slots = [self._used[key] for key in keys]
        if self._copied:
            copies = [slot.device for slot in slots if slot.device is not None]
            return mx.stack(copies), np.arange(len(keys), dtype=np.int32)
        blob = self.rows if self._adopted is None else self._adopted
        return blob, np.array([slot.index for slot in slots], np.int32)

    def pin(self, key: Key) -> None:
        self._pinned.add(key)

    def unpin(self, key: Key, guard: mx.array | None = None) -> None:
        slot = self._used.get(key)
        if slot is not None:
            slot.guard = guard
        self._pinned.discard(key)

    def unpin_all(self) -> None:
        self._pinned.clear()

    def drop(self, key: Key) -> None:
        self._free.append(self._used.pop(key).index)
        self._pinned.discard(key)

    def clear(self, stats: LoaderStats) -> None:
        """Forgets everything; nothing may be arriving."""
        for key, slot in list(self._used.items()):
            if slot.guard is not None:
                mx.eval(slot.guard)
            stats.wasted += slot.speculative
            self.drop(key)

    def in_flight(self) -> list[Key]:
        return [key for key, slot in self._used.items() if slot.future is not None]


def _map(path: Path, layout: ExpertLayout) -> np.ndarray | mx.array:
    """The file as [num_experts, words]: adopted by Metal, copied by CUDA, left mapped for the CPU."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), layout.layer_bytes, prot=mmap.PROT_READ)
    rows = np.frombuffer(mapped, np.uint32).reshape(layout.num_experts, -1)
    if mx.default_device() != mx.gpu:
        return rows
    return mx.from_dlpack(rows, copy=False) if mx.metal.is_available() else mx.array(rows)
