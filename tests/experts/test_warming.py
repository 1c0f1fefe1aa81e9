"""Free memory is filled with what earlier sessions used most: what is read, in which order, and what goes first."""

import os
import threading
import time

import numpy as np
import pytest
from test_source import EXPERTS, blocks, packed, read, records  # noqa: F401 (a fixture)
from test_streaming import TOP_K, run, small_waves, streamed, tokens_of  # noqa: F401 (a fixture)
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.experts import warming
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.reads import GUESSED, REQUESTED, WARMING, DriveQueue, Read
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.experts.warming import Usage

RATES = np.arange(2 * EXPERTS).reshape(2, EXPERTS)[:, ::-1] / 20  # layer 1 first, and its first experts


def wait_until(is_true):
    for _ in range(2000):
        if is_true():
            return
        time.sleep(0.002)
    raise AssertionError("it did not happen")


class Gate:
    """A `preadv` that waits until it is open, and notes how many reads have begun."""

    def __init__(self):
        self.open, self.begun = threading.Event(), 0

    def __call__(self, *given):
        self.begun += 1
        assert self.open.wait(20)
        return os.preadv(*given)


def warmed(packed, slots, rates=RATES, **options):  # noqa: F811
    """Returns a loader whose pool is filled as far as it goes."""
    loader = StreamedExperts(packed, cache_bytes=slots * packed.layout.record.stride, least_slots=1, **options)
    loader.warm(rates)
    wait_until(lambda: not loader.warm_between_calls() and not loader.in_flight)
    return loader


@pytest.mark.parametrize("kind", [{}, {"copied": True}, {"adopt": staging_memory}])
def test_the_records_used_most_fill_the_pool(packed, kind):  # noqa: F811
    loader = warmed(packed, 5, **kind)
    size, record = loader.record_bytes, packed.layout.record.size // 4
    assert {key for pool in loader.pools for key in pool.records()} == {(1, expert) for expert in range(5)}
    assert loader.stats.warmed == 5 and loader.stats.misses == 0 and loader.stats.bytes_read == 5 * size
    with loader.request(1, np.array([3])) as lease:
        assert lease.ready.all()
        assert np.array_equal(blocks(lease)[:, :record], records(packed, 1)[[3], :record])
    assert loader.stats.warm_hits == loader.stats.hits == 1
    assert read(loader, 0).tolist() == [False]
    assert (1, 3) in loader.pools.of[1], "it was used, so another goes first"
    loader.close()


def test_they_are_read_in_the_order_of_the_files(packed, monkeypatch):  # noqa: F811
    monkeypatch.setattr(warming, "IN_ORDER_BYTES", 3 * packed.layout.record.size)
    order, prepare = [], ExpertReader.prepare
    monkeypatch.setattr(ExpertReader, "prepare", lambda *given: order.append(given[1:3]) or prepare(*given))
    rates = np.random.default_rng(0).random((2, EXPERTS)) + 0.1
    rates[1, 2] = 0.0
    warmed(packed, 2 * EXPERTS, rates).close()
    best = sorted(np.ndindex(2, EXPERTS), key=lambda place: -rates[place])[:-1]
    parts = [best[:4], best[4:8], best[8:]]
    assert order == [place for part in parts for place in sorted(part)]


def test_it_evicts_nothing(packed):  # noqa: F811
    loader = StreamedExperts(packed, cache_bytes=3 * packed.layout.record.stride, least_slots=1)
    read(loader, 0), read(loader, 1)
    loader.warm(RATES)
    wait_until(lambda: not loader.warm_between_calls() and not loader.in_flight)
    assert set(loader.pools[0].records()) == {(0, 0), (0, 1), (1, 0)}
    loader.resize(5 * packed.layout.record.stride)
    loader.close()


def test_a_hint_hastens_what_is_queued(packed):  # noqa: F811
    """A record that waits until nobody wants the drive goes with the guesses once it is one."""
    loader, moved = warmed(packed, 5), []
    slot = loader.pools.of[1].get((1, 4))
    slot.warming, slot.read = True, "queued"
    loader.reader.promote = lambda *given: moved.append(given)
    loader.hint([(1, 4), (1, 3)])
    assert moved == [("queued", GUESSED)]
    slot.read = None
    loader.close()


def test_what_is_requested_goes_first(packed):  # noqa: F811
    gate = Gate()
    loader = StreamedExperts(
        packed, cache_bytes=9 * packed.layout.record.stride, reader=ExpertReader(packed, preadv=gate, workers=1)
    )
    lease = loader.request(0, np.array([4]))
    wait_until(lambda: gate.begun == 1)
    loader.warm(RATES)
    with loader.turn(1):  # so that the thread that fills memory waits
        late = loader.request(1, np.array([0]))  # it is queued already, or is read now
        first = loader.request(0, np.array([5]))
        gate.open.set()
        for one in (lease, first, late):
            one.wait()
            one.release()
    wait_until(lambda: not loader.warm_between_calls() and not loader.in_flight)
    assert loader.stats.warmed - loader.stats.late == 6 and loader.stats.warm_hits == loader.stats.late
    loader.close()


def test_a_share_counts_before_another_thread_asks(packed):  # noqa: F811
    reader = ExpertReader(packed, workers=0)
    queue = reader.queues[0]
    for purpose in (REQUESTED, WARMING):
        queue.put(Read(0, 0, memoryview(b""), {}), 1, purpose)
    assert reader.next_read(0)[1] == REQUESTED and queue.active == [1, 0, 0]
    assert reader.next_read(0) is None
    reader.close()


def test_a_drive_does_nothing_else_while_it_fills_memory():
    queue, reads = DriveQueue(), [Read(0, expert, memoryview(b""), {}) for expert in range(5)]
    for read_, purpose in zip(reads, (WARMING, WARMING, WARMING, GUESSED, REQUESTED), strict=True):
        queue.put(read_, 1, purpose)
    queue.warm_reads = 2
    assert queue.next() == (reads[4], REQUESTED)
    queue.active[REQUESTED] += 1
    assert queue.next() == (reads[3], GUESSED)
    queue.active[GUESSED] += 1
    queue.active[REQUESTED] -= 1
    assert queue.next() is None
    queue.active[GUESSED] -= 1
    while not queue.wake.empty():
        queue.wake.get()  # the threads that had to wait sleep again
    for number in (0, 1):
        assert queue.next() == (reads[number], WARMING)
        assert queue.wake.qsize() == number + 1, "another thread is woken for what is left"
        queue.active[WARMING] += 1
    assert queue.next() is None
    queue.clear()
    assert reads[2].is_cancelled and not reads[0].is_cancelled


def test_all_threads_fill_memory_and_none_is_left_behind(packed):  # noqa: F811
    """A thread that may not begin sleeps; the one that it waits for goes on."""
    for workers in (1, 2, 8):
        loader = warmed(packed, 2 * EXPERTS, RATES + 0.1, reader=ExpertReader(packed, workers=workers))
        assert loader.stats.warmed == 2 * EXPERTS
        loader.close()


def test_closing_ends_it(packed):  # noqa: F811
    before, gate = set(threading.enumerate()), Gate()
    loader = StreamedExperts(
        packed, cache_bytes=9 * packed.layout.record.stride, reader=ExpertReader(packed, preadv=gate, workers=1)
    )
    loader.warm(RATES)
    wait_until(lambda: gate.begun)
    gate.open.set()
    loader.close()
    assert not loader.warm_between_calls()
    wait_until(lambda: set(threading.enumerate()) == before)


def test_a_record_that_cannot_be_read_is_left_out(packed):  # noqa: F811
    def broken(fd, buffers, offset):
        if offset == 2 * packed.layout.record.stride:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    loader = warmed(packed, 2 * EXPERTS, RATES + 0.1, reader=ExpertReader(packed, preadv=broken))
    assert set(loader.pools[0].records()) == {key for key in np.ndindex(2, EXPERTS) if key[1] != 2}
    loader.close()


@pytest.mark.parametrize("kind", [{}, {"copied": True}, {"adopt": staging_memory}])
def test_same_bits_while_memory_is_filled(kind, small_waves, monkeypatch):  # noqa: F811
    if kind:
        use_plain_operations(monkeypatch)
    tokens, path, answers = tokens_of("qwen3_moe"), tiny_directory("qwen3_moe"), []
    for is_warm in (False, True):
        model = streamed(path, least_slots=TOP_K, cache_bytes=40 * 16384, **kind)
        if is_warm:
            model.experts.warm(np.ones((len(model.args.moe_layers), model.args.num_experts)))
        answers += [run(model, tokens[:, :20], 20), run(model, tokens[:, :14], 1)]
        assert bool(model.experts.stats.warmed) == is_warm
        model.experts.close()
    assert np.array_equal(answers[0], answers[2]) and np.array_equal(answers[1], answers[3])


def test_usage_counts_steps_alone(packed):  # noqa: F811
    loader = StreamedExperts(packed)
    for tokens, ids in ((1, [[2, 3]]), (2, [[2, 4], [2, 5]]), (400, [1, 2])):
        with loader.turn(tokens), loader.request(0, np.array(ids)) as lease:
            lease.wait()
    assert loader.usage.steps == 2
    assert loader.usage.counts[0].tolist() == [0, 0, 2, 1, 1, 1] and not loader.usage.counts[1].any()
    loader.close()
    assert Usage(packed.layout).counts.shape == (2, EXPERTS)
