"""Commands on a checkpoint of mlx-lm: they use it in place, and say when a conversion would help."""

import json
import re
from shutil import copytree

import pytest
from safetensors_writer import write_model
from test_generate import command, fails
from tiny_models import tiny_directory, write_tokenizer

from moeflux_mlx import load, plan
from moeflux_mlx.cli import remarks, terminal
from moeflux_mlx.errors import RequestError

FAMILY = "qwen3_moe"
BASE = ["--dtype", "float32", "-p", "abc", "-m", "8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("mlx") / "tiny-4bit", FAMILY, count=2, residues=[3, 14])
    write_tokenizer(path, "qwen3_style")
    return path


def test_every_way_gives_the_same_text(capfd, checkpoint):
    code, text, err = command(capfd, "--model", tiny_directory(FAMILY), *BASE)
    assert code == 0 and "expert I/O: mmap (auto)" in err
    for more, mode in (
        ([], "resident (auto)"),
        (["--expert-io", "pread"], "pread (forced)"),
        (["--expert-io", "pread", "--expert-cache-gb", "1e-6", "--prefetch", "off"], "pread (forced)"),
    ):
        code, out, err = command(capfd, "--model", checkpoint, *BASE, *more)
        assert (code, out) == (0, text) and f"expert I/O: {mode}" in err and " in place" in err
    assert (
        "have no effect where experts are resident"
        in command(capfd, "--model", checkpoint, *BASE, "--expert-cache-gb", "1", "--prefetch", "off")[2]
    )


def test_a_packed_model_can_be_resident_too(capfd):
    code, _, err = command(capfd, "--model", tiny_directory(FAMILY), *BASE, "--expert-io", "resident")
    assert code == 0 and "expert I/O: resident (forced)" in err


def test_a_checkpoint_without_its_weights_is_reported(capfd, checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors.index.json" and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert f"{tmp_path} has a config.json and no weights" in fails(capfd, "--model", tmp_path, *BASE)


def test_mapping_is_refused_with_the_command_that_would_work(capfd, checkpoint, monkeypatch):
    wanted = rf"python -m moeflux_mlx\.convert --hf-path {checkpoint} --mlx-path tiny-4bit-moeflux$"
    assert re.search(wanted, fails(capfd, "--model", checkpoint, *BASE, "--expert-io", "mmap"))
    assert plan.main(["--model", str(checkpoint), "--expert-io", "mmap"]) == 1
    assert re.search(wanted, capfd.readouterr().err.rstrip())
    monkeypatch.setenv("MOEFLUX_EXPERT_IO", "mmap")
    assert re.search(wanted, fails(capfd, "--model", checkpoint, *BASE))
    with pytest.raises(RequestError, match="moeflux_mlx.convert"):
        load(checkpoint)


def test_a_plan_of_a_checkpoint(capfd, checkpoint):
    def printed(*more):
        assert plan.main(["--model", str(checkpoint), *more]) == 0
        return capfd.readouterr()

    out, err = printed("--expert-cache-gb", "1")
    assert "expert I/O: resident (auto)" in out and "experts are read once, at loading" in out
    assert "no effect where experts are resident" in err
    assert "hit rate  50%" in printed("--expert-io", "pread", "--measure-disk")[0]


def test_the_gain_of_packing_is_reported_once(capfd, checkpoint, monkeypatch):
    more = ["--expert-io", "pread", "--expert-cache-gb", "1e-6"]
    monkeypatch.setattr(remarks, "WORTH_CONVERTING", 0.0)
    err = command(capfd, "--model", checkpoint, *BASE, *more)[2]
    (line,) = re.findall("note: .*", err)
    assert re.search(r"note: \d+% of the time went by waiting .* --mlx-path tiny-4bit-moeflux$", line)
    for model, options in ((checkpoint, []), (tiny_directory(FAMILY), more)):
        assert "note: " not in command(capfd, "--model", model, *BASE, *options)[2]
    monkeypatch.setattr(remarks, "WORTH_CONVERTING", 1.1)
    assert "note: " not in command(capfd, "--model", checkpoint, *BASE, *more)[2]


def test_a_prompt_that_was_saved_with_the_packed_model_is_another_models(capfd, checkpoint, tmp_path):
    packed = copytree(tiny_directory(FAMILY), tmp_path / "packed")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (packed / name).write_bytes((checkpoint / name).read_bytes())
    kept = [*BASE, "--prompt-cache-dir", str(tmp_path / "kept"), "--verbose"]
    first = command(capfd, "--model", packed, *kept)
    for mode in ("resident", "pread"):
        code, out, err = command(capfd, "--model", checkpoint, *kept, "--expert-io", mode)
        assert (code, out) == first[:2] and (mode == "pread" or re.search("prompt cache: 0 of", err))


def test_loading_shows_its_progress(capfd, checkpoint, monkeypatch):
    shown = []
    monkeypatch.setattr(terminal.ProgressLine, "_show", lambda self, text: shown.append(text))
    command(capfd, "--model", checkpoint, *BASE)
    assert any(re.fullmatch(r"loading \d+\.\d/\d+\.\d GB", text) for text in shown)
    told = []
    load(checkpoint, progress=lambda done, total: told.append(done / total))
    assert told == sorted(told) and told[-1] == 1
    out, err = capfd.readouterr()
    assert out == err == ""


def test_floats_are_not_packed(capfd, tmp_path):
    path = write_model(tmp_path / "hub", FAMILY, variant="hub")
    line = fails(capfd, "--model", path, *BASE)
    assert f"is not packed (no packed_experts/layout.json); run: python -m moeflux_mlx.convert --hf-path {path}" in line


def test_a_form_that_is_not_known_is_named(capfd, tmp_path):
    path = write_model(tmp_path / "model", FAMILY)
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4, "mode": "nvfp4"}
    (path / "config.json").write_text(json.dumps(config))
    line = fails(capfd, "--model", path, *BASE)
    said = "error: quantization of the model: 4 bits, group_size 64, mode 'nvfp4' is not known; supported: affine 1, 2"
    assert line.startswith(said)


def test_a_damaged_shard(capfd, checkpoint, tmp_path):
    path = copytree(checkpoint, tmp_path / "model")
    shard = sorted(path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "download it again" in fails(capfd, "--model", path, *BASE)
    shard.unlink()
    assert "does not exist" in fails(capfd, "--model", path, *BASE)
