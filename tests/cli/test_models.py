"""The known models on a machine: their order, their figures, and the commands."""

import contextlib
import functools
import io
import json

import mlx.core as mx
import pytest
from test_docs import refusal

from moeflux_mlx import models
from moeflux_mlx.cli import known_models
from moeflux_mlx.cli.known_models import COMFORTABLE
from moeflux_mlx.families.registry import GGUF
from moeflux_mlx.plan import describe_variant
from moeflux_mlx.planning.machine import Figures, default_dtype
from moeflux_mlx.spec import ModelArgs, variants
from moeflux_mlx.tools.checkup import product_rate

INSTANT = "--products-gb-per-s=1e6"  # products take no time, so only the disk decides


@functools.cache
def said(*options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert models.main([*options]) == 0
    return out.getvalue()


def listed(*options):
    return json.loads(said("--json", *options))["models"]


def test_the_largest_model_that_is_fast_enough_comes_first():
    fits = listed("--ram-gb=64", "--products-gb-per-s=300", "--disk-gb-per-s=6")
    assert sorted(fit["name"] for fit in fits) == variants()
    fast = [fit for fit in fits if fit["tokens_per_second"] >= COMFORTABLE]
    slow = [fit for fit in fits if fit["tokens_per_second"] < COMFORTABLE]
    assert fast and slow and fits == [*fast, *slow]
    assert fast == sorted(fast, key=lambda fit: -fit["disk_bytes"])
    assert slow == sorted(slow, key=lambda fit: -fit["tokens_per_second"])


def test_models_that_do_not_fit_come_last():
    fits = listed("--ram-gb=6", INSTANT)
    small = [fit["memory_bytes"] is not None for fit in fits]
    assert small == sorted(small, reverse=True) and {True, False} == set(small)
    assert said("--ram-gb=6", INSTANT).count("does not fit") == small.count(False)


def test_the_list_says_how_to_open_a_gguf():
    last = said("--ram-gb=6", INSTANT).splitlines()[-1]
    assert "moeflux chat --model ORG/NAME:QUANT prints the size first" in last


def test_models_with_gguf_files_by_architecture():
    out = said("--gguf", INSTANT)
    rows = [line.split() for line in out.split("\n\n")[0].splitlines()[1:]]
    assert {row[0] for row in rows} == set(GGUF) and rows == sorted(rows, key=lambda row: (row[0], float(row[-1])))
    assert {row[1]: row[0] for row in rows} == {
        fit["name"]: fit["architecture"] for fit in listed(INSTANT) if fit["architecture"]
    }
    assert ["deepseek2", "kimi-k2.6"] in [row[:2] for row in rows] and "g9v3" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_model_with_a_repository_is_planned_in_place():
    """A checkpoint's experts lie in pieces, for which reading takes 41 MB more."""
    here = known_models.machine_of(Figures(64_000_000_000), 5e9, 1e12)
    fit = known_models.fit("qwen3-30b-a3b", here, mx.float32, None)
    assert fit.repository and fit.memory_bytes == pytest.approx(19.875e9, abs=1e7)


def test_a_context_of_no_tokens_is_refused(capsys):
    assert models.main(["--context", "-5"]) == 1
    assert "--context is -5; it must be at least 1" in capsys.readouterr().err


# Shares of experts in memory, and ceilings at 5 GB/s without hits, of the README's table (by `moeflux plan`).
@pytest.mark.parametrize(
    ("name", "ram", "share", "ceiling"),
    [("qwen3-next-80b-a3b", 16, 0.24, 5.9), ("qwen3.5-397b-a17b", 128, 0.46, 1.2), ("qwen3-235b-a22b", 64, 0.35, 0.6)],
)
def test_experts_that_are_not_in_memory_come_from_the_disk(name, ram, share, ceiling):
    fits = listed(f"--ram-gb={ram}", "--disk-gb-per-s=5", INSTANT)
    (fit,) = [fit for fit in fits if fit["name"] == name]
    assert fit["share"] == pytest.approx(share, abs=0.02)
    assert fit["tokens_per_second"] == pytest.approx(ceiling / (1 - fit["share"]), rel=0.06)


def test_a_model_in_memory_is_as_fast_as_products_are():
    """Qwen3-30B-A3B at 4 bits reads 0.9 GB for every token and 1.0 GB of experts (the README's table)."""
    fits = listed("--ram-gb=64", "--products-gb-per-s=190")
    (fit,) = [fit for fit in fits if fit["name"] == "qwen3-30b-a3b"]
    assert fit["share"] == 1 and fit["tokens_per_second"] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("ram", [6, 48, 2000])
def test_the_table_fits_a_narrow_terminal(ram):
    out = said(f"--ram-gb={ram}", INSTANT)
    assert max(map(len, out.splitlines())) <= 100
    assert all(f"\n{name} " in f"\n{out}" for name in variants())


def test_the_commands_exist():
    lines = said("--ram-gb=48", INSTANT).splitlines()
    commands = [line.split() for line in lines if line.startswith("  moeflux ")]
    assert len(commands) > 5 and not any(refusal(words[1], words[2:]) for words in commands)


def test_the_disk_speed_is_marked_as_assumed_or_given():
    assert "an assumed 5.0 GB/s" in said("--ram-gb=48", INSTANT)
    assert "the disk at 7.0 GB/s" in said(INSTANT, "--disk-gb-per-s=7")


def test_a_long_context_takes_memory_from_the_experts():
    short, long = (
        {fit["name"]: fit for fit in listed("--ram-gb=64", INSTANT, f"--context={context}")}
        for context in (4096, 40960)
    )
    name = "qwen3-235b-a22b"
    assert long[name]["context"] == 40960 and long[name]["share"] < short[name]["share"]


def test_wrong_options_are_one_line(capsys):
    assert models.main(["--ram-gb=0"]) == 1
    assert capsys.readouterr().err.startswith("error: --ram-gb is 0.0; it must be positive")


def test_products_are_measured_on_this_machine():
    assert 1e7 < product_rate(default_dtype()) < 1e14


@pytest.mark.parametrize(
    ("mix", "parts", "more"),
    [
        ("Q2_K", {"default": "q2_k", "down": "q3_k"}, None),
        ("Q4_K_M", {"default": "q4_k"}, "q6_k"),
        ("Q5_K_M", {"default": "q5_k"}, "q6_k"),
        ("Q8_0", {"default": "q8_0"}, None),
    ],
)
def test_sizes_of_gguf_files_follow_llama_cpp_s_rule(mix, parts, more, tmp_path):
    """The rule for down projections: `llama_tensor_get_type_impl` of llama.cpp's llama-quant.cpp (`use_more_bits`)."""
    args = ModelArgs.from_variant("qwen3-30b-a3b")
    n = args.num_hidden_layers
    layers = [i for i in range(n) if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2]
    recipe = {**parts, "layers": {str(i): {"down": more} for i in layers if more}}
    (tmp_path / "mix.json").write_text(json.dumps(recipe))
    sizes = [
        model.layout.total_bytes + model.resident
        for model in (describe_variant(args, one, mx.bfloat16) for one in (str(tmp_path / "mix.json"), None))
    ]
    assert models.factor(mix) == pytest.approx(sizes[0] / sizes[1], rel=0.01)
