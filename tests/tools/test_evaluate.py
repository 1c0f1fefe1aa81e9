"""`evaluate` compared with plain numpy on whole tables of logits."""

import json
import os
import shutil
from pathlib import Path

import goldens
import mlx.core as mx
import numpy as np
import pytest
from safetensors_writer import write_model
from tiny_models import tiny_directory, write_tokenizer

from moeflux_mlx.errors import RequestError
from moeflux_mlx.evaluate import main
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.packing.located import Located
from moeflux_mlx.process import claim_process
from moeflux_mlx.tools import evaluate as meter
from moeflux_mlx.tools.evaluate import LayerReader, evaluate

TEXT = "The owls of Mira sleep by day. At night, äöü, they count 0123456789 stars; then they fly home. " * 2
WINDOW = 40
pytestmark = pytest.mark.usefixtures("cpu_device")


def opens(family="qwen3_moe", variant="mlx4", change=None, **options):
    def made():
        engine = open_engine(tiny_directory(family, variant), dtype=mx.float32, **options)
        if change is not None:
            change(engine.model)
        return engine

    return made


def spoil(model):
    """Changes the model a little."""
    model.model.norm.weight = model.model.norm.weight * mx.linspace(0.9, 1.1, model.args.hidden_size)


def log_probabilities(opened):
    """Returns the log-probabilities of each window from the whole table of logits in float64, and the tokens."""
    engine = opened()
    ids = engine.tokenizer.encode(TEXT)
    tables = []
    for start in range(0, len(ids), WINDOW):
        logits = np.array(engine.model(mx.array([ids[start : start + WINDOW]])), np.float64)[0]
        tables.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    engine.experts.close()
    return ids, tables


def nll_of(ids, tables):
    return np.array([-tables[i // WINDOW][i % WINDOW - 1][ids[i]] for i in range(len(ids)) if i % WINDOW])


def test_perplexity_is_that_of_whole_tables(monkeypatch):
    ids, tables = log_probabilities(opens())
    monkeypatch.setattr(meter, "LOGITS_BYTES", 7 * 4 * 256)  # seven rows at a time
    steps = []
    measured = evaluate(opens(), TEXT, window=WINDOW, progress=lambda *step: steps.append(step))
    assert np.allclose(measured.nll, nll_of(ids, tables), atol=1e-4)
    assert measured.perplexity == pytest.approx(np.exp(nll_of(ids, tables).mean()), rel=1e-5)
    assert measured.kl is None and steps[-1] == (len(ids), len(ids)) and len(steps) == -(-len(ids) // WINDOW)


def test_divergence_is_that_of_whole_tables():
    ids, right = log_probabilities(opens(change=spoil))
    _, own = log_probabilities(opens())
    measured = evaluate(opens(), TEXT, against=opens(change=spoil), window=WINDOW)
    kl = [(np.exp(p[:-1]) * (p - q)[:-1]).sum(-1) for p, q in zip(right, own, strict=True)]
    same = [p[:-1].argmax(-1) == q[:-1].argmax(-1) for p, q in zip(right, own, strict=True)]
    assert np.allclose(measured.kl, np.concatenate(kl), atol=1e-5) and measured.kl.mean() > 1e-4
    assert measured.same.mean() == pytest.approx(np.concatenate(same).mean(), abs=0.02)
    assert np.allclose(measured.reference_nll, nll_of(ids, right), atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
def test_a_model_does_not_diverge_from_itself(family):
    """Streamed with the smallest pool, it is the same model as mapped."""
    streamed = opens(family, expert_io="pread", expert_cache_bytes=1)
    measured = evaluate(streamed, TEXT, against=opens(family, expert_io="mmap"), window=WINDOW)
    assert measured.kl.max() == 0 and measured.same.all() and np.array_equal(measured.nll, measured.reference_nll)


def test_a_planted_fault_shows():
    measured = evaluate(opens(change=spoil), TEXT, against=opens(), window=WINDOW)
    assert measured.kl.mean() > 0 and not np.array_equal(measured.nll, measured.reference_nll)


def test_a_window_longer_than_the_plan_s_span_goes_through_in_several():
    whole, cut = evaluate(opens(), TEXT, window=90), evaluate(opens(set={"span": 16}), TEXT, window=90)
    assert np.allclose(whole.nll, cut.nll, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 1}, "window is 1; it must be at least 2"),
        ({"most": 1}, "tokens is 1; it must be at least 2"),
        ({"window": 1 << 30}, "exceeds the .* tokens that the model takes"),
        ({"text": "a"}, "the text has 0 tokens; give one with at least 2"),
    ],
)
def test_impossible_measurements(given, message):
    text = given.pop("text", TEXT)
    with pytest.raises(RequestError, match=message):
        evaluate(opens(), text, **given)


def test_models_of_different_tokens_are_not_compared(tmp_path):
    ids, args = [1, 2, 3], open_engine(tiny_directory("qwen3_moe")).model.args
    reference = meter.Reference(ids, None, args, None)
    reference.check(ids, args)
    with pytest.raises(RequestError, match="into different tokens"):
        reference.check([1, 2, 4], args)


# ---- the command ----


def test_the_command_prints_a_table_and_a_line(tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    model = str(tiny_directory("qwen3_moe"))
    more = ["--text", str(tmp_path / "text"), "--window", str(WINDOW), "--dtype", "float32"]
    assert main(["--model", model, "--against", model, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["kl_mean"] == result["kl_p99"] == 0 and result["same_first_choice"] == 1
    assert result["perplexity"] == result["perplexity_against"] > 1 and lines[1].startswith("perplexity    ")
    assert main(["--model", model, "--tokens", "50", *more]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == 50


def test_files_in_another_folder_and_a_limit_of_memory(tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    model, other = write_model(tmp_path / "model", "qwen3_moe"), tmp_path / "other"
    write_tokenizer(model, "qwen3_style")
    other.mkdir()
    moved = next(model.glob("*.safetensors"))
    shutil.move(moved, other / moved.name)
    argv = ["--model", str(model), "--text", str(tmp_path / "text"), "--tokens", "50", "--shards-in", str(other)]
    assert main([*argv, "--memory-gb", "4", "--expert-cache-gb", "1"]) == 0
    assert "note: --expert-cache-gb has no effect where experts are resident" in capsys.readouterr().err
    assert main([*argv, "--memory-gb", "0.1"]) == 1 and "--memory-gb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--text", "nowhere"], "nowhere cannot be read: No such file"),
        (["--text", "bytes"], "bytes is not UTF-8: byte 1 is invalid; give a text file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "bytes").write_bytes(b"a\xff")
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


# ---- layer by layer


def layers(path):
    return lambda: LayerReader(Located(path), dtype=mx.float32)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v4"])
def test_layer_by_layer_it_is_the_same_model(family):
    path = tiny_directory(family, "mlx4")
    measured = evaluate(layers(path), [TEXT, TEXT[9:]], against=opens(family), window=WINDOW)
    assert np.abs(measured.kl).max() < 1e-5 and measured.same.mean() > 0.99
    assert np.allclose(measured.nll, measured.reference_nll, atol=1e-4)
    first = evaluate(opens(family), TEXT, window=WINDOW)
    assert np.allclose(measured.where(measured.text == 0).nll, first.nll, atol=1e-4)
    assert len(measured.nll) == len(measured.text) and set(measured.text.tolist()) == {0, 1}


def test_nothing_is_computed_in_a_fork_of_a_process_that_computed(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text(TEXT)
    argv = ["--model", str(tiny_directory("qwen3_moe", "hub")), "--layer-by-layer", "--text", str(tmp_path / "text")]
    computing = claim_process()
    monkeypatch.setattr(os, "getpid", lambda: computing + 1)
    assert main(argv) == 1
    assert "before this process was forked" in capsys.readouterr().err


def test_the_command_compares_codes_with_a_checkpoint_of_floats(tmp_path, capsys):
    """Neither needs to fit in memory."""
    checkpoint = goldens.write_variant(tmp_path / "floats", "qwen3_moe", "hub")
    write_tokenizer(checkpoint, "qwen3_style")
    model = str(tiny_directory("qwen3_moe", "hub"))
    for name in ("one", "two"):
        (tmp_path / name).write_text(TEXT + name)
    texts = [str(tmp_path / name) for name in ("one", "two")]
    more = ["--window", "40", "--dtype", "float32", "--against", str(checkpoint), "--text", *texts]
    results = []
    for options in (["--memory-gb", "4"], ["--layer-by-layer", "--memory-gb", "4"]):
        assert main(["--model", model, *options, *more]) == 0
        out, err = capsys.readouterr()
        results.append(json.loads(out.splitlines()[-1]))
        notes = [line for line in err.splitlines() if line.startswith("note: --memory-gb has no effect where")]
        assert len(notes) == 1 + ("--layer-by-layer" in options)
    for own in results:
        assert 0 < own["kl_mean"] < 1 and own["perplexity"] != own["perplexity_against"]
        assert [Path(one["text"]).name for one in own["texts"]] == ["one", "two"]
        counts = np.array([one["predicted"] for one in own["texts"]])
        assert np.average([one["kl_mean"] for one in own["texts"]], weights=counts) == pytest.approx(
            own["kl_mean"], rel=1e-3
        )
        assert counts.sum() == own["predicted"]
    assert results[0]["kl_mean"] == pytest.approx(results[1]["kl_mean"], rel=1e-2)
    assert any(line.startswith("two ") for line in out.splitlines())
