"""Models with random weights: every variant can be made with few layers and experts, loads and runs, and a failed run
leaves nothing."""

import json
import shutil
from types import SimpleNamespace

import make_random_model as script
import mlx.core as mx
import numpy as np
import pytest
from grids import marks

from moeflux_mlx import ModelArgs, generate, load
from moeflux_mlx.spec import variants

# Of each of these a checkpoint is made differently: renamed norms, integer tables, rows of n-grams, two matrices,
# biases, layers in a string, and layers counted otherwise.
UNUSUAL = (
    *("gemma-4-26b-a4b", "deepseek-v4-flash", "qwen3.8-flash-next-125b", "gpt-oss-20b", "step-3.5-flash-196b"),
    "nemotron-3-nano-30b-a3b",
)


@pytest.fixture
def folder(tmp_path):
    """Gives a folder that is removed after the test: together the models take a GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def made(out, variant, layers, *options):
    """Makes a tiny model with as few experts as can be."""
    least = script.least_experts(ModelArgs.from_variant(variant).experts.router)
    script.main([f"--variant={variant}", f"--layers={layers}", f"--experts={least}", "--tiny", *options, str(out)])
    return out


def logits_and_text(path):
    """Returns the logits of a few tokens, and the text that follows them."""
    model, tokenizer = load(path)
    try:
        logits = model(mx.array([[1, 2, 3]]), model.make_cache())
        return np.array(logits.astype(mx.float32)), generate(model, tokenizer, [1, 2, 3], max_tokens=1)
    finally:
        model.experts.close()


@pytest.mark.parametrize("variant", variants())
def test_every_variant_with_two_layers_and_the_fewest_experts_runs(folder, variant):
    path = made(folder / "model", variant, 2)
    logits, text = logits_and_text(path)
    assert np.isfinite(logits).all() and logits.std() > 0.1 and isinstance(text, str)
    assert [one.name for one in folder.iterdir()] == ["model"]


@pytest.mark.parametrize("variant", [pytest.param(name, marks=marks(name in UNUSUAL)) for name in variants()])
def test_a_checkpoint_has_the_same_weights(folder, variant):
    path = made(folder / "model", variant, 4, f"--checkpoint={folder / 'mlx'}")
    packed, checkpoint = logits_and_text(path), logits_and_text(folder / "mlx")
    assert (packed[0] == checkpoint[0]).all() and packed[1] == checkpoint[1]


@pytest.mark.parametrize("variant", variants())
def test_few_layers_are_as_many_as_asked_for_and_some_have_experts(variant):
    whole = ModelArgs.from_variant(variant)
    for count in (1, 2, 3, 4, 7, whole.num_hidden_layers):
        args = ModelArgs.from_dict(script.config_of(variant, count))
        assert args.num_hidden_layers == count
        assert any(args.experts_of(i).router.table is None for i in args.moe_layers)  # a router, too, where tables are
        skipped = max(whole.moe_layers[0] + 1 - count, 0)
        kept = whole.mixers[skipped : skipped + count]
        assert args.mixers[:-1] == kept[:-1]  # the last of Gemma has no window


def test_all_layers_and_experts_are_the_variant_itself():
    for variant in variants():
        whole = ModelArgs.from_variant(variant)
        config = script.config_of(variant, whole.num_hidden_layers, whole.num_experts)
        assert ModelArgs.from_dict(config) == whole


@pytest.mark.parametrize(
    ("variant", "option", "limit"),
    [
        ("gpt-oss-20b", "--experts=3", "from 4 to 32"),
        ("cogito-v2-671b", "--experts=20", "a multiple of 8 from 16 to 256"),
        ("cogito-v2-671b", "--experts=8", "a multiple of 8 from 16 to 256"),
        ("step-3.5-flash-196b", "--layers=0", "from 1 to 45"),
        ("nemotron-3-nano-30b-a3b", "--layers=30", "from 1 to 29"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_one_line(tmp_path, variant, option, limit):
    refused(tmp_path / "folder" / "model", f"--variant={variant}", option, error=limit)
    assert not list(tmp_path.iterdir())


def refused(out, *options, error):
    with pytest.raises(SystemExit) as caught:
        script.main([*options, str(out)])
    assert error in caught.value.code and "\n" not in caught.value.code


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    refused(tmp_path / "model", "--variant=qwen3.8-flash-next-125b", "--layers=2", error="1.0 GB of disk are free")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["write_experts", "write_tokenizer", "write_checkpoint"])
def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch, step):
    fail(monkeypatch, step)
    with pytest.raises(SystemExit, match="error: the disk is full"):
        made(tmp_path / "model", "qwen3-30b-a3b", 2, f"--checkpoint={tmp_path / 'mlx'}")
    assert not list(tmp_path.iterdir())


def fail(patch, step):
    def full(*_):
        raise OSError("the disk is full")

    patch.setattr(script, step, full)


def test_force_writes_over_a_model_if_the_run_succeeds(tmp_path, monkeypatch):
    path = made(tmp_path / "model", "qwen3-30b-a3b", 2)
    (path / "notes").write_text("mine")
    before = (path / "resident.safetensors").read_bytes()
    with pytest.raises(SystemExit):
        made(path, "qwen3-30b-a3b", 2)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        fail(patch, "write_experts")
        made(path, "qwen3-30b-a3b", 3, "--force")
    assert (path / "resident.safetensors").read_bytes() == before
    made(path, "qwen3-30b-a3b", 3, "--force")
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 3
    assert (path / "notes").read_text() == "mine" and logits_and_text(path)[1] is not None
