"""Launches while a step waits for the disk: when they are made, and that they delay nothing."""

import gc
import importlib
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

from moeflux_mlx import RequestError, load_model
from moeflux_mlx.cli.main import main
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.experts.files import OpenFiles
from moeflux_mlx.experts.keep_warm import EVERY, LONGEST, MODES, KeepWarm, keep_warm_of
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.opening.load_settings import LoadSettings
from moeflux_mlx.ops.stand_ins import standing_in

opening = importlib.import_module("moeflux_mlx.opening.engine")
PATH = tiny_directory("qwen3_moe")


class Source:
    """A source of experts that are read as `mode` says."""

    def __init__(self, mode=IoMode.PREAD):
        self.mode, self.closing = mode, []

    def at_close(self, forget):
        self.closing.append(forget)


class Scene:
    """A `KeepWarm` whose thread is this one, with a clock that only moves when the scene says so."""

    def __init__(self):
        self.now, self.next, self.launches = 100.0, 100.0, []
        self.warm = KeepWarm()
        self.warm.clock = lambda: self.now
        self.warm.thread = threading.current_thread()  # none is started

    def passes(self, seconds):
        """Lets the time pass; the thread looks while a step waits, until it has ended."""
        end = self.now + seconds
        while self.next is not None and self.warm.waiting.is_set() and max(self.next, self.now) <= end:
            self.now = max(self.next, self.now)
            goes_on = self.warm.beat(lambda: self.launches.append(self.now))
            self.next = self.now + EVERY if goes_on else None
        self.now = end


def test_launches_are_made_only_while_a_step_waits():
    scene, waits = Scene(), []
    for _ in range(20):
        with scene.warm:
            begin = scene.now
            scene.passes(0.020)
            waits.append((begin, scene.now))
        scene.passes(0.015)
    assert all(any(begin <= at <= end for begin, end in waits) for at in scene.launches)
    assert 5 * 20 <= len(scene.launches) <= (0.020 / EVERY + 1) * 20
    gaps = [after - before for before, after in zip(scene.launches, scene.launches[1:], strict=False)]
    assert min(gaps) >= EVERY * 0.999


def test_a_launch_that_does_not_end_delays_no_step():
    hangs, entered = threading.Event(), threading.Event()
    warm = KeepWarm()
    warm.make_launch = lambda: lambda: entered.set() or hangs.wait(30)
    with warm:
        assert entered.wait(10)
    begin = time.perf_counter()
    for _ in range(1000):
        with warm:
            pass
    assert time.perf_counter() - begin < 1.0
    hangs.set()
    warm.close()
    warm.thread.join(10)
    assert not warm.thread.is_alive()


def test_the_end_of_a_wait_is_seen_after_an_error_and_an_interrupt():
    scene = Scene()
    with pytest.raises(OSError), scene.warm:
        raise OSError
    scene.passes(1.0)
    assert not scene.launches
    scene.warm.__enter__()  # an interrupt has swallowed its end
    scene.passes(LONGEST + 0.1)
    scene.launches.clear()
    scene.passes(60.0)
    assert not scene.launches
    with scene.warm:
        scene.passes(0.1)
    assert scene.launches


def test_an_error_of_a_launch_ends_the_launches_quietly(capsys):
    def fails():
        raise RuntimeError("out of memory")

    warm = KeepWarm()
    warm.make_launch = lambda: fails
    with warm:
        warm.thread.join(10)
    assert not warm.thread.is_alive() and not capsys.readouterr().err


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_the_thread_ends_with_its_object(closes, sleeps):
    begun = threading.Event()
    warm = KeepWarm()
    warm.make_launch = lambda: begun.set
    with warm:
        thread = warm.thread
        assert begun.wait(10)
    time.sleep(10 * EVERY if sleeps else 0)
    if closes:
        warm.close()
    del warm
    thread.join(10)
    assert not thread.is_alive()


# ---- where it is used


@pytest.fixture
def open_with(monkeypatch):
    """Returns a function that says what opens a model's `KeepWarm`."""
    return lambda open_it: monkeypatch.setattr(opening, "keep_warm_of", open_it)


@pytest.mark.parametrize("io_mode", [IoMode.PREAD, IoMode.RESIDENT, IoMode.MMAP])
@pytest.mark.parametrize("target", ["metal", "cuda", "ops"])
@pytest.mark.parametrize("mode", MODES)
def test_where_launches_are_made(mode, target, io_mode):
    source = Source(io_mode)
    with standing_in(backend=target):
        warm = keep_warm_of(mode, source)
    assert (warm is not None) is (io_mode is IoMode.PREAD and mode == "on" and target == "metal")
    if warm is not None:
        for forget in source.closing:
            forget()
        assert warm.is_closed


def test_an_unknown_mode_is_refused():
    with pytest.raises(RequestError, match="keep_warm 'yes' is not one of on, off"):
        load_model(PATH, set={"keep_warm": "yes"})


def test_several_ranks_have_none(open_with):
    """Their experts are made by what all have agreed."""
    open_with(lambda *_: pytest.fail("launches were asked for"))
    agreed = SimpleNamespace(plan=None, loading=lambda nbytes: nullcontext(), experts=lambda source, prefetch: source)
    setup = opening._with_others(agreed, None, LoadSettings(set={"keep_warm": "on"}), 0)
    assert setup.computing("a source") == "a source"


@pytest.fixture
def slow_disk(monkeypatch):
    """Each read takes 5 ms longer."""
    read = OpenFiles.read_all

    def slowly(files, share, target):
        time.sleep(0.005)
        return read(files, share, target)

    monkeypatch.setattr(OpenFiles, "read_all", slowly)


def answer(mode, count=12):
    """Returns an answer's tokens and the bits of their log-probabilities, with the engine, whose experts are read from
    the disk all the time.
    """
    engine = open_engine(PATH, expert_io="pread", expert_cache_bytes=1, set={"keep_warm": mode}, prefetch="off")
    steps = generate_step([1, 2, 3], engine.model, max_tokens=count)
    return engine, [(token, bytes(memoryview(logprobs.astype(mx.float32)))) for token, logprobs in steps]


def test_a_streamed_answer_launches_and_keeps_its_bits(plain_operations, slow_disk, open_with):
    """Without a GPU a stand-in counts the launches."""
    engine, alone = answer("off")
    engine.experts.close()
    warm, counted = KeepWarm(), []
    warm.make_launch = lambda: lambda: counted.append(threading.current_thread().name)
    modes = []
    open_with(lambda mode, source: modes.append(mode) or source.at_close(warm.close) or warm)
    engine, warmed = answer("on")
    assert modes == ["on"] and warmed == alone and engine.experts.stats.misses > 12
    time.sleep(5 * EVERY)  # one may be under way
    launched = len(counted)
    time.sleep(20 * EVERY)
    assert len(counted) == launched, "no launch comes after the answer"
    most = engine.experts.stats.wait_seconds / EVERY + 12 * len(engine.experts.layout.moe_layers)
    assert set(counted) == {"keep-warm"} and launched <= most
    engine.experts.close()
    warm.thread.join(10)
    assert not warm.thread.is_alive()


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="a step that a GPU compiles refers to the experts too")
def test_a_dropped_model_frees_its_experts_at_once(plain_operations, open_with):
    """The pool may have gigabytes, which no garbage collection must wait for."""
    made = []

    def on_a_mac(mode, source):
        with standing_in(backend="metal"):
            made.append(keep_warm_of(mode, source))
        made[0].make_launch = lambda: lambda: None
        return made[0]

    open_with(on_a_mac)
    engine, _ = answer("on")
    assert made.pop().thread is not None
    experts = weakref.ref(engine.experts)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert experts() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Apple GPU")
def test_a_streamed_answer_launches_on_a_gpu_and_keeps_its_bits(slow_disk):
    engine, alone = answer("off")
    engine.experts.close()
    engine, warmed = answer("on")
    assert warmed == alone and "keep-warm" in {thread.name for thread in threading.enumerate()}
    engine.experts.close()


def test_commands_say_where_the_option_has_no_effect(plain_operations, capsys):
    options = ["--model", str(PATH), "--expert-io", "pread", "-m", "2", "-p", "a", "--set", "keep_warm=on"]
    assert main(["generate", *options]) == 0
    assert "--set keep_warm has no effect without an Apple GPU" in capsys.readouterr().err
    assert main(["generate", *options, "--expert-io", "resident"]) == 0
    assert "--set keep_warm has no effect where experts are resident" in capsys.readouterr().err
