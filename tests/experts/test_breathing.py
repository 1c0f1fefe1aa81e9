"""The pool grows and shrinks while the model runs: the same bytes and bits, and memory is really returned."""

import contextlib
import os
import random
import threading
import time
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_packed import tiny_args
from test_source import EXPERTS, Evaluated, Faults, blocks, records, shared_files, words_at, write_packed
from test_streaming import TOP_K, run, streamed, tokens_of
from tiny_models import tiny_directory, tiny_model, use_plain_operations

import moeflux_mlx.experts.streamed
from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import staging
from moeflux_mlx.experts.memory import GIVES_BACK, give_back, private_pages, staging_memory
from moeflux_mlx.experts.pool import SlotPool
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.source import TooManyExpertsError
from moeflux_mlx.experts.staging import NOWHERE
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.ops import backend

pytestmark = pytest.mark.skipif(
    backend.name() == "metal" or not GIVES_BACK, reason="memory is adopted, or is not given back here"
)
ALL = 2 * EXPERTS
on_host = pytest.mark.skipif(backend.name() == "cuda", reason="CUDA keeps records elsewhere")


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path)


def breathing(packed, slots=2, **options):
    """Returns a loader of `slots` slots that may grow to all records, and its bytes per slot."""
    stride = packed.layout.record.stride
    options = {"least_slots": 2, "cache_bytes": slots * stride, "most_bytes": 1 << 30, **options}
    return StreamedExperts(packed, **options), stride


def read(loader, layer, ids):
    lease = loader.request(layer, np.array(ids))
    lease.wait()
    return lease


# Bytes.


class BreathingMachine(RuleBasedStateMachine):
    """Compares the loader with the files themselves. It is resized between any two calls, while leases are held."""

    def __init__(self, **options):
        super().__init__()
        packed, self.truth = shared_files()
        self.words = self.truth[0].shape[1]
        self.faults, self.held = Faults(), []
        reader = ExpertReader(packed, workers=2, preadv=self.faults)
        self.loader, self.stride = breathing(packed, 4, reader=reader, **options)
        self.pool = self.loader.pools[0]

    layers = st.sampled_from([0, 1])
    some_ids = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4)

    @rule(plan=st.lists(st.sampled_from([None, "short", "eintr", "eio", "slow"]), max_size=4))
    def misbehave(self, plan):
        self.faults.plan = plan

    @rule(layer=layers, ids=some_ids, keep=st.booleans())
    def acquire(self, layer, ids, keep):
        try:
            lease = read(self.loader, layer, ids)
        except (ExpertIOError, ValueError):
            return
        self.held.append((lease, *lease.records(), self.truth[layer][ids]))
        if not keep:
            self.check_held()
            self.held.pop()[0].release()

    @rule(layer=layers, ids=some_ids)
    def begin_to_read(self, layer, ids):
        """Begins a lease and releases it while its reads are in progress, without a wait."""
        with contextlib.suppress(ValueError):
            self.loader.request(layer, np.array(ids)).release()

    @rule(which=st.integers(0, 3))
    def release(self, which):
        if self.held:
            self.held.pop(which % len(self.held))[0].release(mx.zeros(1) + which)

    @rule(layer=layers, ids=some_ids)
    def hint(self, layer, ids):
        self.loader.hint([(layer, expert) for expert in ids])

    @rule(slots=st.integers(0, ALL + 2))
    def resize(self, slots):
        before, pinned = self.loader.slots, self.pool.pinned_besides([])
        reached = self.loader.resize(slots * self.stride)
        self.check_size(slots, before, pinned, reached)

    def check_size(self, slots, before, pinned, reached):
        wanted = min(max(slots, 2), ALL)
        assert wanted <= reached <= max(wanted, pinned) and self.loader.slots == reached
        if reached < before and not self.pool.copied:
            self.check_given_back()

    def check_given_back(self):
        """Checks that free rows read as zeros, and that only records that cannot be moved are beyond the limit."""
        assert not self.pool.places.rows[self.pool.places.free].any()
        for key in self.pool.records():
            moves = self.pool[key].read is None and not self.pool.pinned(key)
            assert self.pool[key].row < self.loader.slots or not moves

    @invariant()
    def check_held(self):
        for _, leased, rows, truth in self.held:
            assert np.array_equal(words_at(leased, rows)[:, : self.words], truth[:, : self.words])

    @invariant()
    def every_row_has_one_owner(self):
        assert len(self.pool) <= self.loader.slots <= ALL
        self.check_rows()

    def check_rows(self):
        slots = [self.pool[key] for key in self.pool.records()]
        used = [slot.row for slot in slots if slot.row != NOWHERE]
        assert sorted([*self.pool.places.free, *used]) == list(range(len(self.pool.places.rows)))

    def teardown(self):
        self.faults.plan = []
        self.held.clear()
        self.loader.close()


class CopyingMachine(BreathingMachine):
    """The same with records that are copied, as on CUDA."""

    def __init__(self):
        super().__init__(copied=True)


class HostMachine(BreathingMachine):
    """The same with records that stay in host memory, of which there is now more, now less."""

    def __init__(self):
        with mock.patch.object(staging, "BUFFER_BYTES", 3 * 16384):
            super().__init__(copied=True, host_bytes=ALL * 16384)
        self.words = self.loader.layout.record.size // 4  # MLX's memory is aligned to no page, so nothing more is read

    @rule(share=st.integers(0, ALL))
    def resize_host(self, share):
        with self.loader._alone():
            self.loader.reads.resize_host(share * self.stride)
        assert len(self.pool.staging.host) <= share

    @rule()
    def invalidate(self):
        if not self.held:
            self.loader.invalidate()
            assert not len(self.pool.staging.host) and not len(self.pool)

    def check_rows(self):
        slots = [self.pool[key].row for key in self.pool.records()]
        used = [row for row in slots if row != NOWHERE] + self.pool.staging.host.owned
        places = self.pool.places
        assert len(set(used)) == len(used) and not set(used) & set(places.free)
        assert {*places.staying()} <= {*used, *places.free}
        stats = self.loader.stats
        assert stats.host_hits <= stats.hits and stats.host_bytes >= stats.host_hits * self.pool.nbytes

    @invariant()
    def what_stays_is_the_files(self):
        for key, place in self.pool.staging.host.kept.items():
            truth = self.truth[key[0]][key[1], : self.words]
            assert np.array_equal(self.pool.places.row(place)[: self.words], truth)


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestBreathingMachine = BreathingMachine.TestCase
TestCopyingMachine = CopyingMachine.TestCase
TestBreathingMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestCopyingMachine.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)


def test_the_least_recently_used_go_and_the_others_stay(packed):
    loader, stride = breathing(packed, ALL)
    for layer, expert in [(0, 0), (0, 1), (1, 2), (1, 3), (0, 4), (0, 0)]:
        read(loader, layer, [expert]).release()
    assert loader.resize(3 * stride) == 3
    for layer, expert in [(1, 3), (0, 4), (0, 0)]:
        lease = read(loader, layer, [expert])
        assert lease.ready.all() and np.array_equal(blocks(lease)[0], records(packed, layer)[expert])
    assert loader.slots_per_layer() == 1
    assert loader.resize(1 << 40) == ALL
    loader.close()


@on_host
def test_what_is_leased_stays(packed):
    loader, stride = breathing(packed, ALL)
    leases = [read(loader, layer, [0, 3, 5]) for layer in (0, 1)]
    assert loader.resize(1) == 6
    for layer, lease in enumerate(leases):
        assert np.array_equal(blocks(lease), records(packed, layer)[[0, 3, 5]])
        lease.release()
    assert loader.resize(1) == 2
    loader.close()


@on_host
def test_a_leased_record_is_not_moved_and_its_memory_goes_later(packed):
    loader, stride = breathing(packed, ALL)
    pool = loader.pools[0]
    read(loader, 0, range(4)).release()
    lease = read(loader, 0, [5])
    leased, rows = lease.records()
    assert loader.resize(2 * stride) == 2 <= rows[0]
    assert np.array_equal(leased.blob[rows], records(packed, 0)[[5]])
    lease.release()
    read(loader, 1, range(2)).release()
    assert (0, 5) not in pool and not pool.places.rows[2:].any()
    loader.close()


def waiting_for(count, reads):
    while len(reads) < count:
        time.sleep(0.001)


def test_reads_under_way_are_waited_for_where_they_would_be_dropped(packed):
    begun, over = [], []

    def slow(fd, buffers, offset):
        begun.append(offset)
        time.sleep(0.1)
        over.append(offset)
        return os.preadv(fd, buffers, offset)

    loader, stride = breathing(packed, ALL, reader=ExpertReader(packed, workers=4, preadv=slow))
    loader.hint([(0, expert) for expert in range(4)])
    waiting_for(4, begun)
    assert loader.resize(2 * stride) == 2 <= len(over)
    assert np.array_equal(blocks(read(loader, 0, [2, 3])), records(packed, 0)[[2, 3]])
    loader.close()


@on_host
def test_a_record_that_is_being_read_is_not_moved(packed):
    begun, go_on = [], threading.Event()

    def held_up(fd, buffers, offset):
        begun.append(offset)
        if len(begun) == 4:
            go_on.wait(10)
        return os.preadv(fd, buffers, offset)

    loader, stride = breathing(packed, ALL, reader=ExpertReader(packed, preadv=held_up))
    for expert in range(3):
        read(loader, 0, [expert]).release()
    loader.hint([(0, 3)])
    waiting_for(4, begun)
    assert loader.resize(2 * stride) == 2
    go_on.set()
    lease = read(loader, 0, [2, 3])
    assert np.array_equal(blocks(lease), records(packed, 0)[[2, 3]])
    loader.close()


@pytest.mark.parametrize("slots, dropped, moved", [(2, 3, 1), (4, 2, 1)])
def test_a_guarded_record_is_evaluated_before_its_memory_goes(packed, slots, dropped, moved):
    """The records in the last rows are the most recently used ones, so they are moved."""
    loader, stride = breathing(packed, ALL)
    evaluated = Evaluated(4)
    leases = [read(loader, 0, ids) for ids in ([0], [1], [2, 3], [4, 5])]
    for lease, out in zip(leases, evaluated.arrays, strict=True):
        lease.release(out)
    loader._guards = []
    assert evaluated.count() == 0
    loader.resize(slots * stride)
    assert evaluated.count() == dropped + (0 if loader.pools[0].copied else moved)
    loader.close()


def test_reads_of_unused_records_are_counted(packed):
    loader, stride = breathing(packed, ALL)
    loader.hint([(0, expert) for expert in range(4)])
    loader.drain()
    read(loader, 0, [3]).release()
    loader.resize(2 * stride)
    assert loader.stats.wasted == 2 and loader.stats.prefetched == 4
    loader.close()


@pytest.mark.parametrize("copied", [pytest.param(None, marks=on_host), True])
def test_a_request_may_ask_for_more_than_the_least_if_there_is_room(packed, copied):
    """If records are copied, it may not."""
    loader, stride = breathing(packed, 4, copied=copied)
    loader.resize(5 * stride)
    if copied:
        with pytest.raises(TooManyExpertsError):
            loader.request(0, np.arange(5))
    read(loader, 0, range(2 if copied else 5)).release()
    loader.resize(0)
    assert len(loader.pools[0]) == 2 == loader.slots
    loader.close()


def test_reads_that_fail_in_every_staging_row_end_the_request(packed):
    reader = ExpertReader(packed, preadv=(faults := Faults()))
    loader, stride = breathing(packed, ALL, reader=reader, copied=True, least_slots=EXPERTS)
    faults.plan = ["eio"] * EXPERTS
    with pytest.raises(ExpertIOError):
        read(loader, 0, range(EXPERTS))
    loader.drain()
    faults.plan = []
    read(loader, 0, range(EXPERTS)).release()
    loader.close()


def test_a_pool_without_a_larger_size_only_shrinks(packed):
    loader, stride = breathing(packed, 4, most_bytes=None)
    assert loader.resize(1 << 40) == 4 and len(loader.pools[0].places.rows) == 4
    assert loader.resize(3 * stride) == 3
    loader.close()


@on_host
def test_memory_is_given_back_in_the_middle_of_a_call_and_comes_with_the_next(packed):
    allowed, stride = [ALL], packed.layout.record.stride
    loader, _ = breathing(packed, ALL, limit=lambda held: allowed[0] * stride)
    with loader.turn(1):
        read(loader, 0, range(EXPERTS)).release()
        held = read(loader, 1, [0, 1, 2])
        allowed[0] = 1
        read(loader, 1, [2, 3]).release()
        assert loader.slots == ALL, "with another lease the least, two, would not be enough for this request"
        assert np.array_equal(blocks(held), records(packed, 1)[[0, 1, 2]])
        held.release()
        read(loader, 0, [4]).release()
        assert loader.slots == 2 and loader.stats.given_back == 8 * stride
        allowed[0] = ALL
        read(loader, 0, [5]).release()
        assert loader.slots == 2, "a call in its middle does not grow"
    with loader.turn(1):
        assert loader.slots == ALL
    loader.close()


@on_host
def test_memory_is_given_back_between_two_parts_of_a_wave(packed):
    """Leased records stay and have the same bytes."""
    allowed, stride = [ALL], packed.layout.record.stride
    loader, _ = breathing(packed, ALL, limit=lambda held: allowed[0] * stride)
    with loader.turn(1):
        read(loader, 0, range(EXPERTS)).release()
        held = read(loader, 1, [0, 1, 2])
        allowed[0] = 1
        loader.relieve()
        assert loader.slots == 3 and loader.stats.given_back == (9 - 3) * stride
        assert np.array_equal(blocks(held), records(packed, 1)[[0, 1, 2]])
        held.release()
        read(loader, 0, [4]).release()
        assert loader.slots == 2
    loader.close()


@on_host
def test_memory_is_given_back_while_nothing_is_computed(packed, monkeypatch):
    monkeypatch.setattr(moeflux_mlx.experts.streamed, "WATCH_SECONDS", 0.01)
    allowed, stride, others = [ALL], packed.layout.record.stride, threading.enumerate()
    loader, _ = breathing(packed, ALL, limit=lambda held: allowed[0] * stride)
    watching = next(one for one in threading.enumerate() if one.name == "pool-watch" and one not in others)
    read(loader, 0, range(EXPERTS)).release()
    with loader.turn(1):
        allowed[0] = 3
        time.sleep(0.1)
        assert loader.slots == ALL, "a call looks itself"
    end = time.monotonic() + 10
    while loader.slots > 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert loader.slots == 3 and len(loader.pools[0]) == 3
    loader.close()
    watching.join(10)
    assert not watching.is_alive()


@pytest.mark.parametrize("adopt, times", [(None, 100), pytest.param(staging_memory, 40, marks=on_host)])
def test_random_squeezes_change_no_token(adopt, times, monkeypatch, wave_bytes):
    """The squeezes come in the middle of calls: between any two requests of a prompt or a token."""
    if adopt is not None:
        use_plain_operations(monkeypatch)
    rng, most = random.Random(3), 1 << 30
    path, tokens = tiny_directory("qwen3_moe"), tokens_of("qwen3_moe")
    wave_bytes(2 * 16384)
    squeezes = []

    def limit(held):
        if rng.random() < 0.1:
            squeezes.append(rng.choice([0, held // 2, most]))
        return squeezes[-1] if squeezes else most

    model = streamed(path, least_slots=2 * TOP_K, cache_bytes=most, limit=limit, adopt=adopt)
    expected = run(tiny_model("qwen3_moe", mx.float32), tokens, 20), run(tiny_model("qwen3_moe", mx.float32), tokens, 1)
    while len(squeezes) < times:
        for size, want in zip((20, 1), expected, strict=True):
            assert np.array_equal(run(model, tokens, size), want)
    assert model.experts.stats.given_back > 0
    model.experts.close()


# Memory.


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_host
@pytest.mark.parametrize("share", [2, 10])
def test_memory_goes_back_to_the_system(share):
    """200 MB of records whose stride is no multiple of a large page; the ones that stay are anywhere among them."""
    layout = ExpertLayout.from_args(tiny_args(hidden=1024, inner=512))
    stride, slack = layout.record.stride, 16 << 20
    most = (200 << 20) // stride
    start = resident()
    pool = SlotPool(layout.held_bytes, most // 2, most=most)
    assert resident() - start < slack, "address space takes no memory"
    pool.resize(most, pool.drop)
    for expert in range(most):
        slot = pool.take()
        pool.places.rows[slot.row] = expert
        pool.put((0, expert), slot)
        pool.arrived((0, expert))
    order = random.Random(1).sample(range(most), most)
    for expert in order:
        pool.pin(held := [(0, expert)])
        pool.unpin(held)
    assert resident() - start > 195 << 20
    for slots in (most // share, 1):
        pool.resize(slots, pool.drop)
        assert abs(resident() - start - slots * stride) < slack
        assert set(pool.records()) == {(0, expert) for expert in order[-slots:]}
        assert all((pool.places.rows[pool[key].row] == key[1]).all() for key in pool.records())


def test_only_whole_pages_are_given_back():
    page = os.sysconf("SC_PAGE_SIZE")
    pages = private_pages(4 * page)
    pages[:] = b"x" * (4 * page)
    for start, stop, gone in [(1, page, 0), (page - 1, 2 * page + 1, 1), (2 * page + 1, 4 * page, 2)]:
        give_back(pages, start, stop)
        assert pages[:].count(0) == gone * page


# Turns.


def test_an_allowance_is_asked_once_in_a_turn(packed):
    asked, resized = [], []
    loader, stride = breathing(packed, 2, allowance=lambda tokens, held: asked.append(tokens) or size[0] * stride)
    resize = loader.resize
    loader.resize = lambda nbytes: resized.append(nbytes // stride) or resize(nbytes)
    size = [2]
    for slots in (2, 1, 6, 6, 99, 99, 3, 2, 2):
        size[0] = slots
        with loader.turn(slots):
            assert loader.slots == min(max(slots, 2), ALL)
    assert asked == [2, 1, 6, 6, 99, 99, 3, 2, 2] and resized == [6, 99, 3, 2]
    loader.close()


def test_a_little_more_memory_is_not_worth_a_resize(tmp_path):
    packed = write_packed(tmp_path, experts=40)
    loader, stride = breathing(packed, 32, allowance=lambda tokens, held: tokens * stride)
    for tokens, slots in [(33, 32), (34, 34), (33, 33), (34, 33), (36, 36), (78, 78), (79, 78), (80, 80), (79, 79)]:
        with loader.turn(tokens):
            assert loader.slots == slots, tokens
    loader.close()


def test_an_error_from_the_allowance_ends_only_the_call(packed):
    loader, stride = breathing(packed, allowance=lambda tokens, held: 1 // tokens)
    with pytest.raises(ZeroDivisionError), loader.turn(0):
        pass
    taken = threading.Event()

    def take_turn():
        with loader.turn(1):
            taken.set()

    other = threading.Thread(target=take_turn, daemon=True)
    with loader.turn(1):
        other.start()
        assert not taken.wait(0.05)
    assert taken.wait(10)
    other.join()
    loader.close()


@pytest.mark.parametrize("kind, chunk", drawn(["native", "operations", "copied"], [1, 20]))
def test_same_bits_while_the_pool_breathes(kind, chunk, monkeypatch, wave_bytes):
    """The pool changes from everything to the least after each call, and back to everything."""
    if kind != "native":
        use_plain_operations(monkeypatch)
    path, seen = tiny_directory("qwen3_moe"), []
    wave_bytes(2 * 16384)
    model = streamed(
        path,
        least_slots=2 * TOP_K,
        cache_bytes=1,
        most_bytes=1 << 30,
        copied=True if kind == "copied" else None,
        allowance=lambda tokens, held: (seen.append(model.experts.slots), (len(seen) % 2) << 30)[1],
    )
    tokens, reference = tokens_of("qwen3_moe"), tiny_model("qwen3_moe", mx.float32)
    for size in (chunk, 2):
        assert np.array_equal(run(model, tokens, size), run(reference, tokens, size))
    assert set(seen) == {2 * TOP_K, model.experts.pools[0].most}
    model.experts.close()
