"""The RAM gate and the expert loader: both modes give the file's bytes, and failures are typed."""

import errno
import fcntl
import gc
import os
import tempfile
import threading
import time
import weakref
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_packed import tiny_args

from moeflux_mlx.errors import ExpertIOError, MoefluxWarning, RequestError
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.experts.staging import Staging
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.experts.whole import MappedExperts, ResidentExperts
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.ops.records import divided
from moeflux_mlx.planning.machine import from_environment, select_io_mode

EXPERTS = 6


@given(total=st.integers(0, 2**60), ram=st.integers(1, 2**60))
def test_gate_is_exact_in_integers(total, ram):
    wanted = IoMode.MMAP if total <= 3 * ram // 4 else IoMode.PREAD
    assert select_io_mode(total, ram) is select_io_mode(total, ram, "auto") is wanted


def test_gate_at_the_edge():
    assert select_io_mode(3 * 2**58, 2**60) is IoMode.MMAP
    assert select_io_mode(3 * 2**58 + 1, 2**60) is IoMode.PREAD


def test_gate_override():
    assert select_io_mode(2**60, 1, "mmap") is IoMode.MMAP
    assert select_io_mode(0, 1, "pread") is IoMode.PREAD
    with pytest.raises(RequestError, match="'fast'"):
        select_io_mode(0, 1, "fast")


def test_environment_is_the_fallback(monkeypatch):
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "pread")
    assert from_environment("auto") == "pread"
    assert from_environment("mmap") == "mmap"
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "")
    assert from_environment("auto") == "auto"
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "quick")
    with pytest.warns(MoefluxWarning, match="='quick' is not auto, mmap, pread or resident; using auto"):
        assert from_environment("auto") == "auto"
    assert from_environment("pread") == "pread"


def write_packed(folder, experts=EXPERTS):
    layout = ExpertLayout.from_args(tiny_args(experts=experts))
    rng = np.random.default_rng(1)
    packed = PackedExperts(layout, [folder])
    for layer, path in packed.paths.items():
        path.write_bytes(rng.integers(0, 256, layout.layer_bytes(layer), dtype=np.uint8).tobytes())
    return packed


def opened(packed, mode, **options):
    if mode is IoMode.PREAD:
        return StreamedExperts(packed, **options)
    return MappedExperts(packed) if mode is IoMode.MMAP else ResidentExperts(packed)


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path)


def records(packed, layer):
    return np.fromfile(packed.paths[layer], np.uint32).reshape(EXPERTS, -1)


def words_at(held, slots):
    """Returns the words [n, ...] of the records in these slots."""
    if held.in_buffers:
        places = map(divided, slots.reshape(-1).tolist())
        return np.stack([np.asarray(held.memory[buffer])[row] for buffer, row in places])
    return np.asarray(held.blob)[slots.reshape(-1)]


def blocks(lease):
    """Returns the bytes of the lease's ids in their order."""
    lease.wait()
    return words_at(*lease.records())


@pytest.mark.parametrize("mode", IoMode)
def test_leased_records_are_the_files_bytes(packed, mode):
    loader, size = opened(packed, mode, cache_bytes=1), packed.layout.record.size // 4

    @settings(max_examples=examples(30))
    @given(layer=st.sampled_from([0, 1]), ids=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8))
    def check(layer, ids):
        lease = loader.request(layer, np.array(ids, np.uint32)[None])
        assert lease.inverse.shape == (1, len(ids))
        assert np.array_equal(blocks(lease)[:, :size], records(packed, layer)[ids, :size])
        lease.release()

    check()
    loader.close()


def test_pool_counts_hits_and_evicts_the_oldest(packed):
    loader = StreamedExperts(packed, cache_bytes=1)
    blocks(loader.request(0, np.arange(EXPERTS)))
    blocks(loader.request(0, np.array([0])))  # expert 0 becomes the most recently used, expert 1 the least
    blocks(loader.request(1, np.array([0])))
    assert (loader.stats.hits, loader.stats.misses) == (1, EXPERTS + 1)
    assert loader.stats.bytes_read == (EXPERTS + 1) * loader.record_bytes
    assert loader.request(0, np.array([0])).ready.all()
    assert not loader.request(0, np.array([1])).ready.any()
    assert (loader.stats.hits, loader.stats.misses) == (2, EXPERTS + 2)
    loader.reset_stats()
    assert loader.stats.hits == loader.stats.misses == loader.stats.bytes_read == 0
    loader.close()


def test_nothing_is_read_when_everything_fits(packed):
    loader = StreamedExperts(packed, cache_bytes=packed.layout.total_bytes)
    for _ in range(3):
        for layer in (0, 1):
            blocks(loader.request(layer, np.arange(EXPERTS)))
    assert loader.stats.misses == 2 * EXPERTS and loader.stats.hits == 4 * EXPERTS
    assert loader.stats.bytes_read == 2 * EXPERTS * loader.record_bytes
    loader.close()


def test_direct_reads_take_the_stride_and_buffered_ones_the_expert(packed):
    for direct, size in ((True, packed.layout.record.stride), (False, packed.layout.record.size)):
        reader = ExpertReader(packed, direct=direct)
        assert reader.direct == direct  # the test machine's file system takes O_DIRECT
        loader = StreamedExperts(packed, reader=reader)
        got = blocks(loader.request(1, np.array([3])))[0]
        assert loader.stats.bytes_read == size
        assert np.array_equal(got[: size // 4], records(packed, 1)[3][: size // 4])
        loader.close()


def test_a_file_cut_short_while_open(packed):
    loader = StreamedExperts(packed)
    os.truncate(packed.paths[0], packed.layout.record.stride)
    assert np.array_equal(blocks(loader.request(0, np.array([0])))[0], np.fromfile(packed.paths[0], np.uint32))
    for _ in range(2):  # no incomplete record is kept
        with pytest.raises(ExpertIOError, match="expert 1 of layer 0"):
            loader.request(0, np.array([0, 1])).wait()
    blocks(loader.request(1, np.array([1])))  # the loader still serves other experts
    loader.close()


@pytest.mark.parametrize("mode", IoMode)
def test_a_closed_loader(packed, mode):
    loader = opened(packed, mode)
    lease = loader.request(0, np.array([0]))
    loader.close()
    with pytest.raises(ExpertIOError, match="closed"):
        loader.request(0, np.array([0]))
    with pytest.raises(ExpertIOError, match="closed"):
        lease.records()
    assert loader.hint([(0, 1)]) == []


def test_more_experts_than_slots(packed):
    loader = StreamedExperts(packed, cache_bytes=1, least_slots=2)
    with pytest.raises(ValueError, match="3 experts .* 2 slots"):
        loader.request(0, np.arange(3))
    loader.close()


class Faults:
    """A `preadv` whose next calls behave as requested: "short", "eintr", "eio", "einval", "slow" or None."""

    def __init__(self):
        self.plan = []

    def __call__(self, fd, buffers, offset):
        kind = self.plan.pop(0) if self.plan else None
        if kind == "eintr":
            raise InterruptedError
        if kind in ("eio", "einval"):
            number = errno.EIO if kind == "eio" else errno.EINVAL
            raise OSError(number, os.strerror(number))
        if kind == "slow":
            time.sleep(0.002)
        got = os.preadv(fd, buffers, offset)
        if kind == "short" and got > 4097:
            got, kept = 4097, 4097
            for buffer in buffers:
                buffer[kept:] = bytes(len(buffer[kept:]))
                kept = max(kept - len(buffer), 0)
        return got


@pytest.mark.parametrize("kind", ["short", "eintr", "slow"])
@pytest.mark.parametrize("direct", [True, False])
def test_recoverable_faults_do_not_change_bytes(packed, kind, direct):
    faults = Faults()
    loader = StreamedExperts(packed, reader=ExpertReader(packed, direct=direct, preadv=faults))
    faults.plan = [kind, kind]
    size = packed.layout.record.size // 4
    assert np.array_equal(blocks(loader.request(0, np.array([2])))[0, :size], records(packed, 0)[2, :size])
    loader.close()


def test_refused_direct_io_falls_back_and_is_reported(packed):
    faults = Faults()
    loader = StreamedExperts(packed, reader=ExpertReader(packed, direct=True, preadv=faults))
    faults.plan = ["einval"]
    size = packed.layout.record.size // 4
    assert np.array_equal(blocks(loader.request(0, np.array([2])))[0, :size], records(packed, 0)[2, :size])
    assert "page cache" in loader.note
    assert loader.record_bytes == packed.layout.record.size
    loader.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT to refuse")
def test_direct_io_that_is_refused_at_every_read(packed):
    """Many threads at once are refused, as on file systems that accept direct I/O when a file is opened."""

    def preadv(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(fd, buffers, offset)

    size = packed.layout.record.size // 4
    for _ in range(20):
        loader = StreamedExperts(packed, reader=ExpertReader(packed, direct=True, preadv=preadv))
        assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS)))[:, :size], records(packed, 0)[:, :size])
        assert "page cache" in loader.note and not loader.reader.direct
        loader.close()


def test_einval_from_buffered_reads_is_an_error(packed):
    faults = Faults()
    loader = StreamedExperts(packed, reader=ExpertReader(packed, direct=False, preadv=faults))
    faults.plan = ["einval"]
    with pytest.raises(ExpertIOError, match="Invalid argument"):
        loader.request(0, np.array([2])).wait()
    loader.close()


@pytest.fixture
def small(packed):
    """Returns a loader of two slots."""
    loader = StreamedExperts(packed, cache_bytes=1, least_slots=2)
    yield loader
    loader.close()


def test_a_guarded_block_is_not_overwritten_before_its_reader_is_evaluated(small):
    evaluated = Evaluated(2)
    for out in evaluated.arrays:  # two computations read the same record
        lease = small.request(0, np.array([0, 1]))
        lease.wait()
        lease.release(out)
    small.request(0, np.array([2, 3])).wait()
    assert evaluated.count() == 2


def test_a_batch_in_use_keeps_its_blocks(small):
    first = small.request(0, np.array([0]))
    second = small.request(0, np.array([1]))
    with pytest.raises(ValueError, match="1 experts .* 2 slots, 2 in use"):
        small.request(0, np.array([2]))
    with pytest.raises(RuntimeError, match="in use"):
        small.invalidate()
    del first  # forgotten ones do not count
    small.request(0, np.array([2])).wait()
    second.wait()
    second.release()


def test_a_guess_does_not_evict_its_own_records(small, packed):
    for expert in (0, 1):
        small.request(0, np.array([expert])).wait()
    assert small.hint([(0, 2), (0, 0)]) == [(0, 2)]  # 0 is the older one
    small.drain()
    lease = small.request(0, np.array([0, 2]))
    assert lease.ready.all()


def test_wrong_guesses_do_not_fill_the_pool(packed):
    loader = StreamedExperts(packed, cache_bytes=1, least_slots=4)
    for guess in (1, 2, 3, 4, 5):
        loader.request(0, np.array([0])).wait()
        loader.hint([(1, guess)])
        for key in loader.in_flight:
            loader.pools[0].get(key).read.result()
    for _ in range(2):
        lease = loader.request(0, np.arange(4))
        lease.wait()
        lease.release()
    assert lease.ready.all()
    assert loader.stats.wasted >= 3
    loader.close()


def test_demoted_blocks_give_way_first(small):
    for expert in (0, 1):
        small.request(0, np.array([expert])).wait()
    small.give_way(0, [1, 5])
    small.request(0, np.array([2])).wait()
    assert small.request(0, np.array([0])).ready.all()


def read(loader, *ids):
    """Returns whether each record was in memory."""
    lease = loader.request(0, np.array(ids))
    lease.wait()
    lease.release()
    return lease.ready


def test_whether_a_call_fills_a_pool(packed):
    layer = packed.layout.moe_layers[0]
    loader, filled = StreamedExperts(packed, cache_bytes=3 * packed.layout.record.stride, least_slots=2), []
    for ids in ([0, 1], [0, 1], [2], [3], [4, 5]):
        with loader.turn(1), loader.request(layer, np.array(ids)) as lease:
            lease.wait()
        filled.append(loader.is_filling)
    loader.close()
    assert filled == [True, False, True, False, False]


def test_a_full_pool_does_not_fill_again_where_a_guess_was_dropped(packed):
    blocked = threading.Event()
    preadv = lambda *given: (blocked.wait(), os.preadv(*given))[1]  # noqa: E731
    reader = ExpertReader(packed, preadv=preadv, workers=1)
    stride, layer = packed.layout.record.stride, packed.layout.moe_layers[0]
    loader = StreamedExperts(packed, cache_bytes=3 * stride, least_slots=1, reader=reader)
    blocked.set()
    for one in range(4):
        with loader.turn(1), loader.request(layer, np.array([one])) as lease:
            lease.wait()
    blocked.clear()
    loader.hint([(layer, 4), (layer, 5)])  # the thread waits in the first of them
    loader.hint([])
    blocked.set()
    with loader.turn(1), loader.request(layer, np.array([0])) as lease:
        lease.wait()
    assert not loader.is_filling
    loader.resize(loader.pool_bytes)
    loader.close()


def test_records_read_only_for_rejected_rows_are_evicted_first(packed):
    loader = StreamedExperts(packed, cache_bytes=4 * packed.layout.record.stride, least_slots=4)
    read(loader, [0, 3])
    read(loader, [0, 2], [3, 1], [1, 2])
    loader.take_back(1)  # 1 was read for the others alone; 3 was there before, 2 is the first row's too
    read(loader, [4])
    assert read(loader, [0, 2, 3]).all()
    loader.close()


def test_blocks_copied_to_a_device(packed):
    """As on CUDA, each record has an array, and a staging row is free again once it is copied."""
    loader = StreamedExperts(packed, cache_bytes=1 << 20, least_slots=2, copied=True)
    assert len(loader.pools[0].places.rows) == 4 < loader.slots == 2 * EXPERTS
    for _ in range(2):
        for start in range(0, EXPERTS, 2):
            lease = loader.request(1, np.array([start, start + 1, start]))
            assert np.array_equal(blocks(lease), records(packed, 1)[[start, start + 1, start]])
            assert lease.records()[0].blob.shape[0] == 2
    assert loader.stats.hits == EXPERTS
    loader.close()


def copying(packed):
    """Returns a loader as on CUDA that has used some records."""
    loader = StreamedExperts(packed, cache_bytes=1, least_slots=4, copied=True)
    blocks(loader.request(0, np.arange(4)))
    return loader, loader.pools[0]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_an_interrupted_copy_frees_each_row_once(packed, n, monkeypatch):
    loader, pool = copying(packed)
    right, calls = mx.eval, []

    def interrupted(*arrays):
        calls.append(arrays)
        if len(calls) == n + 1:
            raise KeyboardInterrupt
        right(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.finish_copies()
    for start in (2, 1, 0):
        wanted = np.arange(start, start + 4)
        assert np.array_equal(blocks(loader.request(1, wanted)), records(packed, 1)[wanted])
    rows = pool.places.free + [slot.row for slot in pool.staging.copying.values()]
    assert len(set(rows)) == len(rows) <= len(pool.places.rows)
    loader.close()


def test_after_a_failed_copy_the_record_can_be_requested_again(packed, monkeypatch):
    loader, _ = copying(packed)

    def full(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_copy", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            loader.request(1, np.array([2, 5])).wait()
    assert np.array_equal(blocks(loader.request(1, np.array([2, 5]))), records(packed, 1)[[2, 5]])
    loader.close()


def test_evicted_blocks_do_not_stay_in_device_memory(packed):
    loader, pool = copying(packed)
    for layer, start in ((1, 0), (0, 2), (1, 1)):
        blocks(loader.request(layer, np.arange(start, start + 4)))
        kept = {id(pool[key].device) for key in pool.records()}
        assert {id(slot.device) for slot in pool.staging.copying.values()} <= kept
    loader.close()


def test_closing_wakes_waiting_threads(packed):
    loader = StreamedExperts(packed, copied=True, reader=ExpertReader(packed, workers=1, preadv=slow))
    lease = loader.request(0, np.arange(EXPERTS))
    waiting = threading.Thread(target=lambda: pytest.raises(ExpertIOError, lease.wait))
    waiting.start()
    loader.reader.close()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    loader.close()


def slow(fd, buffers, offset):
    time.sleep(0.02)
    return os.preadv(fd, buffers, offset)


def test_a_staging_row_is_the_same_memory_for_host_and_device():
    view, array = staging_memory(3, 1024)
    view[1] = 7
    assert np.array_equal(np.array(array), np.repeat([[0], [7], [0]], 1024, axis=1))


def test_closing_while_reads_are_under_way(packed):
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
    threads = set(threading.enumerate())
    faults = Faults()
    loader = StreamedExperts(packed, reader=ExpertReader(packed, workers=2, preadv=faults))
    faults.plan = ["slow"] * 20
    lease = loader.request(0, np.arange(EXPERTS))
    loader.hint([(1, expert) for expert in range(EXPERTS)])
    loader.close()
    with pytest.raises(ExpertIOError, match="closed"):
        lease.wait()
    assert loader.stats.bytes_read < 2 * EXPERTS * loader.record_bytes
    assert set(threading.enumerate()) == threads
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_read_that_has_ended_keeps_no_memory(packed):
    """A thread may hold the read for a moment longer, and memory that a pool gives back must be free at once."""
    reader, memory = ExpertReader(packed, workers=1, direct=False), np.zeros(packed.layout.record.size, np.uint8)
    alive, read = weakref.ref(memory), reader.prepare(0, 0, memoryview(memory))
    assert reader.submit(read).wait() is None and memory.any()
    del memory
    assert alive() is None
    reader.close()


def test_a_forgotten_loader_stops_its_threads_and_closes_its_files(packed):
    threads = set(threading.enumerate())

    def readers():
        return {one for one in set(threading.enumerate()) - threads if one.name.startswith("expert-reader")}

    loader = StreamedExperts(packed)
    loader.request(0, np.arange(EXPERTS))
    descriptors = list(loader.reader._files._descriptors)
    assert readers() and descriptors
    del loader
    gc.collect()
    assert not readers()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error(packed):
    loader = StreamedExperts(packed)
    child = os.fork()
    if child == 0:
        try:
            loader.request(0, np.array([0]))
        except ExpertIOError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(blocks(loader.request(0, np.array([0])))[0], records(packed, 0)[0])
    loader.close()


def test_any_error_in_a_thread_reaches_the_caller(packed):
    def preadv(fd, buffers, offset):
        raise ZeroDivisionError("planted")

    loader = StreamedExperts(packed, reader=ExpertReader(packed, preadv=preadv))
    for _ in range(2 * EXPERTS):
        with pytest.raises(ExpertIOError, match="planted"):
            loader.request(0, np.array([0])).wait()
    loader.close()


def test_new_bytes_after_invalidate(packed):
    loader = StreamedExperts(packed)
    old = blocks(loader.request(0, np.array([3])))[0].copy()
    with open(packed.paths[0], "r+b") as file:
        file.write(bytes(packed.layout.layer_bytes(0)))
        os.fsync(file.fileno())
    assert np.array_equal(blocks(loader.request(0, np.array([3])))[0], old)
    loader.invalidate()
    assert not blocks(loader.request(0, np.array([3]))).any()
    loader.close()


class Evaluated:
    """Lazy arrays, and how many have been evaluated: an array that is not evaluated takes no memory."""

    def __init__(self, count):
        self.size = 1 << 20
        self.arrays = [mx.full((self.size,), value, mx.uint8) for value in range(count)]
        self._before = mx.get_active_memory()

    def count(self):
        return round((mx.get_active_memory() - self._before) / self.size)


@cache
def shared_files():
    """Returns files that every run of the state machine reads, and their contents."""
    packed = write_packed(Path(tempfile.mkdtemp()))
    return packed, {layer: records(packed, layer) for layer in (0, 1)}


class LoaderMachine(RuleBasedStateMachine):
    """Compares the loader with the files themselves, with faults injected between any two calls."""

    def __init__(self):
        super().__init__()
        packed, self.truth = shared_files()
        self.faults = Faults()
        reader = ExpertReader(packed, workers=2, preadv=self.faults)
        self.loader = StreamedExperts(packed, cache_bytes=1, least_slots=4, reader=reader)

    layers = st.sampled_from([0, 1])
    some_ids = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4)

    @rule(plan=st.lists(st.sampled_from([None, "short", "eintr", "eio", "slow"]), max_size=4))
    def misbehave(self, plan):
        self.faults.plan = plan

    @rule(layer=layers, ids=some_ids)
    def acquire(self, layer, ids):
        lease = self.loader.request(layer, np.array(ids))
        try:
            got = blocks(lease)
        except ExpertIOError:
            return
        assert np.array_equal(got, self.truth[layer][ids])
        lease.release()

    @rule(layer=layers, ids=some_ids)
    def prefetch(self, layer, ids):
        self.loader.hint([(layer, expert) for expert in ids])

    @rule(layer=layers, ids=some_ids, guess=some_ids)
    def prefetch_while_in_use(self, layer, ids, guess):
        """A guess between a request and its use does not affect the request's records."""
        lease = self.loader.request(layer, np.array(ids))
        self.loader.hint([(1 - layer, expert) for expert in guess])
        try:
            got = blocks(lease)
        except ExpertIOError:
            return
        assert np.array_equal(got, self.truth[layer][ids])

    @rule()
    def drain(self):
        self.loader.drain()
        assert not self.loader.in_flight

    @rule(layer=layers, ids=some_ids)
    def demote(self, layer, ids):
        self.loader.give_way(layer, ids)

    @rule()
    def invalidate(self):
        self.loader.invalidate()
        assert not self.loader.request(0, np.array([0])).ready.any()
        self.loader.drain()

    @invariant()
    def memory_is_bounded(self):
        assert self.loader.slots == 4
        assert sum(map(len, self.loader.pools)) <= 4

    def teardown(self):
        self.faults.plan = []
        self.loader.close()


TestLoaderMachine = LoaderMachine.TestCase
TestLoaderMachine.settings = settings(max_examples=examples(30), stateful_step_count=20, deadline=None)
