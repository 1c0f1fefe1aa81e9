"""Each benchmark runs, with tiny models and on a CPU that stands in for the GPU, and ends with its line of JSON; drafts
that follow traces, replays of traces, and digests of logits."""

import argparse
import gc
import importlib
import itertools
import json
import subprocess
import sys

import bench_decode
import bench_drafts as bench
import goldens
import logit_digests
import mlx.core as mx
import numpy as np
import pytest
import routing_trace
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_directory, write_tokenizer

from moeflux_mlx import load_model

TINY = ("--tiny", "--rounds", 1)
PLAIN = ("--variant", "qwen3-30b-a3b", "--layers", 2)  # whose mixers take the least time
STREAM = ("--rounds", 1, "--max-tokens", 2)


pytestmark = pytest.mark.usefixtures("drafts_are_put_back", "team")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script in this process, and what it starts by `subprocess.run` too; returns its line of JSON."""

    def output(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    def run_child(command, env=None, **_):
        if env is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
        name = command[1].rpartition("/")[2].removesuffix(".py")
        return subprocess.CompletedProcess(command, 0, output(name, *command[2:]))

    monkeypatch.setattr(subprocess, "run", run_child)
    return lambda *given: json.loads(output(*given).splitlines()[-1])


@pytest.fixture
def model():
    return tiny_directory("qwen3_moe")


def test_decode(run):
    pytest.importorskip("mlx_lm")
    (row,) = run("bench_decode", *TINY, *PLAIN, "--prompt", 8, "--tokens", 18)["rows"]
    assert row["ours"]["peak"] > 0 < row["mlx-lm"]["peak"]


def test_batch(run):
    rows = run("bench_batch", *TINY, *PLAIN, "--prompt", 20, "--tokens", 2, "--parallel", 1, 2)["rows"]
    assert rows.keys() == {"ours 1", "ours 2"}


def test_company(run):
    report = run(
        "bench_company", *TINY, *PLAIN, "--prompt", 300, "--decode-share", 0.8, "--answer-prompt", 3, "--tokens", 3
    )
    assert report["tokens_beside"] and report["longer"] > 0


@pytest.mark.parametrize("draft, model", [("lookup", PLAIN), ("head", ("--layers", 4))])
def test_drafts(run, draft, model):
    options = *model, "--draft", draft, "--prompt-tokens", 20, "--tokens", 8, "--depths", 0, 2
    assert run("bench_drafts", *TINY, *options)["depths"]["2"]["taken"]


def test_lengths(run):
    pytest.importorskip("mlx_lm")
    options = "--lengths", 40, "--prompts", 3, "--tokens", 18
    rows = run("bench_lengths", *TINY, *PLAIN, *options)["rows"]
    assert [row["model"] for row in rows] == ["ours 16", "ours 8", "mlx-lm"]
    assert all(row["decode"][1] > 0 < row["+3"][1] for row in rows) and rows[0]["decode / bound"][1] > 1
    assert 0 < rows[0]["peak / planned"] < 1


def test_kernels(run):
    report = run("bench_kernels", "--tiny", "--gib", 0, "--layers", 2)
    assert report["experts"] and report["products"] and report["geometry"]["forms"]


def test_cpu(run, model):
    pytest.importorskip("mlx_lm")
    report = run("bench_cpu", model, "--rounds", 1, "--prompt", 8, "--read-mib", 1, "--warm", 2, "--tokens", 2)
    assert "mlx-lm float32" in report["decode"]


@pytest.mark.parametrize("forms", [(), ("--forms",)])
def test_native(run, forms):
    native = pytest.importorskip("moeflux_mlx.ops._native")
    assert native and run("bench_native", "--tiny", "--rounds", 2, *forms)


def test_blocks(run):
    assert run("bench_blocks", "--rounds", 1, "--matrices", 1)["Q4_K"]["GB/s"] > 0


def test_rounding(run):
    report = run("bench_rounding", "--rows", 2, "--columns", 256)
    assert all(fit <= plain for row in report["results"] for plain, fit in row["errors"].values())


def test_prompt(run, model):
    """A text before it leaves some of the experts in the pool that the prompt uses."""
    options = "stream", "--model", model, "--tokens", 20, "--rounds", 1, "--spans", 8, "--share", 0.5
    reports = [run("bench_prompt", *options, "--behind", tokens) for tokens in (0, 40)]
    alone, behind = (report["rows"][0]["runs"][0]["missing"] for report in reports)
    assert 0 < behind < alone


def test_stream(run, monkeypatch, model):
    """What bench_stream.py runs in a process of its own runs in this one."""
    stream = importlib.import_module("bench_stream")

    def inside(arguments, limits):
        options = stream.parser().parse_args(list(map(str, arguments)))
        return options.run(options) | {"peak": 1}

    monkeypatch.setattr(stream, "inside", inside)
    assert run("bench_stream", "decode", "--model", model, *STREAM, "--limit-gb", 4)["bench"] == "decode"


@pytest.mark.parametrize("command, more", [("places", "--checkpoint"), ("load", None), ("host", "--hits")])
def test_stream_compared(run, model, command, more):
    other = goldens.checkpoint_dir("qwen3_moe", "mlx4") if more == "--checkpoint" else model
    given = [more, 0.5 if more == "--hits" else other, "--max-tokens", 3] if more else []
    assert run("bench_stream", command, "--model", model, "--rounds", 1, *given)["bench"] == command


def test_stream_forms(run, tmp_path):
    options = *PLAIN, "--experts", 8, "--tiny", *STREAM, "--modes", "affine", "iq2_xs", "--folder", tmp_path
    report = run("bench_stream", "forms", *options)
    assert report["forms"].keys() == {"affine", "iq2_xs"} and report["ratios"]["iq2_xs"][1] > 0
    assert not any(tmp_path.iterdir())


def test_host_tier(run, model):
    assert run("bench_host_tier", "--model", model, *STREAM)["host"]["tok/s"] > 0


def test_prompt_cache(run, model):
    options = "--tokens", 20, "--rounds", 1, "--expert-cache-gb", 1e-4
    results = run("bench_prompt_cache", "--model", model, *options)["results"]
    assert results["again"]["computed"] < results["first"]["computed"]


def test_warm_start(run, model, tmp_path, monkeypatch):
    monkeypatch.delenv("MOEFLUX_WARM_START")
    trace = routing_trace.synthesize((200, 3, 4), 16, 0.5, 0.0, np.random.default_rng(0))
    routing_trace.save(tmp_path / "trace.npz", trace, 16)
    options = "--first", 2, "--tokens", 4, "--learn", 8, "--prompt", 3, "--rounds", 1
    (case,) = run("bench_warm_start", "--model", model, "--trace", tmp_path / "trace.npz", *options)["cases"]
    assert case["auto"]["steady"] > 0


def test_quality(run, tmp_path):
    checkpoint, text = goldens.write_variant(tmp_path / "hub", "qwen3_moe", "hub"), tmp_path / "text"
    write_tokenizer(checkpoint, "qwen3_style")
    text.write_text("Once upon a time, there was a text.")
    cases = "--cases", "minmax 4", "fit 3, calibrated", "--calibrate-tokens", 64
    rows = run("bench_quality", "--model", checkpoint, "--text", text, "--calibrate", text, *cases)["rows"]
    assert rows[0]["kl"] < rows[1]["kl"]


def test_ranks(run, model):
    report = run("bench_ranks", "--model", model, "--ranks", 2, "--rounds", 1, "--max-tokens", 2)
    assert report


@pytest.mark.parametrize("gpu", [False, True])
def test_our_side_beside_llama_cpp(model, gpu):
    options = argparse.Namespace(gpu=gpu, model=model, share=None, prompt=[600], tokens=2)
    timed = importlib.import_module("bench_llama_turns").ours(options)
    assert all(timed(what, count) > 0 for what, count in (("decode", 2), ("prompt", 600), ("behind", 2)))


def test_llama_cpp_writes_and_reads_the_same_shapes(model, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is built by who compares with it")
    script, file = importlib.import_module("bench_llama_cpp"), tmp_path / "m.gguf"
    script.write_gguf(json.loads((model / "config.json").read_text()), file, "q4_0")
    options = argparse.Namespace(gguf=file, context=512, threads=2)
    mapped, repacked = (script.Runner(options, repack).feed(np.arange(8)) for repack in (False, True))
    assert (repacked - mapped).std() < 0.2 * mapped.std()


def test_server(run, model):
    options = "--tokens", 20, "--rounds", 1, "--turns", 1, "--answer", 3, "--share", 0.99
    assert run("bench_server", "--model", model, *options)["after_kill"]["server"] > 0


PROMPT, TOKENS = [1, 2, 3], 24


@pytest.fixture
def traced(drafts_are_put_back):
    """A streamed model whose rows follow a trace of three sequences."""
    made = routing_trace.synthesize_drafts((3, 40, 3, 4), 16, 0.4, 0.0, np.random.default_rng(0))
    model = load_model(str(tiny_directory("qwen3_moe")), expert_io="pread", expert_cache_bytes=1)  # the smallest pool
    yield bench.TracedText(model, made, PROMPT), model
    model.experts.close()


def measured(traced, model):
    options = argparse.Namespace(tokens=TOKENS, right=0.6, rounds=1, depths=["0", "2"], draft="lookup")
    return bench.measure(model, [PROMPT], options, traced)


def test_the_text_is_the_same_at_every_depth(traced):
    rows = measured(*traced)
    assert 0 < rows["2"]["taken"] < rows["2"]["checked"]
    assert rows["0"]["union"] == 1 < rows["2"]["union"] < 3
    assert rows["0"]["allowed"] == 1 > rows["2"]["allowed"] == rows["0"]["missed"] / rows["2"]["missed"]
    assert rows["2"]["reached"] == rows["2"]["ratio"] / rows["2"]["allowed"]


def test_nothing_is_allowed_if_nothing_is_missed():
    rows = {"0": {"missed": 0.0, "ratio": 1.0}, "1": {"missed": 3.0, "ratio": 0.9}}
    bench.add_allowed(rows)
    assert "allowed" not in rows["0"] and "reached" not in rows["1"]


def test_a_row_of_the_text_with_experts_of_another_changes_it(traced, monkeypatch):
    monkeypatch.setattr(bench, "wrong_rows", lambda tokens, text: np.arange(len(tokens)))
    with pytest.raises(AssertionError, match="another text at depth 2"):
        measured(*traced)


def test_rows_are_wrong_from_the_first_wrong_token_on():
    assert bench.wrong_rows([5, 6, 7, 8], [5, 6, 7, 8]).tolist() == [0, 0, 0, 0]
    assert bench.wrong_rows([5, 9, 7, 8], [5, 6, 7, 8]).tolist() == [0, 1, 2, 3]
    assert bench.wrong_rows([5, 6, 7], [5]).tolist() == [0, 0, 0], "nothing is known there"


def best_possible(keys, slots):
    """Returns the most hits of any replacement, found by trying them all."""
    pools = {frozenset(): 0}
    for key in keys:
        following = {}
        for pool, hits in pools.items():
            if key in pool:
                options = [(pool, hits + 1)]
            elif len(pool) < slots:
                options = [(pool | {key}, hits)]
            else:
                options = [((pool - {gone}) | {key}, hits) for gone in pool]
            for after, count in options:
                following[after] = max(following.get(after, 0), count)
        pools = following
    return max(pools.values())


@settings(max_examples=examples(100), deadline=None)
@given(keys=st.lists(st.integers(0, 5), max_size=14), slots=st.integers(1, 4))
def test_belady_is_the_best_possible(keys, slots):
    hits = routing_trace.belady(np.array(keys, int), slots).sum()
    assert hits == best_possible(keys, slots) >= routing_trace.lru(np.array(keys, int), slots).sum()


def test_least_recently_used_by_hand():
    assert routing_trace.lru(np.array([1, 2, 1, 3, 2, 1]), 2).tolist() == [False, False, True, False, False, False]


def test_reuse_is_as_requested():
    rng = np.random.default_rng(0)
    for reuse in (0.0, 0.35, 0.9):
        made = routing_trace.synthesize((200, 3, 8), 256, reuse, 0.0, rng)
        by_chance = 8 / 256
        assert abs(routing_trace.previous_recall(made) - (reuse + (1 - reuse) * by_chance)) < 0.04
        assert all(len(set(row)) == 8 for row in itertools.chain(*made.tolist()))


def test_a_pool_with_the_previous_token_leaves_nothing_to_predict():
    made = routing_trace.synthesize((200, 4, 8), 128, 0.35, 0.5, np.random.default_rng(0))
    row = routing_trace.replay(made, 128, 200, recall=0.8)
    assert row["previous"] == 0 and 0.75 < row["predicted"] < 0.85
    assert row["lru"] < row["belady"]


def test_sequences_together_request_as_many_experts_as_asked():
    made = routing_trace.synthesize_together(
        (4, 150, 2, 8), 128, 0.35, 0.5, routing_trace.UNIONS, np.random.default_rng(0)
    )
    assert all(len(set(row)) == 8 for row in made.reshape(-1, 8).tolist())
    for count, union in ((1, 1.0), (2, 1.55), (4, 2.45)):
        asked = sum(map(len, routing_trace.steps_of(made[:count])))
        assert abs(asked / made[0].size - union) < 0.04
    assert 0.35 < routing_trace.previous_recall(made[0]) < 0.55, "what is kept, and some that come again by chance"
    alone, four = (routing_trace.missed(routing_trace.steps_of(made[:count]), 64) / count for count in (1, 4))
    assert 0.4 < four / alone < 0.75, "what rows share is read once"


def test_rows_of_wrong_drafts_share_as_many_experts_as_rows_of_the_text():
    made = routing_trace.synthesize_drafts((3, 400, 2, 10), 512, 0.43, 0.5, np.random.default_rng(0))
    text, wrong, after = made
    for rows in ((text[:-1], text[1:]), (text[:-1], wrong[1:]), (wrong[:-1], after[1:])):
        asked = sum(map(len, routing_trace.steps_of(np.stack(rows))))
        assert abs(asked / rows[0].size - 1.55) < 0.02


def test_commands(tmp_path, capsys):
    file = str(tmp_path / "trace.npz")
    model = str(tiny_directory("qwen3_moe"))
    routing_trace.main(["record", "--model", model, "--prompt", "abc", "--max-tokens", "20", file])
    assert ", 3 layers, 4 of 16 experts" in capsys.readouterr().out
    routing_trace.main(["replay", file, "--slots", "4", "48"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["slots"] for row in report["rows"]] == [4, 48]
    assert report["rows"][0]["lru"] <= report["rows"][1]["lru"]
    routing_trace.main(["synthesize", "--tokens", "20", "--layers", "2", file])
    routing_trace.main(["replay", file])
    assert "Belady" in capsys.readouterr().out
    routing_trace.main(["synthesize", "--tokens", "20", "--layers", "2", "--drafts", "3", file])
    assert ": 4 sequences, 20 tokens, 2 layers, 8 of 128 experts" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_changed_weight_changes_every_digest(monkeypatch, dtype):
    load = logit_digests.load_model

    def changed(*given, **named):
        model = load(*given, **named)
        model.model.norm.weight = model.model.norm.weight * 1.01
        return model

    lines = list(logit_digests.lines_of("qwen3_next", dtype))
    assert [line.split()[:3] for line in lines] == [
        ["qwen3_next", dtype, way] for way in ("prompt", "tokens", "rows", "drafts")
    ]
    assert list(logit_digests.lines_of("qwen3_next", dtype)) == lines
    monkeypatch.setattr(logit_digests, "load_model", changed)
    assert not set(logit_digests.lines_of("qwen3_next", dtype)) & set(lines)


def leave_garbage(megabytes):
    """Leaves arrays that only a collection frees."""
    cycle = [of_megabytes(megabytes)]
    cycle.append(cycle)


def of_megabytes(count):
    made = mx.zeros(count << 20, mx.uint8)
    mx.eval(made)
    return made


@pytest.mark.parametrize("garbage", [(0, 0, 0), (3, 0, 0), (0, 3, 0), (0, 0, 3)])
def test_garbage_is_no_part_of_the_memory_of_a_model(garbage):
    """It may be collected at any time: while the model is made, and while it runs."""
    before, beside, behind = garbage

    def make():
        gc.collect()
        leave_garbage(beside)
        return of_megabytes(2)

    def generate(prompt, model, **_):
        gc.collect()
        yield of_megabytes(1)

    mx.clear_cache()  # of buffers that may be larger than an array that they are given to
    leave_garbage(before)
    runner = bench_decode.Runner.of(make, generate)
    leave_garbage(behind)
    assert runner.nbytes == 2 << 20 and 3 << 20 <= runner.run([1], 1)["peak"] < 4 << 20
