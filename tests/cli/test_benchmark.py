"""`moeflux benchmark`: its table, the JSON line of --json with every round, and refusals in one line."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_directory

from moeflux_mlx import benchmark

SHORT = ["--prompt-tokens", "5", "20", "--max-tokens", "4", "--rounds", "2"]


@pytest.fixture
def tiny():
    return ["--model", str(tiny_directory("qwen3_next"))]


def test_table_and_json(capsys, tiny):
    assert benchmark.main([*SHORT, *tiny, "--expert-io", "pread", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert [row["prompt_tokens"] for row in report["rows"]] == [5, 20]
    assert all(len(row["ours"]) == 2 and row["ours"][0]["decode"] > 0 for row in report["rows"])
    assert all(0 <= one["hits"] <= 1 for row in report["rows"] for one in row["ours"])
    table = next(i for i, line in enumerate(lines) if line.lstrip().startswith("prompt"))
    assert [line.split()[0] for line in lines[table + 1 : table + 3]] == ["5", "20"]
    assert lines[0].startswith("machine ") and "GB planned" in lines[-2]


@pytest.mark.parametrize(
    "mapped, words", [(0.6401, "mapped files (0.64 GB at the end),"), (None, "mapped files, which")]
)
def test_the_peak_says_that_mapped_files_count(mapped, words):
    line = benchmark.memory_line({"planned_gb": 0.78, "peak_gb": 1.42, "mapped_gb": mapped, "mlx_gb": 0.5})
    assert line.startswith("memory: 0.78 GB planned, 1.42 GB at the peak with pages of ") and words in line


def test_mapped_files_are_measured_while_the_model_is_open(capsys, tiny):
    assert benchmark.main([*SHORT, *tiny, "--expert-io", "mmap", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert (
        0 < memory["mapped_gb"] <= memory["peak_gb"] if Path("/proc/self/status").exists() else not memory["mapped_gb"]
    )


def test_options_that_have_no_effect_are_named(capsys, tiny):
    assert benchmark.main([*SHORT, *tiny, "--expert-io", "mmap", "--expert-cache-gb", "1", "--yes"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: --expert-cache-gb has no effect where experts are mapped",
        "note: --yes has no effect where --model is a directory",
    ]


@pytest.mark.parametrize("option", ["--warm-start=off", "--chat-template-config={}"])
def test_options_of_answers_are_unknown(capsys, tiny, option):
    with pytest.raises(SystemExit):
        benchmark.main([*SHORT, *tiny, option])
    assert f"unrecognized arguments: {option};" in capsys.readouterr().err


def test_lengths_fit_the_demo_model_and_json_is_optional(capsys):
    assert benchmark.main(["--max-tokens", "2", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.lstrip().startswith("prompt"))
    assert [line.split()[0] for line in lines[table + 1 : -1]] == ["128", "512"] and lines[-1].startswith("memory: ")


def test_a_peer_takes_turns(monkeypatch, capsys, tiny):
    order = []

    def peer(engine):
        return lambda prompt, count: (order.append(len(prompt)) for _ in range(count))

    monkeypatch.setattr(benchmark, "mlx_lm_steps", peer)
    assert benchmark.main([*SHORT, *tiny, "--against", "mlx-lm", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert order == [16] * 4 + ([5] * 4 + [20] * 4) * 2
    assert "mlx-lm: tokens/s" in "".join(out) and len(json.loads(out[-1])["rows"][0]["mlx-lm"]) == 2


@pytest.mark.parametrize(
    "more, message",
    [
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--rounds", "0"], "--rounds and --prompt-tokens at least 1"),
        (
            ["--prompt-tokens", "9999999"],
            "give --prompt-tokens and --max-tokens that add up to no more",
        ),
        (["--against", "mlx-lm"], "mlx-lm cannot run"),
    ],
)
def test_refusals(capsys, tiny, more, message):
    assert benchmark.main([*tiny, *more]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
