"""Brings packed expert blocks into memory: mapped files, or direct reads into a pool of slots.

In pread mode the pool is the only cache: least recently used blocks give way, a block that somebody may
still read does not, and reads run on worker threads while the caller computes. It knows bytes, files and
which expert was used when; it does not know what a transformer is.

Threads that run the model take turns (`turn`); only `prefetch`, `acquire` and what belongs to a batch are called
within one.
"""

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from ..engine.io_mode import IoMode
from ..errors import ExpertIOError
from ..formats.packed import PackedExperts
from ..formats.record import ExpertLayout
from ..ops import kernels
from ..process import check_process
from .pool import Key, Slot, SlotPool, adopt, on_device
from .reader import DEFAULT_WORKERS, ExpertReader

DEFAULT_CACHE_BYTES = 2 << 30
CLOSED = "the expert loader is closed; load the model again"
LOOK_EVERY = 0.1  # seconds between looks at the files that a GPU has adopted: a look costs as much as 60 launches


@dataclass
class LoaderStats:
    """Counts since the last `reset_stats`, in experts, bytes and seconds.

    A hit was in the pool when asked for; `prefetch_hits` are those that a prefetch brought. `late` are
    misses that a prefetch had already begun to read. `wasted` were read ahead and dropped unused.
    `wait_seconds` is what the computation waited for reads, `busy_seconds` how long the drive was reading.
    """

    hits: int = 0
    misses: int = 0
    prefetch_hits: int = 0
    late: int = 0
    prefetched: int = 0
    wasted: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    @property
    def gb_per_second(self) -> float:
        """While the drive was reading, in units of 1e9 bytes."""
        return self.bytes_read / self.busy_seconds / 1e9 if self.busy_seconds else 0.0

    def since(self, earlier: "LoaderStats") -> "LoaderStats":
        """What was counted after `earlier`, a copy of these counts."""
        before = asdict(earlier)
        return LoaderStats(**{name: value - before[name] for name, value in asdict(self).items()})


class ExpertBatch:
    """Experts asked for together: unique `keys`, and for each requested id its place among them.

    `inverse` (int32) and `ready` (bool: in memory when asked for) have the shape of the ids. The blocks stay
    where they are until `release`, or the end of a `with` block.
    """

    def __init__(self, loader: "ExpertLoader", keys: list[Key], inverse: np.ndarray, ready: np.ndarray):
        self._loader, self.keys, self.inverse, self.ready = loader, keys, inverse, ready
        self._released = False

    def wait(self) -> None:
        """Blocks until every expert is in memory.

        Raises:
            ExpertIOError: a read failed, or the loader is closed; no failed block is kept, the others are.
                The batch is released.
        """
        try:
            failures = self._loader.finish(self.keys)
        except BaseException:
            self.release()
            raise
        if failures:
            self.release()
            raise failures.pop()  # a name for it here would keep this frame, and all above it, alive

    def weights(self) -> "tuple[np.ndarray | mx.array, np.ndarray]":
        """(blob [S, words] uint32, slots int32 in the shape of the ids): what kernels index.

        On the CPU the blob is the mapping or the pool itself, as numpy; on a GPU an mx.array. Rows whose
        read has not finished hold anything; on CUDA call `wait` first.
        """
        blob, rows = self._loader.locate(self.keys)
        return blob, rows[self.inverse]

    def release(self, out: "mx.array | None" = None) -> None:
        """Lets the blocks be overwritten once `out`, the output of all that reads them, is evaluated.

        None means that the reading is over. `out` is kept while the blocks are: give a small array.
        """
        if not self._released:
            self._released = True
            self._loader.unpin(self.keys, out)

    def __enter__(self) -> "ExpertBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class ExpertLoader:
    """Serves the experts of every MoE layer of one model.

    Args:
        packed: the opened files.
        mode: mapped, or read into a pool.
        cache_bytes: size of the pool in pread mode.
        least_slots: blocks that one request may ask for; the pool is never smaller.
        buffer_bytes: of the largest array the device takes (Metal); a larger pool becomes several, each for
            some of the layers.
        workers: reading threads.
        copied: whether blocks are copied into device memory as they arrive; by default on CUDA.
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
        buffer_bytes: int | None = None,
        workers: int = DEFAULT_WORKERS,
        copied: bool | None = None,
        reader: ExpertReader | None = None,
    ):
        self.layout = packed.layout
        self.mode = mode
        self.decision = mode.value  # one line that says why this mode; whoever chose it fills it in
        self._stats, self._busy_before = LoaderStats(), 0.0
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._callers: set[int] = set()  # the first two threads that have had a turn
        self._guards: list[mx.array] = []  # given out in this turn
        self._forgetting: list[Callable[[], object]] = []
        self._files: dict[int, mmap.mmap] = {}
        self._looked = 0.0
        self._layers: dict[int, np.ndarray | mx.array] = {}
        self._pools: list[SlotPool] = []
        self._pool_of: dict[int, SlotPool] = {}
        self._ahead: list[Key] = []  # the one generation of speculative reads
        if mode is IoMode.MMAP:
            for layer, path in packed.paths.items():
                self._layers[layer], mapped = _map(path, self.layout)
                if mapped is not None:
                    self._files[layer] = mapped
            return
        self._reader = reader or ExpertReader(packed, workers=workers)
        self._stop = weakref.finalize(self, self._reader.close)
        least = least_slots or self.layout.num_experts
        self._pools = _pools(self.layout, cache_bytes or DEFAULT_CACHE_BYTES, least, buffer_bytes, copied)
        self._groups = np.array_split(np.array(self.layout.moe_layers), len(self._pools))
        self._pool_of = {layer: self._pools[i] for i, group in enumerate(self._groups) for layer in group.tolist()}

    @property
    def stats(self) -> LoaderStats:
        if self.mode is IoMode.PREAD:
            self._stats.busy_seconds = self._reader.busy_seconds - self._busy_before
        return self._stats

    @property
    def note(self) -> str:
        """What the user should know once: direct I/O was refused."""
        return self._reader.note if self.mode is IoMode.PREAD else ""

    @property
    def record_bytes(self) -> int:
        """Bytes that reading one expert takes from the disk."""
        return self._reader.record_bytes if self.mode is IoMode.PREAD else self.layout.expert_size

    @property
    def slots(self) -> int:
        """Blocks that the pool holds; 0 when files are mapped."""
        return sum(pool.slots for pool in self._pools)

    @property
    def resident_blocks(self) -> int:
        return sum(map(len, self._pools))

    @property
    def in_flight(self) -> list[Key]:
        """Blocks whose read is under way."""
        return [key for pool in self._pools for key in pool.in_flight()]

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Held by one thread for one call of the model; tells whether its results must be evaluated before it ends.

        A lazy array can be evaluated only by the thread that made it, and what a streamed call leaves lazy reads
        memory that the next call may use again. So once several threads have called, nothing is left lazy; what a
        single thread leaves is at least under way.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
        """
        self.check_process()
        self._check_open()
        if self.mode is IoMode.MMAP:
            self._look_at_files()
            yield False
            return
        with self._lock:
            self._check_open()
            if len(self._callers) < 2:
                self._callers.add(threading.get_ident())
            shared = len(self._callers) > 1
            try:
                yield shared
            finally:
                (mx.eval if shared else mx.async_eval)(self._guards)
                self._guards = []

    def _look_at_files(self) -> None:
        """Where layers are asked for one by one, each is looked at then; a GPU's compiled step asks for none."""
        now = time.monotonic()
        if self._files and now - self._looked > LOOK_EVERY and self.is_resident:
            self._looked = now
            for layer in self._files:
                self._check_length(layer)

    def check_process(self) -> None:
        """Raises ExpertIOError: this is not the process that made the loader."""
        check_process(self._process)

    def at_close(self, forget: Callable[[], object]) -> None:
        """`forget` is called by `close`: for whoever keeps something of the loader's."""
        self._forgetting.append(forget)

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertIOError(CLOSED)

    def _check_length(self, layer: int) -> None:
        """Memory behind the end of a mapped file cannot be read: the process would be killed."""
        file = self._files.get(layer)  # another thread may have closed them
        if file is not None and file.size() < self.layout.layer_bytes:
            raise ExpertIOError(
                f"the file of layer {layer} has {file.size()} of {self.layout.layer_bytes} bytes: "
                "it was cut short while in use; restore it and load the model again"
            )

    @property
    def is_resident(self) -> bool:
        """Whether every layer is one array that kernels index by id."""
        return all(self.resident(layer) is not None for layer in self.layout.moe_layers)

    def resident(self, layer: int) -> mx.array | None:
        """The whole layer as one array [num_experts, words] that kernels can index by id, if there is one."""
        blob = self._layers.get(layer)
        return blob if isinstance(blob, mx.array) else None

    def acquire(self, layer: int, ids: np.ndarray) -> ExpertBatch:
        """Asks for the blocks of `ids` (any shape, repeats allowed); the missing ones begin to be read.

        Raises:
            ExpertIOError: the loader is closed, belongs to the process that this one was forked from, or a mapped
                file has been cut short.
            ValueError: more different experts than the pool has slots that no other batch holds.
        """
        self._check_open()
        self._check_length(layer)
        wanted, inverse = np.unique(ids, return_inverse=True)
        keys = [(layer, expert) for expert in wanted.tolist()]
        inverse = inverse.reshape(ids.shape).astype(np.int32)
        ready = np.ones(len(keys), bool)
        batch = ExpertBatch(self, keys, inverse, ready)
        if self._pools:
            self._collect()
            try:
                self._admit(self._pool_of[layer], keys, ready)
            except BaseException:
                batch.release()
                raise
        batch.ready = ready[inverse]
        return batch

    def prefetch(self, layer: int, ids: Sequence[int]) -> list[int]:
        """Begins to read blocks that may be wanted next; returns the ids that were not there.

        What the last prefetch queued and nobody has begun to read is dropped first. Only what nobody holds
        and what this call does not ask for is evicted for a guess.
        """
        if self._closed or not self._pools:
            return []
        self._drop_queued()
        self._collect()
        pool = self._pool_of[layer]
        missing = [key for key in ((layer, expert) for expert in ids) if pool.find(key) is None]
        for key in missing:
            if key in pool:  # asked for twice
                continue
            slot = self._claim(pool, for_guess=True)
            if slot is None:
                break
            self._submit(pool, key, slot, speculative=True)
            self._ahead.append(key)
        self._stats.prefetched += len(self._ahead)
        return [expert for _, expert in self._ahead]

    def demote(self, layer: int, ids: Sequence[int]) -> None:
        """These blocks are the first to give way.

        A pass over all layers that is larger than the pool would otherwise leave nothing for the next one.
        """
        for expert in ids if self._pools else ():
            self._pool_of[layer].demote((layer, expert))

    def slots_per_layer(self, spare: int = 0) -> int:
        """An equal share of the pool less `spare` slots; 0 when files are mapped."""
        return min(
            (max(pool.slots - spare, 0) // len(self._groups[i]) for i, pool in enumerate(self._pools)), default=0
        )

    def wait_for(self, layer: int) -> None:
        """Blocks until no read of `layer` is under way. Failed guesses are forgotten."""
        with self._lock:
            self._settle([key for key in self.in_flight if key[0] == layer])

    def drain(self) -> None:
        """Blocks until no read is under way. Failed guesses are forgotten."""
        with self._lock:
            self._settle(self.in_flight)

    def invalidate(self) -> None:
        """Forgets every block in the pool, so that the next request reads the files again.

        Raises:
            RuntimeError: a batch has not been released.
        """
        with self._lock:
            self.drain()
            for pool in self._pools:
                if pool.pinned_besides([]):
                    raise RuntimeError("the expert pool cannot be emptied while a batch of experts is in use")
                self._empty(pool)

    def reset_stats(self) -> None:
        with self._lock:
            self._stats = LoaderStats()
            self._busy_before = self._reader.busy_seconds if self.mode is IoMode.PREAD else 0.0

    def close(self) -> None:
        """Stops the threads, closes the files, gives memory back; what is asked for later raises ExpertIOError.

        Waits for a call that another thread has under way, if experts are streamed.
        """
        with self._lock:
            if self._closed:
                return
            if self._pools:
                self._stop()
                self._settle(self.in_flight)
                for pool in self._pools:
                    self._empty(pool)
            self._closed, self._layers, self._files, self._pools = True, {}, {}, []
            for forget in self._forgetting:
                forget()
            self._forgetting = []

    # What a batch calls.

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        """Waits for the blocks; returns what went wrong, one error at most."""
        if self._closed:
            return [ExpertIOError(CLOSED)]
        if not self._pools or not keys:
            return []
        start, failures, pool = time.perf_counter(), [], self._pool_of[keys[0][0]]
        for key in self._in_turn(pool, keys):
            error = self._arrived(pool, key)
            if error is None and key not in pool:
                error = ExpertIOError(f"reading expert {key[1]} of layer {key[0]} failed")
            failures += [] if error is None else [error]
        self._stats.wait_seconds += time.perf_counter() - start
        return failures[:1]

    def locate(self, keys: list[Key]) -> tuple[np.ndarray | mx.array, np.ndarray]:
        self._check_open()
        layer = keys[0][0]
        if self._pools:
            return self._pool_of[layer].locate(keys)
        blob = self._layers.get(layer)
        if blob is None:  # closed this moment, by another thread
            raise ExpertIOError(CLOSED)
        return blob, np.array([expert for _, expert in keys], np.int32)

    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        if not self._pools:
            return
        if out is not None:
            self._guards.append(out)
        for key in keys:
            self._pool_of[key[0]].unpin(key, out)

    # Inside.

    def _admit(self, pool: SlotPool, keys: list[Key], ready: np.ndarray) -> None:
        """Pins the blocks of `keys` and submits the missing reads; tells which are in memory."""
        held = pool.pinned_besides(keys)
        for key in keys:
            pool.pin(key)
        if len(keys) + held > pool.slots:
            raise ValueError(
                f"{len(keys)} experts were asked for at once; the pool has {pool.slots} slots, {held} in use"
            )
        for i, key in enumerate(keys):
            slot = pool.find(key)
            ready[i] = slot is not None and slot.future is None
            if slot is not None:
                self._count(slot)
        for key in [key for key in keys if key not in pool]:
            self._stats.misses += 1
            slot = self._claim(pool)
            assert slot is not None  # there are at least as many slots as pinned blocks
            self._submit(pool, key, slot, speculative=False)

    def _claim(self, pool: SlotPool, for_guess: bool = False) -> Slot | None:
        """A slot whose memory nobody reads; evicts blocks if need be. None: not for a guess."""
        while (slot := pool.take()) is None:
            key = pool.victim(for_guess)
            if key is None:
                return None
            self._evict(pool, key)
        return slot

    def _evict(self, pool: SlotPool, key: Key) -> None:
        slot = pool[key]
        if slot.future is not None and slot.future.cancel():
            self._stats.prefetched -= slot.speculative
        elif self._arrived(pool, key) is not None:
            return  # the read failed, and the block with it
        else:
            self._stats.wasted += slot.speculative
        pool.drop(key)

    def _submit(self, pool: SlotPool, key: Key, slot: Slot, speculative: bool) -> None:
        slot.speculative = speculative
        slot.future = self._reader.submit(*key, pool.memory(slot), speculative=speculative)
        pool.put(key, slot)

    def _count(self, slot: Slot) -> None:
        if slot.future is None:
            self._stats.hits += 1
            self._stats.prefetch_hits += slot.speculative
        else:
            self._stats.misses += 1
            self._stats.late += 1
            self._reader.promote(slot.future)
        slot.speculative = False

    def _collect(self) -> None:
        """Takes in what has arrived, so that it counts as present and may be evicted.

        A failure that a batch will ask about stays until then.
        """
        for pool in self._pools:
            for key in pool.in_flight():
                future = pool[key].future
                if future is not None and future.done() and not (pool.pinned(key) and _failed(future)):
                    self._arrived(pool, key)

    @staticmethod
    def _in_turn(pool: SlotPool, keys: list[Key]) -> Iterable[Key]:
        """In the order in which to wait; blocks that are copied, as they arrive: copies hide behind reads."""
        if not pool.copied:
            return keys
        reads = {slot.future: key for key in keys if (slot := pool.get(key)) and slot.future}
        present = [key for key in keys if key not in reads.values()]
        return chain(present, (reads[future] for future in as_completed(reads)))

    def _arrived(self, pool: SlotPool, key: Key) -> ExpertIOError | None:
        """Waits for one block; a failed one is dropped and its error returned."""
        slot = pool.get(key)
        if slot is None or slot.future is None:
            return None
        try:
            error = slot.future.exception()  # not raised here: its traceback would keep the callers' frames
        except CancelledError:
            error = ExpertIOError("the expert loader was closed while reading")
        if error is not None:
            pool.drop(key)
            return cast(ExpertIOError, error)
        nbytes = slot.future.result()
        pool.arrived(key)
        self._stats.bytes_read += nbytes
        return None

    def _drop_queued(self) -> None:
        for key in self._ahead:
            pool = self._pool_of[key[0]]
            slot = pool.get(key)
            if slot is not None and slot.speculative and slot.future is not None and slot.future.cancel():
                pool.drop(key)
                self._stats.prefetched -= 1
        self._ahead = []

    def _settle(self, keys: list[Key]) -> None:
        for key in keys:
            self._arrived(self._pool_of[key[0]], key)

    def _empty(self, pool: SlotPool) -> None:
        for key in pool.blocks():
            self._stats.wasted += pool[key].speculative
            pool.drop(key)


def _failed(future: "Future[int]") -> bool:
    """Of a finished read."""
    return future.cancelled() or future.exception() is not None


def _pools(
    layout: ExpertLayout, cache_bytes: int, least: int, buffer_bytes: int | None, copied: bool | None
) -> list[SlotPool]:
    """One pool, or as many as keep each within `buffer_bytes`."""
    if copied is None:
        copied = kernels.backend() == "cuda"
    total = min(max(cache_bytes // layout.expert_stride, least), layout.total_bytes // layout.expert_stride)
    at_most = total if buffer_bytes is None else max(buffer_bytes // layout.expert_stride, 1)
    count = min(-(-total // at_most), max(total // least, 1), len(layout.moe_layers))
    landing = 2 * least if copied else None
    return [SlotPool(layout, total // count, landing) for _ in range(count)]


def _map(path: Path, layout: ExpertLayout) -> tuple[np.ndarray | mx.array, mmap.mmap | None]:
    """The file as [num_experts, words]: adopted by Metal, copied by CUDA, left mapped for the CPU; and the mapping
    behind it, if that is not a copy."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != layout.layer_bytes:
                raise ExpertIOError(f"{path} has no longer the {layout.layer_bytes} bytes that the layout needs")
            mapped = mmap.mmap(file.fileno(), layout.layer_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise error if isinstance(error, ExpertIOError) else ExpertIOError(f"cannot map {path}: {error}") from error
    rows = np.frombuffer(mapped, np.uint32).reshape(layout.num_experts, -1)
    if not kernels.has_kernels():
        return rows, mapped
    return (adopt(rows, f"{path} in place"), mapped) if kernels.backend() == "metal" else (on_device(rows), None)
