"""Launches while a step waits for the disk: when they are made, that they delay nothing, and the comparison."""

import gc
import importlib
import subprocess
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
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.kept import keep_warm
from moeflux_mlx.kept.keep_warm import (
    EVERY,
    LONGEST,
    MODES,
    ORDER,
    POWER_SECONDS,
    TURN,
    KeepWarm,
    WarmTimes,
    keep_warm_file,
    keep_warm_of,
    on_mains,
)
from moeflux_mlx.kept.kept_rows import keep_row, read_rows
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.ops.stand_ins import standing_in

opening = importlib.import_module("moeflux_mlx.opening.engine")
PATH = tiny_directory("qwen3_moe")
ALL = TURN * len(ORDER)
KEY = {"gpu": "M1", "mlx": "0.32.4", "model": "/models/a"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Source:
    """A source of experts that are read as `mode` says."""

    layout = SimpleNamespace(moe_layers=[3, 4])

    def __init__(self, mode=IoMode.PREAD):
        self.mode, self.closing, self.is_filling = mode, [], False

    def at_close(self, forget):
        self.closing.append(forget)


class Scene:
    """A `KeepWarm` whose thread is this one, with a clock that only moves when the scene says so."""

    def __init__(self, always=False):
        self.now, self.next, self.launches, self.is_powered, self.asked = 100.0, 100.0, [], True, 0
        self.source = Source()
        self.warm = KeepWarm(self.source, KEY, always)
        self.warm.clock, self.warm.on_mains = lambda: self.now, self._power
        self.warm.thread = threading.current_thread()  # none is started

    def _power(self):
        self.asked += 1
        return self.is_powered

    def passes(self, seconds):
        """Lets the time pass; the thread looks while a step waits, until it has ended."""
        end = self.now + seconds
        while self.next is not None and self.warm.waiting.is_set() and max(self.next, self.now) <= end:
            self.now = max(self.next, self.now)
            goes_on = self.warm.beat(lambda: self.launches.append(self.now))
            self.next = self.now + EVERY if goes_on else None
        self.now = end

    def step(self, waits, computes, rows=1, layers=(3, 4)):
        """A step of the model: each layer waits for the disk, then the GPU computes."""
        for layer in layers:
            with self.warm(layer, rows):
                self.passes(waits / len(layers))
            self.passes(computes / len(layers))


def helpful(off=0.2, on=0.1, **key):
    keep_row(keep_warm_file(), {**KEY, **key, "off": off, "on": on}, *KEY)


def test_launches_are_made_only_while_a_step_waits():
    scene, waits = Scene(always=True), []
    for _ in range(20):
        with scene.warm(3, 1):
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
    warm = KeepWarm(Source(), KEY, always=True)
    warm.make_launch = lambda: lambda: entered.set() or hangs.wait(30)
    with warm(3, 1):
        assert entered.wait(10)
    begin = time.perf_counter()
    for layer in range(1000):
        with warm(layer % 40, 1):
            pass
    assert time.perf_counter() - begin < 1.0
    hangs.set()
    warm.close()
    warm.thread.join(10)
    assert not warm.thread.is_alive()


def test_the_end_of_a_wait_is_seen_after_an_error_and_an_interrupt():
    scene = Scene(always=True)
    with pytest.raises(OSError), scene.warm(3, 1):
        raise OSError
    scene.passes(1.0)
    assert not scene.launches
    scene.warm(3, 1).__enter__()  # an interrupt has swallowed its end
    scene.passes(LONGEST + 0.1)
    scene.launches.clear()
    scene.passes(60.0)
    assert not scene.launches
    scene.step(0.1, 0.1)
    assert scene.launches


def test_an_error_of_a_launch_ends_the_launches_quietly(capsys):
    def fails():
        raise RuntimeError("out of memory")

    warm = KeepWarm(Source(), KEY, always=True)
    warm.make_launch = lambda: fails
    with warm(3, 1):
        warm.thread.join(10)
    assert not warm.thread.is_alive() and not capsys.readouterr().err


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_the_thread_ends_with_its_object(closes, sleeps):
    source, begun = Source(), threading.Event()
    warm = KeepWarm(source, KEY, always=True)
    warm.make_launch = lambda: begun.set
    with warm(3, 1):
        thread = warm.thread
        assert begun.wait(10)
    time.sleep(10 * EVERY if sleeps else 0)
    if closes:
        source.closing[0]()
    del source, warm
    thread.join(10)
    assert not thread.is_alive()


# ---- on battery


@pytest.mark.parametrize(("always", "launches"), [(True, True), (False, False)])
def test_on_battery_launches_are_made_only_if_asked_for(always, launches):
    helpful()
    scene = Scene(always)
    scene.is_powered = False
    for _ in range(100):
        scene.step(0.1, 0.1)
    assert bool(scene.launches) is launches and scene.asked == (0 if always else 1)


def test_power_is_asked_for_again_after_a_minute_with_waits():
    helpful()
    scene = Scene()
    scene.is_powered = False
    scene.step(0.1, 0.1)
    scene.is_powered = True
    for _ in range(int(POWER_SECONDS / 0.2) + 2):
        scene.step(0.1, 0.1)
    assert scene.asked == 2 and scene.launches
    scene.passes(3600.0)
    assert scene.asked == 2


@pytest.mark.parametrize(
    ("said", "mains"),
    [
        (b"Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged\n", True),
        (b"Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t53%; discharging\n", False),
        (b"", True),
        (subprocess.TimeoutExpired("pmset", 10), True),
        (FileNotFoundError(), True),
    ],
)
def test_pmset_is_understood(said, mains, monkeypatch):
    def run(call, **_):
        if isinstance(said, Exception):
            raise said
        return SimpleNamespace(stdout=said)

    monkeypatch.setattr(subprocess, "run", run)
    assert on_mains() is mains


# ---- the comparison


def compare(scene, seconds):
    """Runs steps until the comparison is over; `seconds` returns those of a step, by its number and whether it
    launches.
    """
    turns = []
    while scene.warm.measured is None:
        before, count = len(scene.launches), len(turns)
        scene.step(seconds(count, ORDER[len(scene.warm.seconds) // TURN]) - 0.1, 0.1)
        turns.append(len(scene.launches) > before)
        assert count < 2 * ALL
    return turns


@pytest.mark.parametrize(("gain", "helps"), [(1.35, True), (1.03, True), (1.01, False), (1.0, False), (0.9, False)])
def test_the_faster_way_is_kept_and_used(gain, helps):
    scene = Scene()
    turns = compare(scene, lambda count, launches: 0.4 if launches else 0.4 * gain)
    kept = [WarmTimes.of_row(row) for row in read_rows(keep_warm_file())]
    assert kept == [scene.warm.measured] and kept[0].helps is helps
    assert kept[0].on == pytest.approx(0.4) and kept[0].off == pytest.approx(0.4 * gain)
    assert sum(turns) == pytest.approx(ALL // 2, abs=4) and not any(turns[1:TURN]) and all(turns[TURN + 3 : 3 * TURN])
    scene.launches.clear()
    for _ in range(10):
        scene.step(0.3, 0.1)
    assert bool(scene.launches) is helps
    assert scene.warm.said == (
        f"keep-warm: {'on' if helps else 'off'}: a token took 400.0 ms with launches and {400 * gain:.1f} ms without"
    )
    if not helps:
        assert scene.next is None  # the thread has ended


def test_a_steady_drift_and_pauses_between_answers_do_not_decide():
    scene = Scene()
    compare(scene, lambda count, _: (0.4 - 0.0005 * count) * (50 if count % 40 == 7 else 1))
    measured = scene.warm.measured
    assert measured.off == pytest.approx(measured.on, rel=0.02) and not measured.helps


@pytest.mark.parametrize("gain", [1.2, 0.9])
def test_a_machine_that_sleeps_in_some_steps_decides_nothing_by_it(gain):
    scene = Scene()
    slept = (TURN + 5, 2 * TURN + 9, 3 * TURN + 1)
    compare(scene, lambda count, launches: (0.4 if launches else 0.4 * gain) + 3600 * (count in slept))
    measured = scene.warm.measured
    assert measured.off == pytest.approx(gain * measured.on, rel=0.02) and measured.helps is (gain > 1)


def test_other_steps_do_not_count():
    """Neither steps on battery, nor of several rows, whose time is another, nor those of a pool that fills."""
    scene = Scene()
    scene.is_powered = False
    for _ in range(10):
        scene.step(0.1, 0.1)
    assert not scene.launches
    scene.passes(POWER_SECONDS)
    scene.is_powered = scene.source.is_filling = True
    for rows in (1, 1, 1, 3, 3):
        scene.source.is_filling = rows == 1
        scene.step(0.3, 0.1, rows)
    scene.source.is_filling = False
    assert scene.warm.said == f"keep-warm: 0 of {ALL} tokens compared, by turns with and without launches"
    for rows in (1, 2, 1, 1):
        scene.step(0.3, 0.1, rows)
    assert f" 2 of {ALL} tokens" in scene.warm.said  # those whose end is known


def test_a_token_that_fills_the_pool_in_a_later_layer_does_not_count():
    scene, layers = Scene(), (3, 4, 5)
    scene.source.is_filling = True
    scene.step(0.3, 0.1, layers=layers)  # in which the power is asked for
    for fills in (3, 4, 5, 5, None, None):
        for layer in layers:  # as the loader has it: since the token's beginning
            scene.source.is_filling = fills is not None and layer >= fills
            scene.step(0.1, 0.1, layers=[layer])
    assert f" 1 of {ALL} tokens" in scene.warm.said  # the last but one, as the end of the last is not known


def test_results_are_stored_by_gpu_and_model():
    for row in ({}, {"gpu": "M3"}, {"model": "/models/b"}, {"mlx": "0.33.0"}):
        warm = KeepWarm(Source(), {**KEY, **row})
        warm.clock = iter([0.0, *range(1, ALL + 1)]).__next__
        warm._is_powered = True
        for _ in range(ALL + 1):
            warm(3, 1)
    found = {(row["gpu"], row["mlx"], row["model"]) for row in read_rows(keep_warm_file())}
    assert found == {("M3", "0.32.4", "/models/a"), ("M1", "0.32.4", "/models/b"), ("M1", "0.33.0", "/models/a")}


@pytest.mark.parametrize("value", ['"fast"', "-1.0", "0.0", "null", "1"])
def test_a_damaged_result_is_not_used(value):
    helpful(0.25, 0.125)
    assert KeepWarm(Source(), KEY).measured == WarmTimes(0.25, 0.125)
    keep_warm_file().write_text(keep_warm_file().read_text().replace("0.125", value))
    assert KeepWarm(Source(), KEY).measured is None


def test_a_result_that_cannot_be_stored_is_used(tmp_path):
    (tmp_path / "moeflux").touch()  # in the place of the directory
    scene = Scene()
    compare(scene, lambda count, launches: 0.3 if launches else 0.4)
    assert scene.warm.measured.helps


# ---- where it is used


@pytest.fixture
def an_m1(monkeypatch):
    monkeypatch.setattr(keep_warm, "gpu_name", lambda: "Apple M1")


@pytest.fixture
def open_with(monkeypatch):
    """Returns a function that says what opens a model's `KeepWarm`."""
    return lambda open_it: monkeypatch.setattr(opening, "keep_warm_of", open_it)


@pytest.mark.parametrize("io_mode", [IoMode.PREAD, IoMode.RESIDENT, IoMode.MMAP])
@pytest.mark.parametrize("target", ["metal", "cuda", "ops"])
@pytest.mark.parametrize("mode", MODES)
def test_where_launches_are_made(mode, target, io_mode, an_m1):
    source = Source(io_mode)
    with standing_in(backend=target):
        warm = keep_warm_of(mode, PATH, source)
    assert (warm is not None) is (io_mode is IoMode.PREAD and mode != "off" and target == "metal")
    if warm is not None:
        assert warm.said.startswith("keep-warm: on" if mode == "on" else f"keep-warm: 0 of {ALL} tokens compared")
        for forget in source.closing:
            forget()
        assert warm.is_closed


def test_a_stored_result_is_used_and_a_new_mlx_measures_again():
    helpful(0.5, 0.25)
    assert "on: a token took 250.0 ms" in KeepWarm(Source(), KEY).said
    assert KeepWarm(Source(), KEY, always=True).said == "keep-warm: on"
    assert "tokens compared" in KeepWarm(Source(), {**KEY, "mlx": "99"}).said


def test_an_unknown_mode_is_refused():
    with pytest.raises(RequestError, match="keep_warm 'yes' is not one of auto, on, off"):
        load_model(PATH, set={"keep_warm": "yes"})


@pytest.mark.parametrize("mode", MODES)
def test_several_ranks_have_none(mode, monkeypatch):
    class Reached(Exception):
        pass

    def loaded(weights, setup, *_):
        raise Reached(setup.warmth)

    agreed = SimpleNamespace(plan=None, loading=lambda nbytes: nullcontext())
    ranks = SimpleNamespace(io_mode=lambda asked, weights: asked, meet=lambda *given: agreed)
    monkeypatch.setattr(opening, "_loaded", loaded)
    with pytest.raises(Reached, match="^off$"):
        load_model(PATH, set={"keep_warm": mode}, ranks=ranks)


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
    the disk all the time."""
    engine = open_engine(PATH, expert_io="pread", expert_cache_bytes=1, set={"keep_warm": mode}, prefetch="off")
    steps = generate_step([1, 2, 3], engine.model, max_tokens=count)
    return engine, [(token, bytes(memoryview(logprobs.astype(mx.float32)))) for token, logprobs in steps]


def test_a_streamed_answer_launches_and_keeps_its_bits(plain_operations, slow_disk, open_with):
    """Without a GPU a stand-in counts the launches."""
    engine, alone = answer("off")
    assert engine.keep_warm is None
    engine.experts.close()
    counted = []

    def counting(mode, path, source):
        warm = KeepWarm(source, KEY, always=True)
        warm.make_launch = lambda: lambda: counted.append(threading.current_thread().name)
        return warm

    open_with(counting)
    engine, warmed = answer("on")
    assert warmed == alone and engine.experts.stats.misses > 12
    time.sleep(5 * EVERY)  # one may be under way
    launched = len(counted)
    time.sleep(20 * EVERY)
    assert len(counted) == launched, "no launch comes after the answer"
    most = engine.experts.stats.wait_seconds / EVERY + 12 * len(engine.experts.layout.moe_layers)
    assert set(counted) == {"keep-warm"} and launched <= most
    engine.experts.close()
    engine.keep_warm.thread.join(10)
    assert not engine.keep_warm.thread.is_alive()


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="a step that a GPU compiles refers to the experts too")
def test_a_dropped_model_frees_its_experts_at_once(plain_operations, open_with, an_m1):
    """The pool may have gigabytes, which no garbage collection must wait for."""

    def on_a_mac(mode, path, source):
        with standing_in(backend="metal"):
            warm = keep_warm_of(mode, path, source)
        warm.make_launch = lambda: lambda: None
        return warm

    open_with(on_a_mac)
    engine, _ = answer("auto")
    assert f"0 of {ALL} tokens" in engine.keep_warm.said
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
    assert warmed == alone and engine.keep_warm.thread.is_alive()
    engine.experts.close()


def test_commands_pass_the_option_on_and_say_what_is_done(plain_operations, capsys, open_with):
    modes = []

    def made(mode, path, source):
        modes.append(mode)
        helpful(0.02, 0.015)
        warm = KeepWarm(source, KEY)
        warm.make_launch = lambda: lambda: None
        return warm

    open_with(made)
    options = ["--model", str(PATH), "--expert-io", "pread", "-m", "2", "-p", "a", "--set", "keep_warm=on"]
    assert main(["generate", *options, "--verbose"]) == 0
    line = "keep-warm: on: a token took 15.0 ms with launches and 20.0 ms without\n"
    assert capsys.readouterr().err.count(line) == 2 and modes == ["on"]
    assert main(["generate", *options]) == 0
    err = capsys.readouterr().err
    assert line not in err and "--set keep_warm has no effect without an Apple GPU" in err
    open_with(lambda *given: None)
    assert main(["generate", *options, "--expert-io", "resident"]) == 0
    assert "--set keep_warm has no effect where experts are resident" in capsys.readouterr().err
