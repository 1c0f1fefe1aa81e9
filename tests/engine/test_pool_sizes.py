"""The best size of a pool: how it is chosen, stored and used, and when it is ignored."""

import importlib
import json
from argparse import Namespace
from dataclasses import replace

import mlx.core as mx
import pytest
from gguf_models import write_gguf
from tiny_models import tiny_directory

from moeflux_mlx import plan as plan_command
from moeflux_mlx import tune as screen
from moeflux_mlx.errors import RequestError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.opening.load_settings import locate
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.planning import pool_sizes
from moeflux_mlx.planning.machine import Figures
from moeflux_mlx.planning.pool_sizes import best_of, best_pool, keep_pool, pool_file, sizes_to_try

PATH = tiny_directory("qwen3_moe")
OPTIONS = Namespace(show=False, reset=False, model=str(PATH), variant=None)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_smallest_of_the_fastest_is_best():
    assert best_of({10: 5.0, 8: 6.0, 6: 5.9, 4: 5.0}) == 6
    assert best_of({10: 7.0, 8: 6.0}) == 10
    assert sizes_to_try(100, 50) == [100, 80, 60, 50]


def test_stored_sizes_count_for_the_same_model_and_machine(tmp_path, monkeypatch):
    assert best_pool(PATH, 5000) is None
    keep_pool(tmp_path, 5000, 70)
    keep_pool(PATH, 5000, 80)
    keep_pool(PATH, 5000, 90)
    assert best_pool(PATH, 5000) == 90 and best_pool(tmp_path, 5000) == 70
    assert best_pool(PATH, 5001) is None
    monkeypatch.setattr(pool_sizes, "physical_ram_bytes", lambda: 1 << 30)
    assert best_pool(PATH, 5000) is None


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "found": []}', '{"version": 1, "found": 7}'])
def test_a_damaged_file_is_ignored(text):
    keep_pool(PATH, 5000, 80)
    pool_file().write_text(text)
    assert best_pool(PATH, 5000) is None
    keep_pool(PATH, 5000, 80)
    assert best_pool(PATH, 5000) == 80


@pytest.mark.parametrize("pool", [0, -1, "7", None, 1.5, True])
def test_an_impossible_size_is_not_used(pool):
    keep_pool(PATH, 5000, 80)
    held = json.loads(pool_file().read_text())
    held["found"][0]["pool"] = pool
    pool_file().write_text(json.dumps(held))
    assert best_pool(PATH, 5000) is None


def test_loading_takes_no_more_memory_than_is_useful(capsys):
    full = open_engine(PATH, dtype=mx.float32, expert_io="pread")
    record = full.experts.layout.held_bytes
    keep_pool(PATH, full.experts.layout.total_bytes, 20 * record)
    measured = open_engine(PATH, dtype=mx.float32, expert_io="pread")
    asked = open_engine(PATH, dtype=mx.float32, expert_io="pread", expert_cache_bytes=25 * record)
    assert full.experts.slots == 48 and measured.experts.slots == 20 and asked.experts.slots == 25
    assert measured.plan.most == measured.plan.pool and measured.plan.sizes == full.plan.sizes
    assert plan_command.main(["--model", str(PATH), "--expert-io", "pread"]) == 0
    out = capsys.readouterr().out
    assert "moeflux tune found a pool of" in out and "20 slots" in out


def test_a_model_that_is_streamed_is_measured(monkeypatch, capsys):
    plan_memory = screen.plan_memory
    monkeypatch.setattr(
        screen, "plan_memory", lambda *given: plan_memory(*given[:3], replace(given[3], expert_io="pread"))
    )
    measured = []

    def speed_with(path, pool, seconds):
        measured.append(pool)
        return 5.0 if pool < max(measured) else 4.0

    with monkeypatch.context() as patch:
        patch.setattr(screen, "speed_with", speed_with)
        assert screen.run(OPTIONS) == 0
    assert len(measured) > 2 and measured == sorted(measured, reverse=True)
    layout = open_engine(PATH, dtype=mx.float32).experts.layout
    assert best_pool(PATH, layout.total_bytes) == min(measured)
    assert screen.speed_with(PATH, min(measured), 0.5) > 0
    screen.run(Namespace(**{**vars(OPTIONS), "model": None, "show": True}))
    assert f"{PATH}: a pool of" in capsys.readouterr().out
    screen.run(Namespace(**{**vars(OPTIONS), "model": None, "reset": True}))
    assert not pool_file().exists()


def test_a_gguf_has_a_pool_too(monkeypatch, tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", lambda name: "Q4_0")
    plan_memory = screen.plan_memory
    monkeypatch.setattr(
        screen, "plan_memory", lambda *given: plan_memory(*given[:3], replace(given[3], expert_io="pread"))
    )
    monkeypatch.setattr(screen, "speed_with", lambda path, pool, seconds: 5.0)
    assert screen.run(Namespace(**{**vars(OPTIONS), "model": str(tmp_path / "m.gguf")})) == 0
    weights = open_weights(locate(tmp_path / "m.gguf"))
    assert best_pool(weights.path, weights.experts.layout.total_bytes) is not None


def test_a_model_that_fits_memory_has_no_pool(capsys):
    screen.run(OPTIONS)
    assert f"there is no pool to size: {PATH} fits memory" in capsys.readouterr().out and not pool_file().exists()


def test_the_limit_of_the_process_is_all_that_it_takes(monkeypatch):
    """Everything counts, and no headroom is taken off. Experts that fit the machine but not the limit are streamed."""
    load = importlib.import_module("moeflux_mlx.opening.engine")
    limits = []
    monkeypatch.setattr(load, "machine_figures", lambda limit: limits.append(limit) or Figures(1 << 40, limit=limit))
    options = {"dtype": mx.float32, "context": 512, "set": {"span": 512}, "prefill_step_size": 64}
    free = open_engine(PATH, **options)
    fixed, experts = free.plan.fixed, free.experts.layout.total_bytes
    engine = open_engine(PATH, memory_bytes=fixed + experts // 2, **options)
    assert limits == [None, fixed + experts // 2]
    assert engine.plan.mode == "pread" and "exceed --memory-gb" in engine.plan.decision
    assert fixed < engine.plan.total <= fixed + experts // 2
    with pytest.raises(RequestError, match=r"does not fit --memory-gb, 0\.05 GB: .*; --memory-gb 0\.\d\d would do"):
        open_engine(PATH, dtype=mx.float32, memory_bytes=50_000_000)
