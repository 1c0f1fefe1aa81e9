"""A pool whose memory a device adopts, as on Metal: buffers come and go one at a time, and other records stay.

`Mac` stands in for the machine: adopted memory counts as taken at once, whether it was touched or not, and the level of
memory pressure follows from it. macOS lowers the level some seconds after memory suffices.
"""

import gc
import time
import weakref

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import settings
from test_breathing import ALL, BreathingMachine, breathing, read
from test_shares import write_mixed
from test_source import EXPERTS, Evaluated, blocks, records, write_packed

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.memory import page_aligned, private_pages
from moeflux_mlx.experts.places import BUFFERS, Buffers
from moeflux_mlx.experts.source import TooManyExpertsError
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.ops.records import MISSING
from moeflux_mlx.planning.pressure import PACE_OF_METAL, MacOS, PoolLimit, Process

LAYERS, SLOTS = 2, 64
LAG = 5  # seconds for which the level stays raised


class Mac:
    """A Mac with memory for `room` bytes of the pool and of other programs."""

    def __init__(self, room):
        self.room, self.now, self.others, self._short = room, 1000.0, 0, 0.0
        self.adopted = self.most = 0
        self.raised = 2  # the level while memory is short

    def adopt(self, rows, words):
        pages = private_pages(4 * rows * words)
        weakref.finalize(pages, self._free, len(pages))
        self.adopted += len(pages)
        self.most = max(self.most, self.adopted)
        memory = np.frombuffer(pages, np.uint32).reshape(rows, words)
        return memory, memory

    def _free(self, nbytes):
        self.adopted -= nbytes

    def limit(self, most):
        source = MacOS(self._level, lambda: 0, self.room, self.clock)
        limit = PoolLimit([source], most, self.clock, lambda: self.adopted, PACE_OF_METAL)
        limit.begin(most // 4)  # temporaries of a call, of which the level says nothing
        return limit

    def _level(self):
        if self.adopted + self.others > self.room:
            self._short = self.now
        return self.raised if self.now - self._short <= LAG else 1

    def clock(self):
        return self.now


class Run:
    """A model on a Mac that uses some records of each layer per second."""

    def __init__(self, packed):
        stride = packed.layout.record.stride
        self.mac, self.rng, self.nbytes = Mac(SLOTS * stride), np.random.default_rng(0), SLOTS * stride
        self.loader = StreamedExperts(packed, cache_bytes=self.nbytes, least_slots=8, adopt=self.mac.adopt)
        self.loader.limit = self.mac.limit(self.nbytes)
        self.pool = self.loader.pools[0]
        self.experts = packed.layout.num_experts

    def seconds(self, count, among=None):
        """Lets time pass. `among`: only records that are there are used."""
        for _ in range(count):
            self.mac.now += 1
            with self.loader.turn(1):
                for layer in range(LAYERS):
                    there = [expert for of, expert in self.pool.records() if of == layer and among]
                    ids = self.rng.choice(there or self.experts, 4, replace=False)
                    read(self.loader, layer, ids).release()

    def swing(self, share, seconds=8):
        """Others take a share of the memory for these seconds. Returns the share of the records that are lost."""
        before = set(self.pool.records())
        self.mac.others = int(share * self.nbytes)
        self.seconds(seconds, among=True)
        lost = before - set(self.pool.records())
        self.mac.others = 0
        return len(lost) / len(before)


@pytest.fixture
def run(tmp_path):
    made = Run(write_packed(tmp_path, experts=40))
    made.seconds(60)
    assert len(made.pool) == SLOTS and made.mac.adopted == made.nbytes
    yield made
    made.loader.close()


def test_ten_swings_in_ten_minutes_lose_little(run):
    lost = []
    for _ in range(10):
        lost.append(run.swing(1 / 8))
        run.seconds(52)
    assert max(lost) <= 0.15 and sum(share > 0 for share in lost) >= 4
    assert run.mac.most <= run.nbytes, "the old buffer is free before another is adopted"
    run.seconds(120)
    assert run.mac.adopted == run.nbytes and len(run.pool) == SLOTS


def test_a_swing_of_three_eighths_loses_no_more(run):
    run.pool.resize(SLOTS, run.pool.drop)
    assert 0.3 < run.swing(3 / 8, 40) <= 0.4
    for buffers in (5, 6, 7, 8):  # an eighth at a time, after a minute each
        assert run.mac.adopted == buffers * run.nbytes // 8
        run.seconds(61)


def test_growing_waits_for_a_minute_without_pressure(run):
    for share, seconds, eighths in [(1 / 8, 45, 7), (2 / 8, 45, 6), (0, 30, 7), (0, 40, 7), (0, 25, 8)]:
        run.swing(share)
        run.seconds(seconds - 8)
        assert run.mac.adopted == eighths * run.nbytes // 8


@pytest.mark.parametrize("records", [0, 8])
def test_pressure_while_the_pool_fills_takes_an_eighth(tmp_path, records):
    run = Run(write_packed(tmp_path, experts=40))
    read(run.loader, 0, range(records)).release()
    assert run.mac.adopted == records * run.nbytes // SLOTS
    run.mac.others = 2 * run.mac.room
    for _ in range(3):
        run.mac.now += 1
        run.loader.relieve()
    run.mac.others = 0
    run.seconds(50)
    assert run.mac.adopted == 7 * run.nbytes // 8
    run.seconds(50)
    assert run.mac.adopted == run.nbytes and len(run.pool) == SLOTS
    run.loader.close()


def test_a_critical_level_takes_half_at_once_and_then_waits(run):
    """It does not wait for an earlier cut of an eighth."""
    run.mac.others = run.nbytes // 16
    run.seconds(2, among=True)
    assert run.mac.adopted == 7 * run.nbytes // 8
    run.mac.raised, run.mac.others = 4, run.nbytes
    for seconds, eighths in [(1, 3), (8, 3), (3, 1)]:
        run.seconds(seconds, among=True)
        assert run.mac.adopted == eighths * run.nbytes // 8


@pytest.mark.parametrize("jump", [1e5, -1e5])
def test_a_clock_that_jumps_does_not_empty_the_pool(run, jump):
    """As after a night's sleep: at most one step of cutting or growing comes at once."""
    run.swing(1 / 8)
    held = run.mac.adopted
    run.mac.now += jump
    run.seconds(1, among=True)
    assert abs(run.mac.adopted - held) <= run.nbytes // 8
    run.seconds(130)
    if jump > 0:
        assert run.mac.adopted == run.nbytes


def test_a_limit_of_bytes_is_never_exceeded(run):
    """A share of the records that does not fill its last buffer does not get it, however little is missing."""
    for sixteenths, eighths in [(15.9, 7), (13.9, 6), (9, 4)]:
        allowed = int(sixteenths * run.nbytes / 16)
        sources = [Process(allowed, lambda: run.mac.adopted)]
        run.loader.limit = PoolLimit(sources, run.nbytes, run.mac.clock, lambda: run.mac.adopted, PACE_OF_METAL)
        run.seconds(3)
        assert run.mac.adopted == eighths * run.nbytes // 8
        assert run.loader.stats.given_back == run.nbytes - run.mac.adopted


# ---- the buffers


@pytest.fixture
def packed(tmp_path):
    return write_packed(tmp_path)


def adopting(packed, slots=ALL, **options):
    """Returns a loader of buffers of two records, and its Mac."""
    mac = Mac(1 << 40)
    loader, stride = breathing(packed, slots, adopt=mac.adopt, **options)
    return loader, mac, stride


def test_a_buffer_is_adopted_when_the_others_are_full(packed):
    loader, mac, stride = adopting(packed)
    assert loader.slots == ALL and mac.adopted == 0 == loader.pools.held_bytes
    for count in range(1, ALL + 1):
        read(loader, (count - 1) // EXPERTS, [(count - 1) % EXPERTS]).release()
        assert mac.adopted == -(-count // 2) * 2 * stride == loader.pools.held_bytes == loader.pools.device_bytes
    loader.close()
    gc.collect()
    assert mac.adopted == 0


def test_kernels_are_given_the_same_number_of_arrays(packed):
    loader, mac, stride = adopting(packed)
    seen = []
    for layer in (0, 1):
        for expert in range(EXPERTS):
            lease = read(loader, layer, [expert])
            held, slots = lease.records()
            seen.append((len(held.memory), held.inputs(1)[1:]))
            assert np.array_equal(blocks(lease), records(packed, layer)[[expert]])
            lease.release()
    assert set(seen) == {seen[0]} and seen[0][0] == BUFFERS
    loader.close()


def test_the_records_of_a_request_lie_in_several_buffers(packed):
    loader, _, _ = adopting(packed)
    lease = read(loader, 0, range(EXPERTS))
    _, slots = lease.records()
    assert len({int(slot) >> 24 for slot in slots}) == 3
    assert np.array_equal(blocks(lease), records(packed, 0))
    loader.close()


def test_the_most_recently_used_records_stay(packed):
    """They are moved out of the buffer that goes; it is the one with the fewest."""
    loader, mac, stride = adopting(packed)
    for layer in (0, 1):
        read(loader, layer, range(EXPERTS)).release()
    kept = [(0, 1), (1, 0), (1, 5), (0, 4), (1, 3)]
    for layer, expert in kept:
        read(loader, layer, [expert]).release()
    assert loader.resize(6 * stride) == 6 and mac.adopted == 6 * stride
    assert set(kept) < set(loader.pools[0].records()) and len(loader.pools[0]) == 6
    for layer, expert in kept:
        lease = read(loader, layer, [expert])
        assert lease.ready.all() and np.array_equal(blocks(lease), records(packed, layer)[[expert]])
        lease.release()
    loader.close()


def test_a_buffer_that_is_leased_goes_later(packed):
    """Leased records are in three of six buffers, of which two must go."""
    allowed = [ALL]
    loader, mac, stride = adopting(packed)
    loader.limit = lambda held: allowed[0] * stride
    for layer in (0, 1):
        read(loader, layer, range(EXPERTS)).release()
    lease = read(loader, 0, range(EXPERTS))
    others = read(loader, 1, [0, 2])
    allowed[0] = 2
    loader.relieve()
    assert loader.slots == 8 and mac.adopted == 10 * stride, "leased records cannot move"
    for one, layer, ids in ((lease, 0, range(EXPERTS)), (others, 1, [0, 2])):
        assert np.array_equal(blocks(one), records(packed, layer)[list(ids)])
    others.release()
    assert np.array_equal(blocks(lease), records(packed, 0))
    lease.release()
    read(loader, 0, [1]).release()
    assert loader.slots == 2 and mac.adopted == 2 * stride
    loader.close()


def test_a_buffer_goes_once_the_leases_that_use_it_have_ended(packed):
    """The pool has its new size, but each buffer has a leased record."""
    allowed = [ALL]
    loader, mac, stride = adopting(packed)
    loader.limit = lambda held: allowed[0] * stride
    for layer in (0, 1):
        read(loader, layer, range(EXPERTS)).release()
    leases = [read(loader, layer, [0, 2, 4]) for layer in (0, 1)]
    allowed[0] = 8
    loader.relieve()
    assert loader.slots == 8 and mac.adopted == ALL * stride
    for layer, lease in enumerate(leases):
        assert np.array_equal(blocks(lease), records(packed, layer)[[0, 2, 4]])
        lease.release()
    del lease, leases
    assert read(loader, 0, [0]).ready.all() and mac.adopted == 8 * stride
    loader.close()


def test_a_share_of_records_fills_whole_buffers():
    made = Buffers(16384, 800, 8, None, page_aligned)
    assert [made.fit(slots) for slots in (800, 700, 699, 175, 1)] == [800, 700, 600, 100, 100]


def test_a_buffer_with_a_record_that_must_stay_goes_last():
    made = Buffers(16384, 16, 2, None, lambda *shape: (page_aligned(*shape),) * 2)
    places = [made.take() for _ in range(16)]
    assert made.rows == 2
    first, *_, last, other = places
    owned = {first: True, last: False, other: False, **dict.fromkeys(places[2:13:2], True)}
    made.aim(14, owned)
    assert made.goes(last) and not made.goes(first)


def test_a_table_has_the_slots_of_the_records(packed):
    """Also after moves; and a table that was given away stays what it was."""
    loader, _, stride = adopting(packed)
    pool = loader.pools[0]

    def slots():
        return dict(enumerate(np.array(loader.table(0).memory).tolist()))

    def places():
        there = {expert: pool[0, expert].row for layer, expert in pool.records() if layer == 0}
        return {expert: there.get(expert, MISSING) for expert in slots()}

    for layer in (0, 1):
        read(loader, layer, range(EXPERTS)).release()
    before = loader.table(0)
    assert slots() == places() and MISSING not in list(slots().values())[:EXPERTS]
    pool.drop((0, 2))
    assert slots() == places() and slots()[2] == MISSING != before.memory[2].item()
    read(loader, 0, [5, 0]).release()
    loader.resize(2 * stride)
    moved = {expert for expert in (0, 5) if slots()[expert] not in (MISSING, before.memory[expert].item())}
    assert slots() == places() and len(moved) == 1
    loader.close()


def test_a_place_is_free_when_what_was_queued_before_has_been_read():
    made = Buffers(16384, 16, 2, None, lambda *shape: (page_aligned(*shape),) * 2)
    places, evaluated = [made.take() for _ in range(16)], Evaluated(3)
    first, second, third = evaluated.arrays
    made.queued([first])
    made.put(places[0])
    made.queued([first, second])
    made.put(places[1])
    assert made.free == []
    made.queued([second, third])
    assert made.free == [places[0]] and evaluated.count() == 0
    assert [made.take(), made.take()] == places[:2] and evaluated.count() == 1
    made.put(places[2])
    made.aim(16, dict.fromkeys(places[3:], False))
    assert evaluated.count() == 2 and made.free == places[:3]


@pytest.mark.parametrize("slots, reserve", [(60, 1), (80, 0)])
def test_a_pool_that_evicts_keeps_a_reserve_while_layers_are_queued(tmp_path, slots, reserve):
    loader, _, stride = adopting(write_packed(tmp_path, experts=40), slots)
    for layer in (0, 1):
        read(loader, layer, range(slots // 2)).release()
    pool = loader.pools[0]
    assert len(pool) == loader.slots == slots
    loader.queued([mx.array(1.0)])
    assert len(pool) == slots - reserve and not pool.places.free
    loader.queued([])
    assert len(pool.places.free) == reserve and not pool.has_room
    assert pool.is_warm, "warming waits for room that the reserve takes"
    loader.close()


def test_a_cut_takes_one_buffer_of_records_of_every_size(tmp_path):
    packed = write_mixed(tmp_path, experts=130)
    loader = StreamedExperts(packed, cache_bytes=1 << 40, least_slots=4, adopt=Mac(1 << 40).adopt)
    for layer in packed.layout.moe_layers:
        for start in range(0, 130, 10):
            read(loader, layer, range(start, start + 10)).release()
    buffers = [pool.held_bytes // (pool.places.rows * pool.nbytes) for pool in loader.pools]
    clock, level = [0.0], [2]
    mac = MacOS(lambda: level[0], lambda: 0, 1 << 40, lambda: clock[0])
    most = loader.pools.nbytes
    loader.limit = PoolLimit([mac], most, lambda: clock[0], lambda: 0, PACE_OF_METAL)
    assert min(buffers) >= 7
    for cut in range(1, 6):
        clock[0] += PACE_OF_METAL.pause
        loader.relieve()
        left = [pool.held_bytes // (pool.places.rows * pool.nbytes) for pool in loader.pools]
        assert left == [count - cut for count in buffers]
    loader.close()


def test_a_device_that_refuses_is_reported_and_asked_again(packed):
    refused = []

    def adopt(rows, words):
        if not refused:
            refused.append(rows)
            raise ExpertIOError("no memory")
        memory = page_aligned(rows, words)
        return memory, memory

    loader, _ = breathing(packed, ALL, adopt=adopt)
    with pytest.raises(ExpertIOError, match="no memory"):
        loader.request(0, np.array([1]))
    assert np.array_equal(blocks(read(loader, 0, [1])), records(packed, 0)[[1]])
    loader.close()


def test_a_pool_goes_on_with_the_buffers_that_it_has_if_the_device_refuses_another(packed):
    """It holds fewer records from then on. A request that needs more beside a lease is refused."""
    mac = Mac(1 << 40)

    def adopt(rows, words):
        if mac.adopted >= 6 * stride:
            refused.append(rows)
            raise ExpertIOError("no memory")
        return mac.adopt(rows, words)

    refused, stride = [], packed.layout.record.stride
    loader, _ = breathing(packed, ALL, adopt=adopt)
    lease = read(loader, 0, range(4))
    with pytest.raises(TooManyExpertsError, match="all 6 slots are in use"):
        loader.request(1, np.arange(4))
    assert np.array_equal(blocks(lease), records(packed, 0)[:4])
    lease.release()
    for _ in range(2):
        for layer in (0, 1):
            for expert in range(EXPERTS):
                with loader.turn(1):
                    lease = read(loader, layer, [expert])
                    assert np.array_equal(blocks(lease), records(packed, layer)[[expert]])
                    lease.release()
    assert loader.slots == 6 == len(loader.pools[0]) and mac.adopted == 6 * stride
    assert len(refused) == 1, "it is not asked at every miss"
    loader.close()


class BuffersMachine(BreathingMachine):
    """As for other pools, with the memory counted."""

    def __init__(self):
        self.mac = Mac(1 << 40)
        super().__init__(adopt=self.mac.adopt)

    def check_size(self, slots, before, pinned, reached):
        places = self.pool.places
        end = time.monotonic() + 5
        while not self.held and self.mac.adopted != self.pool.held_bytes:  # a thread may still let go of its read
            assert time.monotonic() < end
            time.sleep(1e-4)
        assert reached == self.loader.slots and (reached <= max(slots, 2, pinned) or reached == before)
        if not pinned and not self.pool.in_flight():
            assert places.is_settled and self.mac.adopted <= -(-reached // places.rows) * places.rows * self.stride

    def check_rows(self):
        places, used = self.pool.places, [slot.row for slot in map(self.pool.get, self.pool.records())]
        assert len(set(used)) == len(used) and all(places.row(place) is not None for place in used)
        assert sorted([*places.free, *(place for place in used if not places.goes(place))]) == list(places.staying())


TestBuffersMachine = BuffersMachine.TestCase
TestBuffersMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
