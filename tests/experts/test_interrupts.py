"""After an interrupt at any line or bytecode of a source of experts, the model continues with the same bits."""

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_streaming import TOP_K, run, small_waves, streamed, tokens_of  # noqa: F401 (a fixture)
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.experts import (
    lookahead,
    places,
    pool,
    pool_reads,
    ranking,
    reader,
    reads,
    routed,
    source,
    staging,
    warming,
    waves,
    whole,
)
from moeflux_mlx.experts import streamed as streaming
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.staging import NOWHERE
from moeflux_mlx.opening.engine import load_model

FILES = {
    module.__file__
    for module in (
        *(streaming, pool, pool_reads, staging, ranking, places, reader, reads),
        *(lookahead, warming, waves, source, routed, whole),
    )
}


class Interrupt:
    """Raises KeyboardInterrupt in this thread before the line or bytecode number `at` of `files` that runs within the
    block, counted from 0. `places` has the place of each interrupt."""

    def __init__(self, at=None, opcodes=False, files=FILES):
        self.at, self.opcodes, self.files, self.places = at, opcodes, files, []

    def __enter__(self):
        self.before = sys.gettrace()
        sys._getframe().f_trace_opcodes = self.opcodes  # Python 3.12 looks for such a frame when tracing begins
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _enter(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        return self._step

    def _step(self, frame, event, arg):
        if event == ("opcode" if self.opcodes else "line"):
            self.places.append((frame.f_code, frame.f_lasti if self.opcodes else frame.f_lineno))
            if len(self.places) - 1 == self.at:
                raise KeyboardInterrupt
        return self._step


def interrupted(work, **where):
    """Runs `work`, which is interrupted.

    Returns the error, which keeps all frames, as `sys.last_exc` does in a terminal.
    """
    try:
        with Interrupt(**where):
            work()
    except KeyboardInterrupt as error:
        return error
    return None  # it was cleaning up after itself, where nothing can be raised


def check_pools(loader):
    """Checks that nothing is held or under way, and that each row of memory has one owner."""
    loader.drain()
    for one in getattr(loader, "pools", ()):
        assert not one.in_flight() and not one.pinned_besides([])
        rows = [slot.row for slot in map(one.get, one.records()) if slot.row != NOWHERE]
        rows += one.staging.host.owned if one.copied else []
        assert sorted([*one.places.free, *rows]) == list(one.places.staying())


def slow(fd, buffers, offset):
    time.sleep(5e-4)
    return os.preadv(fd, buffers, offset)


KINDS = {
    "the least pool": {"least_slots": TOP_K, "cache_bytes": 1},
    "a larger pool": {"least_slots": TOP_K, "cache_bytes": 40 * 16384},
    "nothing ahead": {"least_slots": TOP_K, "cache_bytes": 12 * 16384, "prefetch": "off"},
    "copied": {"least_slots": TOP_K, "cache_bytes": 12 * 16384, "copied": True},
    "on the host": {"least_slots": TOP_K, "cache_bytes": 8 * 16384, "copied": True, "host_bytes": 20 * 16384},
    "in buffers": {"least_slots": TOP_K, "cache_bytes": 1 << 30, "adopt": staging_memory},
    "queued reads": {"least_slots": TOP_K, "cache_bytes": 20 * 16384, "workers": 1, "preadv": slow},
    "warming": {"least_slots": TOP_K, "cache_bytes": 40 * 16384, "workers": 1, "preadv": slow},
    "mapped": None,
}


class Endless(warming.Warming):
    """Begins anew whenever there is room."""

    def feed(self):
        self._rest.extend(self._uses)
        super().feed()


@pytest.fixture(params=KINDS)
def model(request, small_waves, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # what is raised while something is freed ends there
    options, path = KINDS[request.param], tiny_directory("qwen3_moe")
    if request.param in ("copied", "in buffers", "on the host"):
        use_plain_operations(monkeypatch)
    if request.param in ("in buffers", "warming"):  # memory is given back and taken again in every second call
        sizes = itertools.cycle([1 << 30, 20 * 16384])
        options = options | {"allowance": lambda tokens, held: next(sizes)}
    threads = set(threading.enumerate())
    made = streamed(path, **options) if options else load_model(path, dtype=mx.float32, expert_io="mmap")
    if request.param == "warming":
        rates = np.ones((len(made.args.moe_layers), made.args.num_experts))
        made.experts._warming = Endless(made.experts.reads, made.experts.layout, rates)
    yield made
    made.experts.close()
    assert set(threading.enumerate()) <= threads


def decoding(model):
    cache = model.make_cache()
    mx.eval(model(mx.array([[3]]), cache))
    return lambda: mx.eval(model(mx.array([[7]]), cache))


def prompting(model):
    return lambda: mx.eval(model(TOKENS[:, :20], model.make_cache()))


TOKENS = tokens_of("qwen3_moe")
WORK = {"tokens": decoding, "a prompt": prompting}


def answers(model):
    return run(model, TOKENS[:, :20], 20), run(model, TOKENS[:, :3], 1)


def check_answers(model, want):
    assert all(map(np.array_equal, answers(model), want))
    check_pools(model.experts)


def sweep(model, work, opcodes, most=None):
    """Interrupts `work` once at each place that it reaches, or at `most` of them."""
    draw, want = random.Random(0), answers(model)
    with Interrupt(opcodes=opcodes) as whole_of_it:
        work(model)()
    assert whole_of_it.places
    times = {}
    for at, place in enumerate(whole_of_it.places):
        times.setdefault(place, []).append(at)
    for place in draw.sample(list(times), min(most or len(times), len(times))):
        kept = interrupted(work(model), at=draw.choice(times[place]), opcodes=opcodes)
        assert np.array_equal(run(model, TOKENS[:, :1], 1), want[1][:1])
        check_pools(model.experts)
        del kept
    check_answers(model, want)


EVENTS = pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "bytecodes"])


SOME = drawn(KINDS, WORK.values(), [False, True], turns=2)


@pytest.mark.parametrize("model, work, opcodes", SOME, indirect=["model"])
def test_a_model_goes_on_after_an_interrupt(model, work, opcodes):
    sweep(model, work, opcodes, most=5)


@pytest.mark.parametrize(
    "model", [pytest.param("the least pool", marks=pytest.mark.full), "queued reads"], indirect=True
)
def test_a_model_goes_on_after_an_interrupt_at_any_line(model):
    sweep(model, decoding, opcodes=False)


@pytest.mark.full
@EVENTS
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_model_goes_on_after_an_interrupt_anywhere(model, work, opcodes):
    sweep(model, work, opcodes)


def test_200_interrupts_in_a_row(model):
    """Each interrupt comes within the first lines of a token, so that no call repairs everything in between."""
    want, draw, kept = answers(model), random.Random(0), None
    for _ in range(200):
        kept = interrupted(lambda: mx.eval(model(mx.array([[5]]))), at=draw.randrange(300)) or kept
    check_answers(model, want)


def test_200_signals_in_a_row(model):
    """The signals come at any moment, also inside Python's own library. Other threads can continue afterwards."""
    want, draw = answers(model), random.Random(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for work in itertools.islice(itertools.cycle([decoding(model), prompting(model)]), 200):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2e-3))
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check_answers(model, want)
    with ThreadPoolExecutor(1) as other:
        other.submit(check_answers, model, want).result()


@pytest.mark.usefixtures("plain_operations")
def test_what_an_interrupted_call_left_lazy_does_not_stop_other_threads(monkeypatch):
    """A turn ends by evaluating lazy arrays that read the pool's own memory. No other thread can evaluate them."""
    model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=1, adopt=staging_memory)
    want = run(model, TOKENS[:, :3], 1)

    def broken_off(*arrays):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mx, "async_eval", broken_off)
        model(TOKENS[:, :1])
    with ThreadPoolExecutor(1) as other:
        assert np.array_equal(other.submit(lambda: run(model, TOKENS[:, :3], 1)).result(), want)
    model.experts.close()


@EVENTS
def test_an_interrupted_close_is_completed_by_the_next(opcodes):
    threads, draw = set(threading.enumerate()), random.Random(opcodes)
    for end in (10, 100, 1000):
        model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=1)
        model(TOKENS[:, :1])
        interrupted(model.experts.close, at=draw.randrange(end), opcodes=opcodes)
        model.experts.close()
        assert set(threading.enumerate()) <= threads
