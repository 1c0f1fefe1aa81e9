"""A checkpoint that another program changes while a conversion reads it: never a model of two checkpoints."""

import os
import shutil

import goldens
import mlx.core as mx
import pytest
from minmax import convert
from test_convert import tree
from tiny_models import write_tokenizer

from moeflux_mlx.calibration.calibrated import Calibration, convert_calibrated
from moeflux_mlx.convert import main
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.packed import FOLDER, LAYOUT
from moeflux_mlx.packing.conversion import ConvertSettings

pytestmark = pytest.mark.usefixtures("cpu_device")
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def source(tmp_path):
    """A checkpoint of three shards with a tokenizer, and beside it the same with other weights and the same dates."""
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "hub")
    write_tokenizer(source, "qwen3_style")
    tensors = goldens.split_experts(goldens.source("qwen3_moe"))
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    for number in range(3):
        part = {name: tensors[name] for name in names[number::3]}
        goldens.write_safetensors(source / f"model-{number + 1:05d}-of-00003.safetensors", part)
    other = shutil.copytree(source, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-2:] = bytes(2)
        file.write_bytes(data)
        shutil.copystat(source / file.name, file)
    return source


def replaced(source):
    """Another file of the same size and date."""
    os.replace(source.parent / "other" / SHARD, source / SHARD)


CHANGES = {
    "replaced": (SHARD, "was changed or replaced (another inode)", replaced),
    "touched": (SHARD, "was changed or replaced (another time)", lambda source: os.utime(source / SHARD, (1, 1))),
    "a tokenizer less": (
        *("tokenizer_config.json", "was removed"),
        lambda source: (source / "tokenizer_config.json").unlink(),
    ),
    "another config.json": (
        *("config.json", "was changed or replaced (another size, time)"),
        lambda source: (source / "config.json").write_text((source / "config.json").read_text() + "\n"),
    ),
    "a new vocabulary": ("tekken.json", "appeared", lambda source: (source / "tekken.json").write_text("{}")),
}


def once(change, source, begun):
    """A callback that makes the change when `begun(done, total)` is true for the first time."""
    made = []

    def report(done, total, name):
        if not made and begun(done, total):
            made.append(change(source))

    return report


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_the_conversion_and_is_named(tmp_path, source, change):
    name, what, make = CHANGES[change]
    late = once(make, source, lambda done, total: done >= total * 0.9)
    with pytest.raises(ModelFileError) as raised:
        convert(source, tmp_path / "out", progress=late)
    assert str(raised.value).startswith(f"{source / name} {what} while it was read"), raised.value
    assert not (tmp_path / "out" / FOLDER / LAYOUT).exists()


def test_nothing_is_kept_of_a_file_that_was_replaced(tmp_path, source):
    """Size and date are the same, so only this run knows that its files are of two checkpoints."""
    with pytest.raises(ModelFileError, match="while it was read"):
        convert(source, tmp_path / "out", progress=once(replaced, source, lambda done, total: done >= total * 0.9))
    convert(source, tmp_path / "out")
    convert(source, tmp_path / "fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_shard_that_is_deleted_when_it_is_packed(tmp_path, source, monkeypatch):
    touch = once(CHANGES["touched"][2], source, lambda done, total: done > 0)
    with pytest.raises(ModelFileError, match=f"{SHARD} is not the file that this conversion began with; restore it"):
        convert(source, tmp_path / "out", delete_source=True, progress=touch)
    assert (source / SHARD).exists() and not (tmp_path / "out" / FOLDER / LAYOUT).exists()


def test_a_change_while_a_text_is_read(tmp_path, source):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. ")
    calibration = Calibration(tmp_path / "work", [text], dtype=mx.float32)
    late = once(replaced, source, lambda done, total: done == 1)
    with pytest.raises(ModelFileError, match=f"{SHARD} was changed or replaced"):
        convert_calibrated(
            ConvertSettings(source, tmp_path / "out"), calibration, report=lambda share, name: late(share, 1, name)
        )
    assert not (tmp_path / "out").exists()


def test_the_command_says_so(tmp_path, source, monkeypatch, capsys):
    change = once(replaced, source, lambda done, total: True)
    monkeypatch.setattr("moeflux_mlx.convert.note", lambda line: change(1, 1, line))  # of the first file
    assert main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert f"error: {source / SHARD} was changed" in said and "is ready" not in said
