"""Records of several sizes in one pool: memory is divided fairly, no record counts for more than its size, and bytes
stay right.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_packed import tiny_args
from test_source import Faults, words_at

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.memory import GIVES_BACK, staging_memory
from moeflux_mlx.experts.places import BUFFERS, Buffers
from moeflux_mlx.experts.pool import NOWHERE, SlotPool
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.shares import SizeClass, divide, size_classes, slots_within, taken
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import BLOCK_BYTES, STRIDE_ALIGNMENT, UNIFORM, ExpertLayout
from moeflux_mlx.ops import backend
from moeflux_mlx.quant import Quant

EXPERTS, LEAST = 6, 4
WIDE, NARROW = (Quant(8, 32),) * 3, (Quant(2, 64),) * 3
QUANTS = {0: WIDE, 1: NARROW, 2: UNIFORM, 3: NARROW}
can_breathe = pytest.mark.skipif(backend.name() == "metal" or not GIVES_BACK, reason="memory stays as it is here")


def mixed(experts=EXPERTS):
    return ExpertLayout.from_args(tiny_args(layers=4, experts=experts), QUANTS)


def write_mixed(folder, experts=EXPERTS):
    layout, rng = mixed(experts), np.random.default_rng(1)
    packed = PackedExperts(layout, [folder])
    for layer, path in packed.paths.items():
        path.write_bytes(rng.integers(0, 256, layout.layer_bytes(layer), dtype=np.uint8).tobytes())
    return packed


def truth_of(packed, layer):
    """Returns [E, bytes]: the records of a layer, without the bytes that follow them."""
    record = packed.layout.records[layer]
    return np.fromfile(packed.paths[layer], np.uint8).reshape(EXPERTS, record.stride)[:, : record.size]


@pytest.fixture
def packed(tmp_path):
    return write_mixed(tmp_path)


@functools.cache
def shared_files():
    folder = tempfile.mkdtemp(prefix="moeflux-mixed-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    packed = write_mixed(Path(folder))
    return packed, {layer: truth_of(packed, layer) for layer in packed.layout.moe_layers}


def bytes_at(lease, packed):
    """Returns the bytes of the lease's ids."""
    held, rows = lease.records()
    whole = np.ascontiguousarray(words_at(held, rows)).view(np.uint8)
    return whole[:, : packed.layout.records[lease.keys[0][0]].size]


# ---- division

some_classes = st.lists(
    st.builds(
        lambda blocks, records: SizeClass(blocks * BLOCK_BYTES, (0,), records), st.integers(1, 9), st.integers(1, 99)
    ),
    min_size=1,
    max_size=4,
)


@given(classes=some_classes, blocks=st.integers(0, 4000), least=st.integers(1, 20))
def test_memory_is_divided_within_itself_and_evenly(classes, blocks, least):
    nbytes = blocks * BLOCK_BYTES
    slots, floor = divide(classes, nbytes, least), [min(least, one.records) for one in classes]
    used = sum(n * one.nbytes for n, one in zip(slots, classes, strict=True))
    assert used <= max(nbytes, sum(n * one.nbytes for n, one in zip(floor, classes, strict=True)))
    assert all(low <= n <= one.records for low, n, one in zip(floor, slots, classes, strict=True))
    whole = sum(one.nbytes * one.records for one in classes)
    assert (slots == [one.records for one in classes]) or nbytes < whole
    above = [(n / one.records, one) for n, low, one in zip(slots, floor, classes, strict=True) if n > low]
    if above:  # equal shares, except for parts of a record
        assert max(share - 1 / one.records for share, one in above) <= min(
            share + 1 / one.records for share, one in above
        )
        assert nbytes - used < sum(one.nbytes for one in classes) or slots == [one.records for one in classes]


@given(classes=some_classes, a=st.integers(0, 4000), b=st.integers(0, 4000), least=st.integers(1, 20))
def test_more_memory_is_never_fewer_records(classes, a, b, least):
    less, more = (divide(classes, blocks * BLOCK_BYTES, least) for blocks in sorted((a, b)))
    assert all(x <= y for x, y in zip(less, more, strict=True))


def test_a_single_class_takes_whole_records():
    (one,) = size_classes(ExpertLayout.from_args(tiny_args(layers=2, experts=EXPERTS)))
    assert [divide([one], n * one.nbytes + rest, 2)[0] for n, rest in ((0, 0), (2, 1), (5, -1), (99, 0))] == [
        2,
        2,
        4,
        12,
    ]


def test_size_classes_by_the_memory_of_a_record():
    layout = mixed()
    classes = size_classes(layout)
    assert [one.layers for one in classes] == [(0,), (1, 3), (2,)] and [one.records for one in classes] == [6, 12, 6]
    for one in classes:
        for layer in one.layers:
            assert one.nbytes == layout.records[layer].held_bytes < layout.records[layer].size + BLOCK_BYTES
    everything = sum(one.nbytes * one.records for one in classes)
    assert taken(layout, 1 << 40, LEAST) == everything and slots_within(layout, 1 << 40, LEAST) == 4 * EXPERTS
    assert taken(layout, 0, LEAST) == sum(one.nbytes * LEAST for one in classes)


@given(most=st.integers(1, 2000), least=st.integers(1, 64), blocks=st.integers(1, 50), largest=st.integers(1, 100))
def test_buffers_are_whole_pages_and_nearly_as_large_as_the_pool(most, least, blocks, largest):
    nbytes, most = blocks * BLOCK_BYTES, max(most, least)
    for limit in (None, largest * nbytes):
        made = Buffers(nbytes, most, least, limit, staging_memory)
        count = -(-made.most // made.rows)
        assert made.rows * nbytes % STRIDE_ALIGNMENT == 0 and count <= BUFFERS
        assert least <= made.most <= most and made.fit(1) >= least and made.fit(most) == made.most
        if made.rows * (count - 1) >= least:  # all buffers are not needed for the least
            assert made.rows * count <= most, "no more memory than was asked for"
            assert limit is None or made.rows * nbytes <= max(limit, STRIDE_ALIGNMENT * blocks)
        if limit is None and most > 4 * BUFFERS:
            assert made.most > most - 4 * BUFFERS or made.most == least


# ---- streaming


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_records_of_every_size_are_the_files_bytes(packed, direct, copied):
    reader = ExpertReader(packed, direct=direct)
    loader = StreamedExperts(packed, cache_bytes=1, least_slots=LEAST, reader=reader, copied=copied)
    assert [pool.slots for pool in loader.pools] == [LEAST] * 3
    for _ in range(2):
        for layer in packed.layout.moe_layers:
            with loader.request(layer, np.array([5, 0, 3])) as lease:
                lease.wait()
                assert np.array_equal(bytes_at(lease, packed), truth_of(packed, layer)[[5, 0, 3]])
                assert lease.records()[0].record is packed.layout.records[layer]
    loader.close()


def test_layers_of_one_size_share_a_pool(packed):
    loader = StreamedExperts(packed, cache_bytes=1 << 30, least_slots=LEAST)
    assert loader.pools.of[1] is loader.pools.of[3] and len(set(loader.pools)) == 3
    assert [loader.slots_of(layer) for layer in range(4)] == [6, 12, 6, 12] and loader.slots == 24
    assert sum(pool.slots * pool.nbytes for pool in loader.pools) == taken(packed.layout, 1 << 30, LEAST)
    loader.close()


def test_a_buffer_holds_records_of_any_layer_of_one_size(packed):
    loader = StreamedExperts(packed, cache_bytes=1 << 30, least_slots=2, adopt=staging_memory)
    assert loader.pools.of[1] is loader.pools.of[3] and len(set(loader.pools)) == 3
    for layer in range(4):
        with loader.request(layer, np.array([1, 2])) as lease:
            lease.wait()
            assert np.array_equal(bytes_at(lease, packed), truth_of(packed, layer)[[1, 2]])
    loader.close()


@can_breathe
def test_the_allowance_counts_bytes(packed):
    size, held = [0], []
    loader = StreamedExperts(
        packed,
        cache_bytes=1,
        most_bytes=1 << 30,
        least_slots=2,
        allowance=lambda tokens, held_bytes: held.append(held_bytes) or size[0],
    )
    least, most = taken(packed.layout, 0, 2), taken(packed.layout, 1 << 40, 2)
    for nbytes in (0, least, (least + most) // 2, most, most + 1, least + 1):
        size[0] = nbytes
        with loader.turn(1):
            used = sum(pool.slots * pool.nbytes for pool in loader.pools)
            assert least <= used <= max(nbytes, least)
            for layer in range(4):
                loader.request(layer, np.array([0, 1])).wait()
    assert loader.slots == sum(divide(size_classes(packed.layout), least + 1, 2))
    loader.close()


class MixedMachine(RuleBasedStateMachine):
    """Compares the loader with the files themselves. It is resized between any two calls, while leases are held."""

    def __init__(self, copied=None):
        super().__init__()
        self.packed, self.truth = shared_files()
        self.faults, self.held = Faults(), []
        reader = ExpertReader(self.packed, workers=2, preadv=self.faults)
        self.loader = StreamedExperts(
            self.packed, cache_bytes=1, most_bytes=1 << 30, least_slots=LEAST, reader=reader, copied=copied
        )
        self.most = taken(self.packed.layout, 1 << 40, LEAST)

    layers = st.integers(0, 3)
    some_ids = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=LEAST)

    @rule(plan=st.lists(st.sampled_from([None, "short", "eintr", "eio", "slow"]), max_size=4))
    def misbehave(self, plan):
        self.faults.plan = plan

    @rule(layer=layers, ids=some_ids, keep=st.booleans())
    def acquire(self, layer, ids, keep):
        try:
            lease = self.loader.request(layer, np.array(ids))
            lease.wait()
        except (ExpertIOError, ValueError):
            return
        self.held.append((lease, self.truth[layer][ids]))
        if not keep:
            self.check_held()
            self.held.pop()[0].release()

    @rule(which=st.integers(0, 3))
    def release(self, which):
        if self.held:
            self.held.pop(which % len(self.held))[0].release(mx.zeros(1) + which)

    @rule(first=layers, second=layers, ids=some_ids)
    def hint(self, first, second, ids):
        self.loader.hint([(layer, expert) for layer in (first, second) for expert in ids])

    @rule(layer=layers, ids=some_ids)
    def give_way(self, layer, ids):
        self.loader.intend(layer, ids)
        self.loader.give_way(layer, ids[:1])

    @rule(share=st.floats(0, 1.1))
    def resize(self, share):
        if backend.name() == "metal" or not GIVES_BACK:
            return
        nbytes = int(share * self.most)
        pinned = sum(pool.pinned_besides([]) * pool.nbytes for pool in self.loader.pools)
        self.loader.resize(nbytes)
        used = sum(pool.slots * pool.nbytes for pool in self.loader.pools)
        assert used <= taken(self.packed.layout, nbytes, LEAST) + pinned

    @invariant()
    def check_held(self):
        for lease, truth in self.held:
            assert np.array_equal(bytes_at(lease, self.packed), truth)

    @invariant()
    def every_row_has_one_owner(self):
        for pool in self.loader.pools:
            slots = [pool[key] for key in pool.records()]
            assert len(slots) <= pool.slots <= pool.most
            used = [slot.row for slot in slots if slot.row != NOWHERE]
            assert sorted([*pool.places.free, *used]) == list(range(len(pool.places.rows)))

    def teardown(self):
        self.faults.plan = []
        self.held.clear()
        self.loader.close()


class MixedCopyingMachine(MixedMachine):
    """The same with records that are copied, as on CUDA."""

    def __init__(self):
        super().__init__(copied=True)


TestMixedMachine = MixedMachine.TestCase
TestMixedCopyingMachine = MixedCopyingMachine.TestCase
TestMixedMachine.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestMixedCopyingMachine.settings = settings(max_examples=examples(15), stateful_step_count=30, deadline=None)


def test_a_pool_with_rows_of_any_size():
    pool = SlotPool(3 * BLOCK_BYTES, 5)
    assert pool.places.rows.shape[0] in (5, 8) and pool.places.rows.shape[1] * 4 == 3 * BLOCK_BYTES
