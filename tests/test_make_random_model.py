"""Models with random weights: every variant can be made with few layers and experts, loads and runs, and a failed run
leaves nothing."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import make_random_model as script
import mlx.core as mx
import numpy as np
import pytest
from grids import marks

from moeflux_mlx import ModelArgs, generate, load
from moeflux_mlx.formats.record import Record
from moeflux_mlx.quant import GRID, of_mode
from moeflux_mlx.spec import variants

# Of each of these a checkpoint is made differently: renamed norms, integer tables, rows of n-grams, two matrices,
# biases, layers in a string, and layers counted otherwise.
UNUSUAL = (
    *("gemma-4-26b-a4b", "deepseek-v4-flash", "qwen3.8-flash-next-125b", "gpt-oss-20b", "step-3.5-flash-196b"),
    "nemotron-3-nano-30b-a3b",
)
# The first variant of each set of kinds of mixers: within a set only sizes and switches differ, which test_kin.py runs.
FIRST_OF_A_KIND = {frozenset(map(type, ModelArgs.from_variant(name).mixers)): name for name in reversed(variants())}
SOME = {*UNUSUAL, *FIRST_OF_A_KIND.values()}
SMALL = ("--variant=qwen3-30b-a3b", "--layers=1", "--experts=8", "--tiny")


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


@pytest.mark.parametrize("variant", [pytest.param(name, marks=marks(name in SOME)) for name in variants()])
def test_every_variant_with_two_layers_and_the_fewest_experts_runs(folder, variant):
    path = made(folder / "model", variant, 2)
    logits, text = logits_and_text(path)
    assert np.isfinite(logits).all() and logits.std() > 0.05 and isinstance(text, str)
    assert [one.name for one in folder.iterdir()] == ["model"]


def test_experts_of_a_form_with_a_table_have_one_table():
    record = Record.make(256, 256, (of_mode("iq2_xs"),) * 3)
    blocks = script.blocks_of(record, np.random.default_rng(0))
    tables = [blocks[:, field.offset : field.end] for field in record.fields if field.part == GRID]
    assert len(tables) == 3 and len({row.tobytes() for table in tables for row in table}) == 1


@pytest.mark.parametrize("variant", [pytest.param(name, marks=marks(name in UNUSUAL)) for name in variants()])
def test_a_checkpoint_has_the_same_weights(folder, variant):
    path = made(folder / "model", variant, 4, f"--checkpoint={folder / 'mlx'}")
    packed, checkpoint = logits_and_text(path), logits_and_text(folder / "mlx")
    assert (packed[0] == checkpoint[0]).all() and packed[1] == checkpoint[1]


@pytest.mark.parametrize("variant", variants())
def test_few_layers_are_as_many_as_asked_for_and_some_have_experts(variant):
    whole = ModelArgs.from_variant(variant)
    for count in (2, 4, 8) if "longcat" in variant else (1, 2, 3, 4, 7, whole.num_hidden_layers):
        args = ModelArgs.from_dict(script.config_of(variant, count))
        assert args.num_hidden_layers == count
        assert any(args.experts_of(i).router.table is None for i in args.moe_layers)  # a router, too, where tables are
        skipped = max(whole.moe_layers[0] + 1 - count, 0)
        kept = whole.mixers[skipped : skipped + count]
        assert args.mixers[:-1] == kept[:-1]  # the last of Gemma has no window


def test_numbers_of_layers_are_cut_to_those_that_are_left():
    body = {"num_hidden_layers": 42, "dense_mlp_idx": 2, "local_layer_ids": [0, 1, 3, 4], "mlp_only_layers": [0, 3]}
    script.keep_layers(body, 1, 3)
    assert body == {"num_hidden_layers": 3, "dense_mlp_idx": 1, "local_layer_ids": [0, 2], "mlp_only_layers": [2]}


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
    """A checkpoint takes as much again, perhaps on another disk."""
    free = {tmp_path: 25 * 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.get(folder, 10**15)))
    both = tmp_path / "model", "--variant=qwen3-30b-a3b", f"--checkpoint={tmp_path / 'mlx'}"
    refused(*both, error=f"34.4 GB are to be written to {tmp_path}; 25.0 GB of disk are free")
    free[tmp_path] = 10**9
    refused(both[0], both[1], error=f"17.2 GB are to be written to {tmp_path}; 1.0 GB of disk are free")
    elsewhere = tmp_path.parent / "model", both[1], both[2]
    monkeypatch.setattr(script, "device_of", lambda folder: str(folder))
    refused(*elsewhere, error=f"17.2 GB are to be written to {tmp_path}; 1.0 GB")
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


def test_force_replaces_a_model_as_a_whole(folder, monkeypatch):
    path = made(folder / "model", "qwen3.8-flash-next-125b", 4)
    (path / "notes").write_text("of the old one")
    before = files_of(path)
    with pytest.raises(SystemExit, match="exists; give another directory, or --force"):
        made(path, "qwen3-30b-a3b", 2)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        fail(patch, "write_experts")
        made(path, "qwen3-30b-a3b", 2, "--force")
    assert files_of(path) == before
    made(path, "qwen3-30b-a3b", 2, "--force")
    made(folder / "new", "qwen3-30b-a3b", 2)
    assert files_of(path) == files_of(folder / "new") and sorted(folder.iterdir()) == [path, folder / "new"]


def files_of(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_model_that_could_not_be_replaced_is_put_back(folder, monkeypatch):
    path = made(folder / "model", "qwen3-30b-a3b", 2)
    before, rename, renamed = files_of(path), Path.rename, []

    def refuse_the_second(self, target):
        renamed.append(self)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_second)
    with pytest.raises(KeyboardInterrupt):
        made(path, "qwen3-30b-a3b", 3, "--force")
    assert files_of(path) == before and list(folder.iterdir()) == [path]


def test_force_replaces_checkpoints_and_empty_directories(folder):
    for _ in range(2):
        (folder / "model").mkdir(exist_ok=True)
        made(folder / "model", "qwen3-30b-a3b", 2, f"--checkpoint={folder / 'mlx'}", "--force")
    assert (folder / "mlx" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("names", [["notes"], ["config.json"], ["model.safetensors"], []], ids=str)
def test_force_does_not_replace_what_is_no_model(tmp_path, names):
    """Without names `there` is a file."""
    there = tmp_path / "there"
    there.mkdir() if names else there.write_text("mine")
    for name in names:
        (there / name).write_text("mine")
    wanted = "there is not a model or checkpoint"
    refused(there, *SMALL, "--force", error=wanted)
    refused(tmp_path / "new", *SMALL, "--force", f"--checkpoint={there}", error=wanted)
    assert sorted(tmp_path.rglob("*")) == sorted([there, *(there / name for name in names)])


def test_a_mount_point_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    refused(tmp_path, *SMALL, "--force", error="is a mount point")


@pytest.mark.parametrize(("out", "checkpoint"), [("one", "one"), ("one", "one/mlx"), ("one/model", "one")])
def test_model_and_checkpoint_need_two_directories(tmp_path, out, checkpoint):
    checkpoint = f"--checkpoint={tmp_path / 'other' / '..' / checkpoint}"
    refused(tmp_path / out, *SMALL, checkpoint, error="one lies in the other")
    assert not list(tmp_path.iterdir())


def test_a_negative_seed_is_refused(tmp_path):
    refused(tmp_path / "model", *SMALL, "--seed=-1", error="--seed is -1; it must be at least 0")
