"""Launches while a step waits for the disk: when they are made, that they delay nothing, and the trial."""

import gc
import importlib
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

from moeflux_mlx import RequestError, load_model
from moeflux_mlx.cli.main import main
from moeflux_mlx.engine import keep_warm
from moeflux_mlx.engine.engine import open_engine
from moeflux_mlx.engine.generation import generate_step
from moeflux_mlx.engine.keep_warm import (
    EVERY,
    LONGEST,
    MODES,
    ORDER,
    PATIENCE,
    POWER_SECONDS,
    TURN,
    KeepWarm,
    WarmTimes,
    WarmTrial,
    keep_measured,
    keep_warm_file,
    keep_warm_of,
    on_mains,
    read_measured,
)
from moeflux_mlx.experts.files import OpenFiles
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.ops.backend import has_kernels
from moeflux_mlx.ops.stand_ins import standing_in

opening = importlib.import_module("moeflux_mlx.engine.engine")
PATH = tiny_directory("qwen3_moe")
ALL = TURN * len(ORDER)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Scene:
    """A `KeepWarm` whose thread is this one, with a clock that only moves when the scene says so."""

    def __init__(self, **options):
        self.now, self.next, self.launches, self.kept, self.is_powered, self.asked = 100.0, 100.0, [], [], True, 0
        self.warm = KeepWarm(
            lambda: lambda: self.launches.append(self.now),
            3,
            clock=lambda: self.now,
            keep=self.kept.append,
            on_mains=self._power,
            **options,
        )
        self.warm.thread = threading.current_thread()  # none is started

    def _power(self):
        self.asked += 1
        return self.is_powered

    def passes(self, seconds):
        """Lets the time pass; the thread looks when it wanted to, or when it is woken."""
        end = self.now + seconds
        while True:
            if self.warm.wake.is_set():
                self.warm.wake.clear()
                self.next = self.now
            if self.next is None or self.next > end:
                break
            self.now = max(self.next, self.now)
            pause = self.warm.beat()
            self.next = None if pause is None else self.now + pause
        self.now = end

    def step(self, waits, computes, rows=1, layers=(3, 4)):
        """A step of the model: each layer waits for the disk, then the GPU computes."""
        for layer in layers:
            with self.warm(layer, rows):
                self.passes(waits / len(layers))
            self.passes(computes / len(layers))


def test_launches_are_made_only_while_a_step_waits():
    scene = Scene(always=True)
    waits = []
    for _ in range(20):
        with scene.warm(3, 1):
            begin = scene.now
            scene.passes(0.020)
            waits.append((begin, scene.now))
        scene.passes(0.015)
    assert all(any(begin <= at <= end for begin, end in waits) for at in scene.launches)
    assert 5 * 20 <= len(scene.launches) == scene.warm.launched <= (0.020 / EVERY + 1) * 20
    gaps = [after - before for before, after in zip(scene.launches, scene.launches[1:], strict=False)]
    assert min(gaps) >= EVERY * 0.999
    scene.launches.clear()
    scene.passes(10.0)
    assert not scene.launches


def test_between_answers_the_thread_sleeps_and_the_next_wait_wakes_it():
    scene = Scene(always=True)
    scene.step(0.1, 0.1)
    scene.passes(PATIENCE + 0.01)
    looks = []
    beat, scene.warm.beat = scene.warm.beat, lambda: looks.append(scene.now) or beat()
    scene.passes(3600.0)
    assert not looks
    begin = len(scene.launches)
    scene.step(0.1, 0.0)
    assert len(scene.launches) > begin + 20
    for _ in range(100):  # waits that are over before the thread looks: it does not fall asleep and is not woken again
        scene.step(0.0, 0.01)
        assert not scene.warm.wake.is_set()


def test_a_launch_that_does_not_end_delays_no_step():
    hangs, entered = threading.Event(), threading.Event()

    def launch():
        entered.set()
        hangs.wait(30)

    warm = KeepWarm(lambda: launch, 0, always=True)
    with warm(0, 1):
        assert entered.wait(10)
    begin = time.perf_counter()
    for layer in range(1000):
        with warm(layer % 40, 1):
            pass
    assert time.perf_counter() - begin < 1.0 and warm.launched == 0
    hangs.set()
    warm.close()
    warm.thread.join(10)
    assert not warm.thread.is_alive()


def test_an_error_of_a_step_ends_its_wait():
    scene = Scene(always=True)
    with pytest.raises(OSError), scene.warm(3, 1):
        raise OSError
    scene.passes(1.0)
    assert not scene.launches


def test_a_wait_whose_end_an_interrupt_has_swallowed_ends_by_itself():
    scene = Scene(always=True)
    scene.step(0.1, 0.1)
    scene.warm(3, 1).__enter__()
    scene.passes(LONGEST + 0.1)
    scene.launches.clear()
    scene.passes(60.0)
    assert not scene.launches
    scene.step(0.1, 0.1)
    assert scene.launches


def test_an_error_of_a_launch_ends_the_launches_quietly(capsys):
    def fails():
        raise RuntimeError("out of memory")

    warm = KeepWarm(lambda: fails, 0, always=True)
    with warm(0, 1):
        warm.thread.join(10)
    assert not warm.thread.is_alive() and not capsys.readouterr().err


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_the_thread_ends_with_its_object(closes, sleeps, monkeypatch):
    monkeypatch.setattr(keep_warm, "PATIENCE", 0.0 if sleeps else PATIENCE)
    warm = KeepWarm(lambda: lambda: None, 0, always=True)
    with warm(0, 1):
        thread = warm.thread
    while sleeps and not warm._is_parked:
        time.sleep(0.001)
    time.sleep(0.01)
    if closes:
        warm.close()
    else:
        del warm
    thread.join(10)
    assert not thread.is_alive()


# ---- on battery


@pytest.mark.parametrize(("always", "launches"), [(True, True), (False, False)])
def test_on_battery_launches_are_made_only_if_asked_for(always, launches):
    scene = Scene(always=always, measured=WarmTimes(0.2, 0.1))
    scene.is_powered = False
    for _ in range(100):
        scene.step(0.1, 0.1)
    assert bool(scene.launches) is launches and scene.asked == (0 if always else 1)


def test_power_is_asked_for_again_after_a_minute():
    scene = Scene(measured=WarmTimes(0.2, 0.1))
    scene.is_powered = False
    scene.step(0.1, 0.1)
    scene.is_powered = True
    for _ in range(int(POWER_SECONDS / 0.2) + 2):
        scene.step(0.1, 0.1)
    assert scene.asked == 2 and scene.launches


def test_an_idle_hour_has_no_question_of_power():
    scene = Scene(measured=WarmTimes(0.2, 0.1))
    scene.step(0.1, 0.1)
    assert scene.asked == 1
    scene.passes(3600.0)
    assert scene.asked == 1 and scene.next == inf
    scene.step(0.1, 0.1)
    assert scene.asked == 2


def test_tokens_on_battery_do_not_count_in_a_trial():
    scene = Scene()
    scene.is_powered = False
    for _ in range(20):
        scene.step(0.1, 0.1)
    assert scene.warm.said.startswith(f"keep-warm: 0 of {ALL} tokens") and not scene.launches


@pytest.mark.parametrize(
    ("said", "mains"),
    [
        (b"Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged\n", True),
        (b"Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t53%; discharging\n", False),
        (b"Now drawing from 'AC Power'\n", True),
        (b"", True),
    ],
)
def test_pmset_is_understood(said, mains, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda call, **_: SimpleNamespace(stdout=said))
    assert on_mains() is mains


def test_where_pmset_does_not_run_there_is_no_battery(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert on_mains()  # there is none here

    def fails(call, **_):
        raise subprocess.TimeoutExpired(call, 10)

    monkeypatch.setattr(subprocess, "run", fails)
    assert on_mains()


# ---- the trial


def run_trial(scene, seconds):
    """Runs steps until the trial is over; `seconds` returns those of a step, by its number and whether it launches."""
    turns, count = [], 0
    while not scene.kept:
        launches = scene.warm.trial.launches
        before = len(scene.launches)
        waits = seconds(count, launches) - 0.1
        scene.step(waits, 0.1)
        turns.append(len(scene.launches) > before)
        count += 1
        assert count < 2 * ALL
    return turns


@pytest.mark.parametrize(("gain", "helps"), [(1.35, True), (1.03, True), (1.01, False), (1.0, False), (0.9, False)])
def test_the_faster_way_is_kept_and_used(gain, helps):
    scene = Scene()
    turns = run_trial(scene, lambda count, launches: 0.4 if launches else 0.4 * gain)
    assert [measured.helps for measured in scene.kept] == [helps]
    assert scene.kept[0].on == pytest.approx(0.4) and scene.kept[0].off == pytest.approx(0.4 * gain)
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
    run_trial(scene, lambda count, _: (0.4 - 0.0005 * count) * (50 if count % 40 == 7 else 1))
    assert scene.kept[0].off == pytest.approx(scene.kept[0].on, rel=0.02) and not scene.kept[0].helps


def test_other_steps_do_not_count():
    """Neither steps of several rows, whose time is another, nor those of a pool that fills."""
    is_filling = True
    scene = Scene(is_filling=lambda: is_filling)
    for _ in range(10):
        scene.step(0.3, 0.1)
    is_filling = False
    for _ in range(10):
        scene.step(0.3, 0.1, rows=3)
    assert f" 0 of {ALL} tokens" in scene.warm.said
    for rows in (1, 2, 1, 1):
        scene.step(0.3, 0.1, rows)
    assert f" 2 of {ALL} tokens" in scene.warm.said  # those whose end is known


def test_a_token_that_fills_the_pool_in_a_later_layer_does_not_count():
    filled, layers = [], (3, 4, 5)
    scene = Scene(is_filling=lambda: bool(filled))
    scene.step(0.3, 0.1, layers=layers)  # in which the power is asked for
    for fills in (3, 4, 5, 5, None, None):
        for layer in layers:  # as the loader has it: since the token's beginning
            filled[:] = [1] if fills is not None and layer >= fills else []
            scene.step(0.1, 0.1, layers=[layer])
    assert f" 1 of {ALL} tokens" in scene.warm.said  # the last but one, as the end of the last is not known


def test_a_trial_takes_equally_many_turns_of_both():
    trial, order = WarmTrial(), []
    while not trial.is_over:
        order.append(trial.launches)
        trial.add(2.0 if trial.launches else 3.0)
    trial.add(1000.0)
    assert trial.result == WarmTimes(3.0, 2.0) and not trial.launches
    assert len(order) == ALL and sum(order) == ALL / 2
    assert sum(i for i, on in enumerate(order) if on) == sum(i for i, on in enumerate(order) if not on)


def test_results_are_stored_by_gpu_and_model():
    def key(gpu, mlx="0.32.4", model="/models/a"):
        return {"gpu": gpu, "mlx": mlx, "model": model}

    keep_measured(key("M1"), WarmTimes(0.2, 0.1))
    keep_measured(key("M3"), WarmTimes(0.3, 0.1))
    keep_measured(key("M1", model="/models/b"), WarmTimes(0.4, 0.1))
    keep_measured(key("M1", "0.33.0"), WarmTimes(0.5, 0.1))
    found = {(one["gpu"], one["mlx"], one["model"]): measured.off for one, measured in read_measured(keep_warm_file())}
    assert found == {
        ("M3", "0.32.4", "/models/a"): 0.3,
        ("M1", "0.32.4", "/models/b"): 0.4,
        ("M1", "0.33.0", "/models/a"): 0.5,
    }


@pytest.mark.parametrize("value", ['"fast"', "-1.0", "0.0", "null", "1"])
def test_a_damaged_result_is_not_used(value):
    keep_measured({"gpu": "M1", "mlx": "1", "model": "m"}, WarmTimes(0.25, 0.125))
    assert read_measured(keep_warm_file())
    keep_warm_file().write_text(keep_warm_file().read_text().replace("0.125", value))
    assert not read_measured(keep_warm_file())


def test_a_result_that_cannot_be_stored_is_measured_again(monkeypatch):
    def full(file, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moeflux_mlx.engine.kept_rows.replace_file", full)
    keep_measured({"gpu": "M1", "mlx": "1", "model": "m"}, WarmTimes(0.25, 0.125))


# ---- where it is used


class Source:
    """A source of experts that are read as `mode` says."""

    is_filling = False
    layout = SimpleNamespace(moe_layers=[2, 3])

    def __init__(self, mode):
        self.mode, self.closing = mode, []

    def at_close(self, forget):
        self.closing.append(forget)


@pytest.mark.parametrize("io_mode", [IoMode.PREAD, IoMode.RESIDENT, IoMode.MMAP])
@pytest.mark.parametrize("target", ["metal", "cuda", "ops"])
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_where_launches_are_made(mode, target, io_mode, monkeypatch):
    monkeypatch.setattr(keep_warm, "gpu_name", lambda: "Apple M1")
    source = Source(io_mode)
    with standing_in(backend=target):
        warm = keep_warm_of(mode, PATH, source)
    wanted = io_mode is IoMode.PREAD and (mode, target) in (("auto", "metal"), ("on", "metal"), ("on", "cuda"))
    assert (warm is not None) is wanted
    if warm is not None:
        assert warm.said.startswith("keep-warm: on" if mode == "on" else f"keep-warm: 0 of {ALL} tokens compared")
        for forget in source.closing:
            forget()
        assert warm.is_closed


def test_a_stored_result_is_used_and_a_new_mlx_measures_again(monkeypatch):
    monkeypatch.setattr(keep_warm, "gpu_name", lambda: "Apple M1")
    with standing_in(backend="metal"):
        keep_warm_of("auto", PATH, Source(IoMode.PREAD)).keep(WarmTimes(0.5, 0.25))
        assert "on: a token took 250.0 ms" in keep_warm_of("auto", PATH, Source(IoMode.PREAD)).said
        assert keep_warm_of("on", PATH, Source(IoMode.PREAD)).said == "keep-warm: on"
        monkeypatch.setattr(keep_warm, "mlx_version", lambda: "99")
        assert "tokens compared" in keep_warm_of("auto", PATH, Source(IoMode.PREAD)).said


def test_an_unknown_mode_is_refused():
    with pytest.raises(RequestError, match="keep_warm 'yes' is not one of auto, on, off"):
        load_model(PATH, keep_warm="yes")


@pytest.mark.parametrize("mode", MODES)
def test_several_ranks_have_none(mode, monkeypatch):
    class Reached(Exception):
        pass

    def loaded(weights, setup, *_):
        raise Reached(setup.warmth)

    agreed = SimpleNamespace(plan=None, tiles=None, loading=lambda nbytes: nullcontext())
    ranks = SimpleNamespace(io_mode=lambda asked, weights: asked, meet=lambda *given: agreed)
    monkeypatch.setattr(opening, "_loaded", loaded)
    with pytest.raises(Reached, match="^off$"):
        load_model(PATH, keep_warm=mode, ranks=ranks)


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
    engine = open_engine(PATH, expert_io="pread", expert_cache_bytes=1, keep_warm=mode, prefetch="off")
    steps = generate_step([1, 2, 3], engine.model, max_tokens=count)
    return engine, [(token, bytes(memoryview(logprobs.astype(mx.float32)))) for token, logprobs in steps]


def test_a_streamed_answer_launches_and_keeps_its_bits(plain_operations, slow_disk, monkeypatch):
    """Without a GPU a stand-in counts the launches."""
    engine, alone = answer("off")
    assert engine.keep_warm is None
    engine.experts.close()
    counted = []
    warm = KeepWarm(lambda: lambda: counted.append(threading.current_thread().name), 1, always=True)
    monkeypatch.setattr(opening, "keep_warm_of", lambda mode, path, source: source.at_close(warm.close) or warm)
    engine, warmed = answer("on")
    assert warmed == alone and engine.experts.stats.misses > 12
    assert counted and set(counted) == {"keep-warm"}
    _is_over(engine)
    most = engine.experts.stats.wait_seconds / EVERY + 12 * len(engine.experts.layout.moe_layers)
    assert warm.launched <= most
    engine.experts.close()
    warm.thread.join(10)
    assert not warm.thread.is_alive()


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="a step that a GPU compiles refers to the experts too")
def test_a_dropped_model_frees_its_experts_at_once(plain_operations, monkeypatch):
    """The pool may have gigabytes, which no garbage collection must wait for."""
    monkeypatch.setattr(keep_warm, "gpu_name", lambda: "Apple M1")

    def on_a_mac(mode, path, source):
        with standing_in(backend="metal"):
            return keep_warm_of(mode, path, source)

    monkeypatch.setattr(opening, "keep_warm_of", on_a_mac)
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


@pytest.mark.skipif(not mx.is_available(mx.gpu), reason="no GPU")
def test_a_streamed_answer_launches_on_a_gpu_and_keeps_its_bits(slow_disk):
    engine, alone = answer("off")
    engine.experts.close()
    engine, warmed = answer("on")
    assert warmed == alone
    warm, stats = engine.keep_warm, engine.experts.stats
    steps = 12 * len(engine.experts.layout.moe_layers)
    assert 0 < warm.launched <= stats.wait_seconds / EVERY + steps
    _is_over(engine)
    engine.experts.close()


def _is_over(engine):
    """No launch comes after the answer."""
    time.sleep(5 * EVERY)  # one may be under way
    launched = engine.keep_warm.launched
    time.sleep(20 * EVERY)
    assert engine.keep_warm.launched == launched


def test_commands_pass_the_option_on_and_say_what_is_done(plain_operations, monkeypatch, capsys):
    modes = []

    def made(mode, path, source):
        modes.append(mode)
        return KeepWarm(lambda: lambda: None, 1, measured=WarmTimes(0.02, 0.015))

    monkeypatch.setattr(opening, "keep_warm_of", made)
    options = ["--model", str(PATH), "--expert-io", "pread", "-m", "2", "-p", "a", "--keep-warm", "on"]
    assert main(["generate", *options, "--verbose"]) == 0
    line = "keep-warm: on: a token took 15.0 ms with launches and 20.0 ms without\n"
    assert capsys.readouterr().err.count(line) == 2 and modes == ["on"]
    assert main(["generate", *options]) == 0
    err = capsys.readouterr().err
    assert line not in err and ("--keep-warm has no effect where no GPU computes" in err) is not has_kernels()
    monkeypatch.setattr(opening, "keep_warm_of", lambda *given: None)
    assert main(["generate", *options, "--expert-io", "resident"]) == 0
    assert "--keep-warm has no effect where experts are resident" in capsys.readouterr().err
