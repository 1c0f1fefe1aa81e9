"""Calibrated conversions: codes for the inputs that matrices have, budgets, and runs that were killed."""

import bisect
import filecmp
import functools
import math
import os
import re

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_tokenizer

from moeflux_mlx import load_model
from moeflux_mlx.calibration import calibrated as conversion
from moeflux_mlx.calibration import rounding
from moeflux_mlx.calibration.calibrated import Calibration, convert_calibrated, plan_calibrated
from moeflux_mlx.calibration.errors import Option, spend
from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.needs import needs_of
from moeflux_mlx.calibration.weights import CheckpointWeights, open_layers
from moeflux_mlx.convert import main as convert_command
from moeflux_mlx.errors import ConfigError, RequestError
from moeflux_mlx.formats.checkpoint import open_checkpoint
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.packing.conversion import ConvertSettings, convert
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.matrix import Forms, Wanted
from moeflux_mlx.packing.plan import make_plan, read_args
from moeflux_mlx.packing.recipe import Recipe, read_recipe
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.usefixtures("cpu_device")
DENSE = [family for family in goldens.FAMILIES if goldens.golden_path(family, "dense").exists()]
EXPERTS = {"gate_up": 3, "down": 4}
RECIPE = {**EXPERTS, "default": 8}
TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture
def one_turn(monkeypatch):
    """GPTQ's codes are improved once: tests/rounding/test_gptq.py tests what more turns do."""
    monkeypatch.setattr(rounding, "gptq", functools.partial(rounding.gptq, turns=1))


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of floats with a tokenizer, and a text."""

    def make(family):
        path = goldens.write_variant(tmp_path / family, family, "hub")
        write_tokenizer(path, "qwen3_style")
        text = tmp_path / "text.txt"
        text.write_text(TEXT)
        return path, text

    return make


def calibration(tmp_path, text, method="gptq", **more):
    return Calibration(tmp_path / "work", [text], method, dtype=mx.float32, **more)


@pytest.mark.parametrize(("family", "streams"), [("qwen3_moe", 1), ("deepseek_v4", 4)])
def test_a_token_takes_its_hidden_states_twice_on_the_disk(checkpoint, family, streams):
    path, _ = checkpoint(family)
    given = open_checkpoint(path)
    weights = CheckpointWeights(given, read_args(given))
    plan = make_plan(given, weights.args, Wanted.of(Forms()))
    few, many = (needs_of(weights, plan, tokens, "fit", mx.float32, None) for tokens in (1000, 1001))
    assert many.disk - few.disk == 2 * streams * weights.args.hidden_size * 4


@pytest.mark.usefixtures("one_turn")
@pytest.mark.parametrize(
    "family, method",
    [("qwen3_moe", "fit"), *(pytest.param(one, "gptq", marks=marks(one == "qwen3_5_moe")) for one in DENSE)],
)
def test_a_model_is_what_its_run_has_computed(tmp_path, checkpoint, monkeypatch, family, method):
    """The last hidden states of the run are those of the converted model: each layer saw the codes of the others."""
    path, text = checkpoint(family)
    kept = {}

    def run(self, progress=lambda share: None):
        LayerRun.run(self, progress)
        kept["texts"], kept["hidden"] = self.texts, [np.array(one) for one in self.hidden()]
        return finish(self)

    finish = lambda self: original(self)  # noqa: E731
    original = rounding.RoundingRun.run
    monkeypatch.setattr(rounding.RoundingRun, "run", run)
    recipe = Recipe.from_json(RECIPE, "mine", "test")
    convert_calibrated(ConvertSettings(path, tmp_path / "out", recipe=recipe), calibration(tmp_path, text, method))
    assert not (tmp_path / "work").exists()
    model = load_model(tmp_path / "out", dtype=mx.float32, set={"cpu_activations": 24})
    for tokens, hidden in zip(kept["texts"], kept["hidden"], strict=True):
        got = np.array(model.hidden(mx.array(tokens[None]), model.make_cache())[0].astype(mx.float32))
        assert np.abs(got - hidden).max() < 1e-3 * np.abs(hidden).max()


def test_gptq_changes_less_of_what_the_experts_give(tmp_path, checkpoint):
    """Measured by the run's own sums, on the text that it was made for."""
    path, text = checkpoint("qwen3_moe")
    recipe = Recipe.from_json({"gate_up": 2, "down": 2, "default": "float"}, "mine", "test")
    logits = {}
    for name in ("floats", "minmax", "gptq"):
        out = tmp_path / name
        if name == "gptq":
            convert_calibrated(ConvertSettings(path, out, recipe=recipe), calibration(tmp_path, text))
        elif name == "minmax":
            convert(path, out, recipe=recipe, rounding="minmax")
        else:
            out = path
        tokens = np.arange(5, 60) % 250
        run = LayerRun(open_layers(Located(path)), [tokens], tmp_path / "run", mx.float32) if name == "floats" else None
        if run is not None:
            run.run()
            logits[name] = np.array(run.head()(next(iter(run.hidden()))))
        else:
            logits[name] = np.array(load_model(out, dtype=mx.float32)(mx.array(tokens[None]))[0])
    wrong = {name: np.square(logits[name] - logits["floats"]).mean() for name in ("minmax", "gptq")}
    assert wrong["gptq"] < wrong["minmax"]


@pytest.mark.usefixtures("one_turn")
def test_experts_that_no_row_chose_are_rounded_for_the_rows_of_others(tmp_path, checkpoint):
    path, text = checkpoint("qwen3_moe")
    text.write_text("a")
    convert_calibrated(
        ConvertSettings(path, tmp_path / "out", recipe=Recipe.from_json(RECIPE, "mine", "test")),
        calibration(tmp_path, text),
    )
    model = load_model(tmp_path / "out", dtype=mx.float32)
    assert mx.isfinite(model(mx.array([[3, 4, 5]]))).all()


@pytest.mark.usefixtures("one_turn")
def test_a_killed_conversion_continues_to_the_same_bytes(tmp_path, checkpoint, monkeypatch):
    path, text = checkpoint("qwen3_moe")
    recipe = Recipe.from_json({**EXPERTS, "router": "float", "default": "float"}, "mine", "test")
    given_text = calibration(tmp_path, text)
    convert_calibrated(ConvertSettings(path, tmp_path / "whole", recipe=recipe), given_text)
    write = rounding.write_tensors
    for survived in range(3):
        written = []

        def failing(file, tensors, written=written, survived=survived):
            write(file, tensors)
            written.append(file)
            if len(written) > survived:
                raise KeyboardInterrupt

        monkeypatch.setattr(rounding, "write_tensors", failing)
        with pytest.raises(KeyboardInterrupt):
            convert_calibrated(ConvertSettings(path, tmp_path / "killed", recipe=recipe), given_text)
    monkeypatch.undo()
    convert_calibrated(ConvertSettings(path, tmp_path / "killed", recipe=recipe), given_text)
    names = [str(one.relative_to(tmp_path / "whole")) for one in (tmp_path / "whole").rglob("*") if one.is_file()]
    names = [name for name in names if "state" not in name]
    same, different, missing = filecmp.cmpfiles(tmp_path / "whole", tmp_path / "killed", names, shallow=False)
    assert len(same) > 4 and not different and not missing


def test_a_budget_is_kept_and_its_recipe_can_be_used_again(tmp_path, checkpoint):
    path, text = checkpoint("qwen3_moe")
    convert_calibrated(ConvertSettings(path, tmp_path / "out"), calibration(tmp_path, text, "fit", target_bits=4.1))
    args = ModelArgs.from_file(tmp_path / "out")
    layout = open_packed(tmp_path / "out", args).layout
    projections = [one for record in layout.records.values() for one in record.projections]
    stored = sum(field.size for one in projections for field in one.codes)
    bits = 8 * stored / sum(one.rows * one.columns for one in projections)
    assert 3.7 < bits <= 4.1 and len({one.quant for one in projections}) > 1
    recipe = read_recipe(tmp_path / "out")
    assert recipe is not None and recipe.name == "4.1 bits"
    convert(path, tmp_path / "again", recipe=tmp_path / "out" / "moeflux_recipe.json")
    assert open_packed(tmp_path / "again", args).layout == layout


def test_the_disk_holds_codes_beside_the_model_and_what_is_there_counts(tmp_path, checkpoint, monkeypatch):
    path, text = checkpoint("qwen3_moe")
    needed, work = [], tmp_path / "work" / "rounded"
    monkeypatch.setattr(conversion, "check_space", lambda folder, nbytes: needed.append(nbytes))
    monkeypatch.setattr(conversion.shutil, "rmtree", lambda *given, **more: None)
    made = calibration(tmp_path, text, "fit", tokens=4)
    convert_calibrated(ConvertSettings(path, tmp_path / "out", recipe=Recipe.from_json(RECIPE, "mine", "test")), made)
    codes = [one for file in work.glob("codes-*") for one in mx.load(str(file)).values()]
    hidden = [one for file in work.glob("hidden-*") for one in mx.load(str(file)).values()]
    packed = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.bin"))
    assert needed[0] >= sum(one.nbytes for one in codes + hidden) + packed
    convert_calibrated(ConvertSettings(path, tmp_path / "out", recipe=Recipe.from_json(RECIPE, "mine", "test")), made)
    assert needed[1] <= needed[0] - sum(one.nbytes for one in codes + hidden)


@pytest.mark.usefixtures("one_turn")
def test_a_limit_of_memory_decides_how_many_experts_are_rounded_together(tmp_path, checkpoint, monkeypatch):
    path, text = checkpoint("qwen3_moe")
    plain = plan_calibrated(ConvertSettings(path, tmp_path), calibration(tmp_path, text))
    dense = 5 * 3 + 1  # attention's four and the router of each layer, and the head
    assert (plain.together, plain.factorisations, plain.columns) == (16, 2 * 16 * 3 + dense, 256)

    def limited(share):
        return calibration(tmp_path, text, memory_gb=share * plain.memory / 1e11)

    def together(share):
        return plan_calibrated(ConvertSettings(path, tmp_path), limited(share)).together

    less = limited(1 + bisect.bisect_left(range(1, 101), 5, key=together))
    sizes, gptq = [], rounding.gptq
    monkeypatch.setattr(rounding, "gptq", lambda values, *more: sizes.append(len(values)) or gptq(values, *more))
    recipe = Recipe.from_json({**EXPERTS, "router": "float", "default": "float"}, "mine", "test")
    convert_calibrated(ConvertSettings(path, tmp_path / "out", recipe=recipe), less)
    assert sizes == [5, 5, 5, 5, 5, 5, 1, 1] * 3  # gate and up together, then down
    with pytest.raises(ConfigError, match="takes at least 0.00 GB of memory; the limit is 0.00 GB; give more, or"):
        plan_calibrated(ConvertSettings(path, tmp_path), calibration(tmp_path, text, memory_gb=1e-4))


def test_the_command_says_what_it_would_take(tmp_path, checkpoint, capsys):
    path, text = checkpoint("qwen3_moe")
    command = ["--hf-path", str(path), "--mlx-path", str(tmp_path / "out"), "--calibrate", str(text), "--plan"]
    assert convert_command([*command, "--method", "gptq"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"for \d+ tokens: about [\d.]+ GB .* 112 factorisations of up to 256 columns; 16 experts", said)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.calibration").exists()


def test_a_size_is_kept(tmp_path, checkpoint):
    path, text = checkpoint("qwen3_moe")
    convert(path, tmp_path / "plain", recipe="balanced")
    size = sum(one.stat().st_size for one in (tmp_path / "plain").rglob("*.bin"))
    size += sum(one.stat().st_size for one in (tmp_path / "plain").rglob("*.safetensors"))
    convert_calibrated(
        ConvertSettings(path, tmp_path / "out"), calibration(tmp_path, text, "fit", target_gb=size * 0.9 / 1e9)
    )
    files = [*(tmp_path / "out").rglob("*.bin"), *(tmp_path / "out").rglob("*.safetensors")]
    assert 0.6 * size < sum(one.stat().st_size for one in files) <= 0.9 * size


@pytest.mark.parametrize(
    "more, message",
    [
        ({"method": "best"}, "method 'best' is not known"),
        ({"target_bits": 3, "target_gb": 1}, "give one of them"),
        ({"tokens": 0}, "give at least 1"),
        ({"target_bits": math.nan}, "--target-bits is nan; it must be positive and below 1e.09"),
        ({"target_bits": math.inf}, "--target-bits is inf; it must be positive"),
        ({"target_gb": math.nan}, "--target-gb is nan; it must be positive"),
        ({"target_gb": 1e300}, r"--target-gb is 1e\+300; it must be positive"),
        ({"memory_gb": math.nan}, "--memory-gb is nan; it must be positive"),
        ({"target_bits": 0.5}, r"experts takes 2\.25 bits or more; give at least --target-bits 2\.25"),
        ({"target_gb": 1e-6}, r"takes 2\.25 bits or more; give at least --target-gb 0\.00\d$"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, checkpoint, more, message):
    path, text = checkpoint("qwen3_moe")
    calibrated = Calibration(tmp_path / "work", [text], **{"dtype": mx.float32, **more})
    for called in (convert_calibrated, plan_calibrated):
        with pytest.raises(ConfigError, match=message):
            called(ConvertSettings(path, tmp_path / "out"), calibrated)
    assert not (tmp_path / "work").exists()  # nothing was measured


@pytest.mark.parametrize("given", [["--target-bits", "nan"], ["--target-gb", "inf"], ["--memory-gb", "nan"]])
def test_the_command_refuses_targets_that_are_no_numbers(tmp_path, checkpoint, capsys, given):
    path, text = checkpoint("qwen3_moe")
    argv = ["--hf-path", str(path), "--mlx-path", str(tmp_path / "out"), "--calibrate", str(text), *given]
    assert convert_command(argv) == 1
    assert f"{given[0]} is {given[1]}; it must be positive" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path, checkpoint, capsys):
    path, text = checkpoint("qwen3_moe")
    out = text / "out"  # below a file, as even root cannot write there
    argv = ["--hf-path", str(path), "--mlx-path", str(out), "--calibrate", str(text)]
    assert convert_command(argv) == 1
    said = capsys.readouterr().err
    assert f"{out}.calibration/rounded cannot be written: Not a directory; choose a place that can be" in said


def test_a_text_that_never_ends_is_refused(tmp_path, checkpoint):
    path, _ = checkpoint("qwen3_moe")
    with pytest.raises(RequestError, match="cannot be read: it is a device or a socket; give a regular file"):
        convert_calibrated(ConvertSettings(path, tmp_path / "out"), calibration(tmp_path, "/dev/zero"))


def test_a_pipe_that_ends_is_a_text(tmp_path, checkpoint):
    path, _ = checkpoint("qwen3_moe")
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    plan_calibrated(ConvertSettings(path, tmp_path), calibration(tmp_path, f"/dev/fd/{reading}"))
    os.close(reading)


options_of = st.lists(
    st.tuples(st.integers(1, 30), st.floats(0, 9, allow_nan=False, width=16)), min_size=1, max_size=4, unique=True
)


@given(st.lists(options_of, min_size=1, max_size=3), st.integers(0, 90))
def test_a_budget_is_spent_nearly_best(sizes, budget):
    """Never more than the budget; and no better choice takes so much less that the next step would have fitted."""
    options = {i: [Option(Quant(4, 64), size, error) for size, error in one] for i, one in enumerate(sizes)}
    smallest = sum(min(one.nbytes for one in given_) for given_ in options.values())
    if smallest > budget:
        with pytest.raises(ConfigError):
            spend(options, budget)
        return
    chosen = spend(options, budget)
    spent = sum(one.nbytes for one in chosen.values())
    error = sum(one.error for one in chosen.values())
    assert spent <= budget
    widest = max(one.nbytes for given_ in options.values() for one in given_)
    for better in combinations(list(options.values())):
        if sum(one.nbytes for one in better) <= budget - widest:
            assert error <= sum(one.error for one in better) + 1e-6


def test_a_step_that_does_not_fit_leaves_its_bytes_to_smaller_ones():
    large, small = [(1, 9.0), (50, 0.0)], [(1, 5.0), (4, 4.9)]
    options = [[Option(Quant(4, 64), size, error) for size, error in one] for one in (large, small)]
    assert [one.nbytes for one in spend(dict(enumerate(options)), 10).values()] == [1, 4]


def combinations(groups):
    return [[one, *rest] for one in groups[0] for rest in (combinations(groups[1:]) if groups[1:] else [[]])]
