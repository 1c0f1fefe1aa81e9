"""What a session's steps use is kept for the next one, which begins with it in memory; no bit depends on it."""

import gc
import importlib
import json
import os
import re
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from safetensors_writer import write_model
from tiny_models import tiny_directory

from moeflux_mlx.cli.main import main
from moeflux_mlx.errors import RequestError
from moeflux_mlx.kept import warm_start
from moeflux_mlx.kept.measured import read_rows
from moeflux_mlx.kept.warm_start import HALF_LIFE, KeptUsage, keep, kept_of, usage_file
from moeflux_mlx.opening.engine import load_model

PATH = tiny_directory("qwen3_moe")
KEY = {"model": "/models/a", "experts": 1000}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(warm_start.VARIABLE)


def used(steps, *experts, shape=(2, 6)):
    usage = SimpleNamespace(steps=steps, counts=np.zeros(shape))
    usage.counts[0, list(experts)] = steps
    return usage


def session(path=PATH, tokens=12, **options):
    """Returns the logits of a few tokens and what the source counted."""
    model = load_model(path, dtype=mx.float32, expert_io="pread", expert_cache_bytes=30 * 16384, **options)
    for _ in range(500):
        if not model.experts.warm_between_calls():
            break
    model.experts.drain()
    cache = model.make_cache()
    logits = [np.array(model(mx.array([[token]]), cache)) for token in range(tokens)]
    stats = model.experts.stats
    model.experts.close()
    return np.stack(logits), stats


def test_a_second_session_begins_with_what_the_first_has_used():
    first, before = session()
    assert before.warmed == 0 and usage_file().exists()
    second, after = session()
    assert np.array_equal(first, second)
    assert 20 < after.warmed <= 40 and after.warm_hits > after.warmed / 2
    assert after.misses < before.misses
    kept = kept_of({"model": str(PATH.resolve())}, (3, 16))
    assert kept.steps == pytest.approx(24, rel=0.01) and kept.rates.sum() == pytest.approx(3 * 4, rel=0.01)


@pytest.mark.parametrize("how", ["option", "environment"])
def test_it_can_be_switched_off(how, monkeypatch):
    session()
    kept = usage_file().read_bytes()
    if how == "environment":
        monkeypatch.setenv(warm_start.VARIABLE, "off")
    _, stats = session(**({"warm_start": "off"} if how == "option" else {}))
    assert stats.warmed == 0 and usage_file().read_bytes() == kept


def test_sessions_that_end_together_are_all_kept(monkeypatch):
    """Each waits for the one that changes the file."""
    read = warm_start.read_rows
    monkeypatch.setattr(warm_start, "read_rows", lambda file: (read(file), time.sleep(0.02))[0])
    sessions = [threading.Thread(target=keep, args=(KEY, used(10, i), os.getpid())) for i in range(4)]
    for one in sessions:
        one.start()
    for one in sessions:
        one.join()
    kept = kept_of(KEY, (2, 6))
    assert np.count_nonzero(kept.rates) == 4 and kept.steps == pytest.approx(40, rel=0.02)


def test_a_benchmark_notes_nothing():
    assert main(["benchmark", "--model", str(PATH), "-m", "2", "--rounds", "1", "--prompt-tokens", "4"]) == 0
    assert not usage_file().exists()


def test_a_model_that_is_dropped_is_kept_too():
    model = load_model(PATH, expert_io="pread", expert_cache_bytes=1)
    model(mx.array([[1]]), model.make_cache())
    del model
    gc.collect()
    assert len(read_rows(usage_file())) == 1


def test_tune_shows_and_forgets_it(capsys):
    session()
    tune = importlib.import_module("moeflux_mlx.tune")
    assert tune.main(["--show"]) == 0
    assert f"{PATH.resolve()}: experts used in 12 steps" in capsys.readouterr().out.splitlines()
    assert tune.main(["--reset"]) == 0 and not usage_file().exists()


def test_generate_says_what_was_read_and_used(capsys):
    given = ["generate", "--model", str(PATH), "--expert-io", "pread", "-m", "6", "-p", "a", "--verbose"]
    said = []
    for more in ([], [], ["--warm-start", "off"]):
        assert main([*given, *more]) == 0
        gc.collect()  # as the end of a process
        read, used = re.search(r"warm start: (\d+), (\d+) used", capsys.readouterr().err).groups()
        said.append((int(read) > 0, int(used) <= int(read)))
    assert said == [(False, True), (True, True), (False, True)]


def test_experts_that_are_not_streamed_leave_no_trace():
    model = load_model(PATH, expert_io="mmap")
    model(mx.array([[1]]), model.make_cache())
    model.experts.close()
    assert not usage_file().exists()


@pytest.mark.parametrize("mode", warm_start.MODES)
def test_several_ranks_have_none(mode, monkeypatch):
    class Reached(Exception):
        pass

    def loaded(weights, setup, *_):
        raise Reached(setup.warm_start)

    agreed = SimpleNamespace(plan=None, loading=lambda nbytes: nullcontext())
    ranks = SimpleNamespace(io_mode=lambda asked, weights: asked, meet=lambda *given: agreed)
    monkeypatch.setattr(importlib.import_module("moeflux_mlx.opening.engine"), "_loaded", loaded)
    with pytest.raises(Reached, match="^off$"):
        load_model(PATH, warm_start=mode, ranks=ranks)


def test_an_unknown_mode_is_refused():
    with pytest.raises(RequestError, match="warm_start 'on' is not one of auto, off"):
        load_model(PATH, warm_start="on")


def test_counts_decay():
    keep(KEY, used(HALF_LIFE, 0, 1), os.getpid())
    keep(KEY, used(HALF_LIFE, 1, 2), os.getpid())
    kept = kept_of(KEY, (2, 6))
    assert kept.steps == 1.5 * HALF_LIFE
    np.testing.assert_allclose(kept.rates[0], [1 / 3, 1, 2 / 3, 0, 0, 0], atol=1e-4)
    assert not kept.rates[1].any()


def test_a_session_without_steps_and_a_forked_child_keep_nothing():
    keep(KEY, used(0), os.getpid())
    keep(KEY, used(5, 1), os.getpid() + 1)
    assert not usage_file().exists()


def test_another_model_in_the_directory_begins_anew():
    keep(KEY, used(9, 1), os.getpid())
    assert kept_of({**KEY, "experts": 999}, (2, 6)) is None and kept_of(KEY, (2, 7)) is None
    keep({**KEY, "experts": 999}, used(9, 2), os.getpid())
    assert kept_of(KEY, (2, 6)) is None and len(read_rows(usage_file())) == 1


def test_the_file_is_bounded(monkeypatch):
    monkeypatch.setattr(warm_start, "MOST_BYTES", 1000)
    for number in range(9):
        keep({"model": f"/models/{number}", "experts": 1}, used(3, 1), os.getpid())
    rows = read_rows(usage_file())
    assert 2 < len(rows) < 9 and rows[-1]["model"] == "/models/8" and usage_file().stat().st_size < 1300


def test_a_file_that_cannot_be_written_stays_as_it_is(monkeypatch):
    keep(KEY, used(9, 1), os.getpid())
    before = usage_file().read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moeflux_mlx.files.sync", full)
    keep(KEY, used(9, 2), os.getpid())
    assert usage_file().read_bytes() == before and len(list(usage_file().parent.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rates": "???"},
        {"rates": "AAAA"},
        {"rates": None},
        {"shape": [3, 4, 1]},
        {"shape": "ab"},
        {"shape": [10**30, 1]},
        {"steps": -1},
        {"steps": float("nan")},
        {"steps": [1]},
    ],
)
def test_a_damaged_entry_is_not_used(change):
    keep(KEY, used(9, 1), os.getpid())
    held = json.loads(usage_file().read_text())
    held["found"][0].update(change)
    usage_file().write_text(json.dumps(held))
    assert kept_of(KEY, (2, 6)) is None
    keep(KEY, used(9, 1), os.getpid())
    assert kept_of(KEY, (2, 6)).steps == 9


def test_a_checkpoint_in_place_is_warmed_too(tmp_path):
    path = write_model(tmp_path / "checkpoint", "qwen3_moe", count=2, residues=[3, 14])
    first, _ = session(path)
    second, stats = session(path)
    assert np.array_equal(first, second) and stats.warmed > 10 and stats.warm_hits


def test_the_numbers_are_as_documented():
    row = KeptUsage(np.array([[0.0, 0.5, 2.0]]), 3.0).row()
    assert row == {"shape": (1, 3), "steps": 3.0, "rates": "AAAAgP//"}
