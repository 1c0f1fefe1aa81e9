"""Records that stay in host memory after they were copied: what is read again, what goes first, and what is counted."""

import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from test_source import EXPERTS, blocks, packed, records  # noqa: F401 (a fixture)

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import staging
from moeflux_mlx.experts.ranking import Ranking
from moeflux_mlx.experts.staging import HostTier
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.ops.tiles import MAX_TOKENS
from moeflux_mlx.planning.pressure import PoolLimit, Spare


def opened(packed, slots=3, host=2 * EXPERTS, **options):  # noqa: F811
    stride = packed.layout.record.stride
    return StreamedExperts(
        packed, cache_bytes=slots * stride, least_slots=2, copied=True, host_bytes=host * stride, **options
    )


def use(loader, layer, *ids):
    """Checks the records and returns which were in memory."""
    with loader.request(layer, np.array(ids)) as lease:
        size = loader.layout.record.size // 4
        assert np.array_equal(blocks(lease)[:, :size], loader.truth[layer][list(ids), :size])
        return lease.ready.tolist()


@pytest.fixture
def loader(packed):  # noqa: F811
    made = opened(packed)
    made.truth = [records(packed, layer) for layer in (0, 1)]
    yield made
    made.close()


def test_each_record_is_read_once(loader):
    record = loader.pools[0].nbytes
    for turn in range(3):
        for layer in (0, 1):
            for expert in range(EXPERTS):
                assert use(loader, layer, expert) == [turn > 0]
    stats, total = loader.stats, 2 * EXPERTS
    assert stats.bytes_read == total * loader.record_bytes and stats.misses == total
    assert stats.hits == stats.host_hits == 2 * total and stats.host_bytes == 2 * total * record
    assert use(loader, 1, EXPERTS - 1) == [True] and stats.host_hits == 2 * total, "it is on the device"


def test_the_limit_of_mlx_follows_what_is_held(loader):
    before = mx.set_memory_limit(1 << 50)
    try:
        use(loader, 0, 1)
        loader.relieve()
        held = loader.host_bytes
        assert held > 0 and mx.set_memory_limit((1 << 50) + held) == (1 << 50) + held
        loader.close()
        assert mx.set_memory_limit(1 << 50) == 1 << 50
    finally:
        mx.set_memory_limit(before)


def test_the_rows_of_a_step_take_one_step_of_time(loader):
    steps = []
    loader.pools.pass_time = steps.append
    for tokens in (1, MAX_TOKENS, MAX_TOKENS + 1):
        with loader.turn(tokens):
            pass
    assert steps == [1, 1, MAX_TOKENS + 1]


def test_a_hint_copies_ahead(loader):
    for expert in range(5):
        use(loader, 0, expert)
    assert loader.hint([(0, 0), (0, 1)]) == [(0, 0), (0, 1)] and not loader.in_flight
    stats = loader.stats
    assert stats.prefetched == 2 and stats.host_bytes == 2 * loader.pools[0].nbytes and stats.host_hits == 0
    assert use(loader, 0, 0, 1) == [True, True]
    assert stats.prefetch_hits == 2 and stats.host_hits == 0 and stats.misses == 5


@pytest.fixture
def buffer_bytes(monkeypatch):
    """Returns a function that says how large a buffer in host memory is."""
    return lambda nbytes: monkeypatch.setattr(staging, "BUFFER_BYTES", nbytes)


def test_what_was_used_least_goes_first(packed):  # noqa: F811
    made = opened(packed, slots=2, host=4)
    made.truth = [records(packed, layer) for layer in (0, 1)]
    for expert in (0, 1, 2, 3, 4, 5):
        for _ in range(1 if expert in (0, 3) else 3):
            use(made, 0, expert)
        made.drain()
        made.pools[0].finish_copies()
    assert set(made.pools[0].staging.host.kept) == {(0, 1), (0, 2), (0, 4), (0, 5)}
    made.close()


def test_the_records_used_most_move_out_of_memory_that_goes(packed, buffer_bytes):  # noqa: F811
    buffer_bytes(3 * packed.layout.record.stride)
    made = opened(packed, slots=2)
    made.truth = [records(packed, layer) for layer in (0, 1)]
    often = {(0, 1), (0, 4), (1, 0), (1, 3), (1, 5)}
    for _ in range(3):
        for layer in (0, 1):
            for expert in range(EXPERTS):
                for _ in range(3 if (layer, expert) in often else 1):
                    use(made, layer, expert)
    before, host = made.host_bytes, made.pools[0].staging.host
    made.reads.resize_host(5 * packed.layout.record.stride)
    assert set(host.kept) == often and made.host_bytes < before
    for layer, expert in sorted(often):
        assert use(made, layer, expert) == [True]
    made.close()


def test_a_row_is_not_used_again_before_its_copy_is_done(loader, monkeypatch):
    for expert in range(5):
        use(loader, 0, expert)
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    assert len(loader.hint([(0, 0), (0, 1)])) == 2
    loader.reads.resize_host(0)
    for row in loader.pools[0].places.free:
        loader.pools[0].places.row(row)[:] = 7
    assert use(loader, 0, 0, 1) == [True, True]


def test_memory_is_given_back_by_another_thread(packed, buffer_bytes):  # noqa: F811
    """A source says that the machine has none left; records on the device stay."""
    buffer_bytes(4 * packed.layout.record.stride)
    spare, now = [1e9], [0.0]

    class Machine:
        def spare(self, pool):
            return Spare(spare[0] - pool)

    limit = PoolLimit([Machine()], 2 * EXPERTS * packed.layout.record.stride, lambda: now[0], lambda: 0)
    made = opened(packed, host_limit=limit)
    made.truth = [records(packed, layer) for layer in (0, 1)]
    for expert in range(EXPERTS):
        use(made, 0, expert)
    before, spare[0], now[0] = made.host_bytes, 0, 1.0
    thread = threading.Thread(target=made.relieve_between_calls)
    thread.start()
    thread.join()
    host = made.pools[0].staging.host
    assert host.records == 0 == len(host) and made.host_bytes < before == made.stats.given_back + made.host_bytes
    assert use(made, 0, EXPERTS - 1) == [True] and use(made, 0, 0) == [False]
    made.close()


def test_the_system_refuses_memory(packed, monkeypatch, buffer_bytes):  # noqa: F811
    """Then records that stayed make room for what is read."""
    buffer_bytes(9 * packed.layout.record.stride)
    given, adopt = [], staging.host_memory

    def refuse(rows, words):
        if given:
            raise ExpertIOError("no more")
        given.append(rows)
        return adopt(rows, words)

    monkeypatch.setattr(staging, "host_memory", refuse)
    made = opened(packed)
    made.truth = [records(packed, layer) for layer in (0, 1)]
    for layer, expert in np.random.default_rng(0).integers(0, [2, EXPERTS], (60, 2)).tolist():
        use(made, layer, expert)
    assert 0 < len(made.pools[0].staging.host) <= given[0] and made.stats.host_hits > 0
    made.close()


@pytest.mark.parametrize("fault", [None, "another's place", "a place that is free"])
def test_the_comparison_finds_a_wrong_place(loader, fault, monkeypatch):
    take = HostTier.take

    def wrong(host, key):
        place = take(host, key)
        others = host.owned if fault == "another's place" else host.places.free
        return others[-1] if others else place

    if fault:
        monkeypatch.setattr(HostTier, "take", wrong)
    run = [(layer, expert) for _ in range(2) for layer in (0, 1) for expert in range(EXPERTS)]
    if fault is None:
        assert all(use(loader, *one) for one in run)
    else:
        with pytest.raises(AssertionError):
            for one in run:
                use(loader, *one)


def test_tables_hear_of_each_record_that_comes_or_goes():
    """A record may come after its layer's table was made, when the device has dropped it during its copy."""
    heard, freed = [], []
    tier = HostTier(SimpleNamespace(put=freed.append), Ranking(), 2, heard.append)
    for place, key in enumerate([(0, 1), (0, 2), (0, 3)]):
        tier.keep(key, place)
    tier.keep((0, 3), 7)  # is there already
    assert heard == [(0, 1), (0, 2), (0, 1), (0, 3)] and freed == [0, 7]
    assert tier.take((0, 2)) == 1 and heard[-1] == (0, 2)


def test_a_record_that_is_used_often_in_host_memory_is_copied(loader):
    pool = loader.pools[0]
    for expert in range(5):
        use(loader, 0, expert)
    often, seldom = (expert for expert in range(5) if pool.on_host((0, expert)))
    for times in range(1, 9):
        assert pool.on_host((0, seldom))
        for expert in (often, seldom)[: 2 if times == 1 else 1]:
            assert loader.accept(0, np.array([[expert]]), loader.table(0))
        if not pool.on_host((0, often)):
            break
    assert 3 < times < 8 and loader.stats.host_hits == times + 1
    assert use(loader, 0, often) == [True] and loader.stats.host_hits == times + 1
