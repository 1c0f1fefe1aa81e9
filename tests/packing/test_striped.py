"""A model whose experts are distributed over several directories: the same bytes, and no drive waits for another."""

import errno
import json
import os
import shutil
import threading

import goldens
import mlx.core as mx
import numpy as np
import pytest
from safetensors_writer import write_model

from moeflux_mlx import plan as plan_command
from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ConfigError, ExpertIOError, ModelFileError, RequestError
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import FOLDER, LAYOUT, ExpertFiles
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import model_fingerprint, open_weights
from moeflux_mlx.packing.located import Located

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a model in one directory, `whole`, and the same model in three, `first`, `b` and `c`.

    Do not write into them.
    """
    folder, source = tmp_path_factory.mktemp("striped"), goldens.checkpoint_dir(FAMILY)
    convert(source, folder / "whole")
    convert(source, folder / "first", also=[folder / "b", folder / "c"])
    return folder


def record(files: ExpertFiles, layer, expert):
    (piece,) = files.pieces(layer, expert)
    with open(piece.path, "rb") as file:
        file.seek(piece.offset)
        return file.read(piece.length)


def test_each_layer_is_distributed_over_all_directories(folders):
    whole, striped = open_weights(Located(folders / "whole")).experts, open_weights(Located(folders / "first")).experts
    for layer in whole.layout.moe_layers:
        for expert in range(whole.layout.num_experts):
            assert record(striped, layer, expert) == record(whole, layer, expert)
            (piece,) = striped.pieces(layer, expert)
            assert piece.path.parent == (folders / "first" / FOLDER, folders / "b", folders / "c")[expert % 3]
    assert sum(striped.sizes.values()) == sum(whole.sizes.values())


@pytest.mark.parametrize("expert_io", ["auto", "pread"])
def test_it_computes_the_same(folders, expert_io):
    tokens = mx.array([[3, 1, 4, 1, 5, 9]])
    logits = [
        np.array(load_model(folders / name, expert_io=expert_io)(tokens).astype(mx.float32))
        for name in ("whole", "first")
    ]
    assert np.array_equal(*logits)
    with pytest.raises(RequestError, match="several directories"):
        load_model(folders / "first", expert_io="mmap")


def edited(folders, tmp_path, change):
    """Returns the model with another layout.json."""
    (tmp_path / FOLDER).mkdir()
    for file in (folders / "first").rglob("*"):
        if file.is_file():
            os.link(file, tmp_path / file.relative_to(folders / "first"))
    content = json.loads((tmp_path / FOLDER / LAYOUT).read_text())
    assert content["format_version"] == 4
    change(content["geometries"])
    (tmp_path / FOLDER / LAYOUT).unlink()
    (tmp_path / FOLDER / LAYOUT).write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("names", [[], ["."], ["b", "."], [".", "b", "b"], [".", 3], [".", ""], "..", {"a": 1}])
def test_impossible_directories_are_refused(folders, tmp_path, names):
    path = edited(folders, tmp_path, lambda geometries: [one.update(directories=names) for one in geometries])
    with pytest.raises(ModelFileError, match="directories|bytes"):
        open_weights(Located(path))


def test_a_missing_directory_is_named(folders, tmp_path):
    path = edited(folders, tmp_path, lambda given: [one["directories"].__setitem__(1, "/no/drive") for one in given])
    with pytest.raises(ModelFileError, match="/no/drive, which has some of the experts, does not exist: connect"):
        open_weights(Located(path))


def test_directories_that_cannot_be_written_in_turn(folders, tmp_path):
    source = goldens.checkpoint_dir(FAMILY)
    for also, error in [
        ([tmp_path / "out"], ConfigError),
        ([tmp_path / "b", tmp_path / "b"], ConfigError),
        ([folders / "b"], ModelFileError),
    ]:
        with pytest.raises(error, match="--also"):
            convert(source, tmp_path / "out", also=also)


def test_an_interrupted_conversion_continues(folders, tmp_path):
    def stop(done, total, name):
        if "layer_01" in name:
            raise KeyboardInterrupt

    also = [tmp_path / "b", tmp_path / "c"]
    with pytest.raises(KeyboardInterrupt):
        convert(goldens.checkpoint_dir(FAMILY), tmp_path / "out", also=also, progress=stop)
    with pytest.raises(ModelFileError):
        convert(goldens.checkpoint_dir(FAMILY), tmp_path / "out", also=also[:1])
    report = convert(goldens.checkpoint_dir(FAMILY), tmp_path / "out", also=also)
    assert str(tmp_path / "c" / "layer_00.bin") in report.kept
    assert model_fingerprint(tmp_path / "out", mx.float32) == model_fingerprint(folders / "first", mx.float32)


# Drives.


def reader_of(files, preadv):
    """Returns a reader for which each directory is a separate drive."""
    return ExpertReader(files, workers=2, preadv=preadv, drive_of=lambda path, stat: path.parent)


def on_drive(files, number):
    """Returns a preadv that does `held` first for calls for one directory."""

    def make(held):
        def preadv(fd, buffers, offset):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(files.folders[number].resolve())):
                held()
            return os.preadv(fd, buffers, offset)

        return preadv

    return make


def test_a_drive_that_hangs_does_not_delay_others(folders):
    files, go_on = open_weights(Located(folders / "first")).experts, threading.Event()
    answers = []
    with_slow = on_drive(files, 1)(lambda: answers.append(go_on.wait(10)))
    loader = StreamedExperts(files, reader=reader_of(files, with_slow))
    slow = loader.request(0, np.array([expert for expert in range(files.layout.num_experts) if expert % 3 == 1]))
    others = [expert for expert in range(files.layout.num_experts) if expert % 3 != 1]
    lease = loader.request(0, np.array(others))
    lease.wait()
    assert not answers, "the slow drive still hangs"
    memory, rows = lease.records()
    size = files.layout.records[0].size
    for expert, row in zip(others, rows, strict=True):
        assert np.asarray(memory.blob)[row].tobytes()[:size] == record(files, 0, expert)
    go_on.set()
    slow.wait()
    loader.close()


def test_a_lost_drive_is_one_clear_error(folders):
    files = open_weights(Located(folders / "first")).experts

    def lost():
        raise OSError(errno.EIO, "Input/output error")

    loader = StreamedExperts(files, reader=reader_of(files, on_drive(files, 2)(lost)))
    with pytest.raises(ExpertIOError, match=rf"^the drive of {folders / 'c'} is lost .*: connect it, and load"):
        loader.request(0, np.arange(files.layout.num_experts)).wait()
    loader.drain()
    loader.request(0, np.array([0, 1])).wait()
    loader.close()


def test_shards_of_a_checkpoint_in_several_directories(tmp_path):
    """One of three files is in another directory.

    The logits are the same, and the error for a missing file names where it was looked for.
    """
    whole, first, other = tmp_path / "whole", tmp_path / "first", tmp_path / "other"
    whole.mkdir()
    write_model(whole, FAMILY, "mlx4", count=3)
    shutil.copytree(whole, first)
    other.mkdir()
    moved = sorted(first.glob("*.safetensors"))[1]
    shutil.move(moved, other / moved.name)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    want = load_model(whole, expert_io="pread")(tokens)
    got = load_model(first, expert_io="pread", shards_in=[other])(tokens)
    assert mx.array_equal(got, want)
    assert plan_command.main(["--model", str(first), "--shards-in", str(other)]) == 0
    with pytest.raises(ModelFileError, match=f"{moved.name} does not exist; .* lists it"):
        load_model(first)
    with pytest.raises(ModelFileError, match=f"nor is it in {tmp_path / 'empty'}"):
        (tmp_path / "empty").mkdir()
        load_model(first, shards_in=[tmp_path / "empty"])
    with pytest.raises(ModelFileError, match="--shards-in takes directories"):
        load_model(first, shards_in=[tmp_path / "none"])
    with pytest.raises(ModelFileError, match="--shards-in takes directories"):
        load_model(shards_in=[tmp_path / "none"])  # also for a packed model, which has no such files
