"""Models of a small Hub: planned from headers, confirmed, downloaded, run; without messages for the library."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import goldens
import mlx.core as mx
import pytest
from gguf_models import write_gguf
from small_hub import SmallHub, connected
from tiny_models import child_environment, tiny_directory, write_tokenizer

from moeflux_mlx import load, load_model
from moeflux_mlx.cli import fetching
from moeflux_mlx.cli.main import main
from moeflux_mlx.convert import main as convert
from moeflux_mlx.errors import ModelFileError, NotPackedError, RequestError
from moeflux_mlx.formats.checkpoint import COPIED
from moeflux_mlx.formats.hub import Repository
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.generate.__main__ import main as generate
from moeflux_mlx.model.tensors import resident_bytes
from moeflux_mlx.model.weights import read_resident
from moeflux_mlx.opening.locate import locate
from moeflux_mlx.opening.remote import Remote, fetch
from moeflux_mlx.packing.gguf_folder import base_tokenizer
from moeflux_mlx.plan import main as plan
from moeflux_mlx.pull import main as pull
from moeflux_mlx.spec import ModelArgs

RUN = ["--model", "org/model", "--prompt", "Hello", "--max-tokens", "3"]


@pytest.fixture
def packed(tmp_path):
    with SmallHub(tiny_directory("qwen3_moe")) as hub, connected(hub, tmp_path / "cache") as hub.environment:
        yield hub


def weights(hub):
    """Returns the requests for whole files of weights."""
    large = (".safetensors", ".bin")
    return [name for how, name, part in hub.requests if how == "GET" and name.endswith(large) and not part]


def test_a_packed_model_is_planned_downloaded_and_run(packed, capfd):
    assert generate(RUN) == 0
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith("org/model: 0.") and "are to be downloaded to" in lines[0] and out
    assert lines[1].startswith("expert I/O: ") and any(line.startswith("in all ") for line in lines)
    assert len(weights(packed)) == 4
    assert generate(RUN) == 0
    out_again, err = capfd.readouterr()
    assert "downloaded" not in err and "Fetching" not in err and out_again.splitlines()[:1] == out.splitlines()[:1]
    assert len(weights(packed)) == 4


def test_load_prints_nothing(packed, capfd):
    model, _ = load("org/model")
    assert capfd.readouterr() == ("", "")
    own, _ = load(tiny_directory("qwen3_moe"))
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), own(tokens))


def test_plan_reads_headers_only(packed, capfd):
    assert plan(["--model", "org/model"]) == 0
    there = capfd.readouterr().out.splitlines()
    assert plan(["--model", str(tiny_directory("qwen3_moe"))]) == 0
    here = capfd.readouterr().out.splitlines()
    (disk,) = (line for line in there if line.startswith("org/model: "))
    assert [line for line in there if line != disk] == here and not weights(packed)
    assert plan(["--model", "org/model", "--measure-disk"]) == 1
    assert "org/model is not here; leave it out" in capfd.readouterr().err


def test_without_an_answer_of_the_hub_the_cached_model_is_used(packed, tmp_path):
    path = fetch("org/model")
    packed.repo = "org/elsewhere"
    assert fetch("org/model") == path
    with pytest.raises(ModelFileError, match="org/other is no file or directory here and cannot be found"):
        fetch("org/other")


def test_a_full_disk_is_found_before_the_download(packed, capfd, free_disk):
    free_disk(300_000)
    assert generate(RUN) == 1
    assert "and 300000 (0.0003 GB) are free; free some disk space, or set HF_HOME" in capfd.readouterr().err
    assert not weights(packed)


def test_a_large_download_needs_a_yes(packed, monkeypatch, capfd):
    monkeypatch.setattr(fetching, "ASKED_FROM", 1000)
    assert generate(RUN) == 1
    assert "GB of org/model will be downloaded; there is no terminal to ask on: add --yes" in capfd.readouterr().err
    assert not weights(packed)
    assert generate([*RUN, "--yes"]) == 0 and weights(packed)


ASKED = """
import sys
from pathlib import Path
from moeflux_mlx.cli import fetching
from moeflux_mlx.generate.__main__ import main
fetching.ASKED_FROM = 1000
sys.exit(main(sys.argv[1:]))
"""


def test_a_terminal_is_asked(packed):
    here, there = pty.openpty()
    os.write(here, b"n\n")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), there)
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *RUN], env={**child_environment(), **packed.environment}, **streams
    )
    os.close(there)
    text = os.read(here, 1 << 16).decode()
    os.close(here)
    assert done.returncode == 1 and "go on? [y/N]" in text and "the answer was not y" in text and not weights(packed)


def test_a_checkpoint_that_mlx_quantised_comes_whole_and_runs(tmp_path, capfd):
    folder = goldens.write_variant(tmp_path / "checkpoint", "qwen3_moe", "mlx4")
    write_tokenizer(folder, "qwen3_style")
    (folder / "extra.bin").write_bytes(b"never asked for")
    own = tiny_directory("qwen3_moe")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        _, layout, shapes = Remote.look_up("org/model").figures()
        assert plan(["--model", "org/model"]) == 0 and " in place" in capfd.readouterr().out
        assert not weights(hub)
        model = load_model("org/model")
        assert capfd.readouterr() == ("", "") and weights(hub) == ["model.safetensors"]
        assert generate(RUN) == 0 and "downloaded" not in capfd.readouterr().err
    assert layout == PackedExperts.open(own, ModelArgs.from_file(own)).layout
    assert resident_bytes(shapes, mx.float32) == resident_bytes(read_resident(own), mx.float32)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), load_model(own)(tokens))


def test_without_an_answer_a_checkpoint_in_the_cache_runs_if_it_is_whole(tmp_path):
    folder = goldens.write_variant(tmp_path / "checkpoint", "qwen3_moe", "mlx4")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        path = fetch("org/model")
        hub.repo = "org/elsewhere"
        assert fetch("org/model") == path
        (path / "model.safetensors").unlink()
        with pytest.raises(ModelFileError, match="org/model is no file or directory here and cannot be found"):
            fetch("org/model")


def test_floats_are_refused_before_they_are_downloaded(tmp_path):
    folder = goldens.write_variant(tmp_path / "checkpoint", "qwen3_moe", "hub_sharded")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        with pytest.raises(NotPackedError, match="--hf-path org/model"):
            fetch("org/model")
        assert not weights(hub)


@pytest.fixture
def ggufs(tmp_path):
    """A repository with two GGUF models, one of them in two files of a folder, and an image encoder."""
    folder = tmp_path / "files"
    (folder / "UD-Q8_0").mkdir(parents=True)
    write_gguf(folder / "Tiny-Q4_0.gguf", "qwen3_moe", lambda name: "Q4_0")
    whole = tmp_path / "whole" / "Tiny-UD-Q8_0.gguf"
    whole.parent.mkdir()
    write_gguf(whole, "qwen3_moe", lambda name: "Q8_0", split_max_tensors=20)
    parts = sorted(whole.parent.iterdir())
    for part in parts:
        shutil.copy(part, folder / "UD-Q8_0" / part.name)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        hub.first = parts[0]
        yield hub


def asked_for(hub):
    return {name for how, name, part in hub.requests if how == "GET" and name.endswith(".gguf") and not part}


@pytest.mark.parametrize("call", ["mkdir", "truncate"])
def test_headers_that_cannot_be_kept_are_one_line(ggufs, tmp_path, monkeypatch, capsys, call):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    if call == "mkdir":
        (tmp_path / "kept").write_bytes(b"")
    else:
        monkeypatch.setattr("os.truncate", lambda *_: (_ for _ in ()).throw(OSError(27, "File too large")))
    assert plan(["--model", "org/model:q8_0"]) != 0
    assert "headers" in (said := capsys.readouterr().err) and "cannot be written: " in said


def test_old_headers_are_removed(ggufs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    headers = tmp_path / "kept" / "moeflux" / "gguf" / "headers"
    for age in range(10):
        (headers / f"old{age}").mkdir(parents=True)
        (headers / f"old{age}" / "x.gguf").write_bytes(b"GGUF")
        os.utime(headers / f"old{age}", (1e9 - age, 1e9 - age))
    for _ in range(2):  # its own are among those that stay
        assert plan(["--model", "org/model:q8_0"]) == 0
        kept = {one.name for one in headers.iterdir()}
        assert len(kept) == 8 and kept > {f"old{age}" for age in range(7)}


def test_a_gguf_model_of_a_repository_is_planned_from_headers_and_comes_alone(ggufs, capfd):
    name = "org/model:q8_0"
    assert plan(["--model", name]) == 0
    there = capfd.readouterr().out.splitlines()
    assert not asked_for(ggufs)
    assert plan(["--model", str(ggufs.first)]) == 0
    here = capfd.readouterr().out.splitlines()
    assert [line for line in there if not line.startswith("org/model: ")] == here
    assert generate(["--model", name, "--prompt", "Hello", "--max-tokens", "3"]) == 0
    out, err = capfd.readouterr()
    assert err.startswith("org/model: 0.") and "are to be downloaded to" in err
    assert asked_for(ggufs) == {f"UD-Q8_0/{part.name}" for part in ggufs.first.parent.iterdir()}
    assert generate(["--model", str(ggufs.first), "--prompt", "Hello", "--max-tokens", "3"]) == 0
    assert capfd.readouterr().out == out
    remote, size = Remote.look_up(name), sum(part.stat().st_size for part in ggufs.first.parent.iterdir())
    assert (remote.missing, remote.total) == (0, size)
    ggufs.repo = "org/elsewhere"  # the Hub does not answer for this one any more
    assert fetch(name).name == ggufs.first.name
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(name)(tokens), load_model(ggufs.first)(tokens))


def test_a_gguf_model_of_a_repository_is_converted(ggufs, tmp_path, capfd):
    assert convert(["--hf-path", "org/model:Q4_0", "--mlx-path", str(tmp_path / "packed")]) == 0
    assert asked_for(ggufs) == {"Tiny-Q4_0.gguf"} and "are to be downloaded" in capfd.readouterr().err
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(tmp_path / "packed")(tokens), load_model("org/model:Q4_0")(tokens))


@pytest.mark.parametrize("name", ["org/model", "org/model:Q2_K", "org/model:0"])
def test_which_gguf_is_meant_must_be_clear(ggufs, name):
    with pytest.raises(
        RequestError, match=r"org/model:NAME, .*: Tiny-Q4_0 \(0.0 GB\), UD-Q8_0/Tiny-UD-Q8_0 \(0.0 GB\)"
    ):
        fetch(name)
    assert not asked_for(ggufs)


def test_the_tokenizer_of_the_model_that_a_gguf_was_made_from_comes_too(tmp_path):
    source = {"general.base_model.0.repo_url": "https://huggingface.co/org/model"}
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "Tiny-Q4_0.gguf", "qwen3_moe", lambda name: "Q4_0", source)
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        assert fetch("org/model").name == "Tiny-Q4_0.gguf"  # the Hub has no such base
    base = tmp_path / "base"
    base.mkdir()
    write_tokenizer(base, "qwen3_style")
    with SmallHub(base, "org/model") as hub, connected(hub, tmp_path / "another"):
        own = Repository.look_up("org/model").snapshot(list(COPIED))
        assert base_tokenizer(folder / "Tiny-Q4_0.gguf") == own
        assert (locate(folder / "Tiny-Q4_0.gguf").path / "tokenizer.json").read_bytes() == (
            own / "tokenizer.json"
        ).read_bytes()


def test_pull_downloads_and_loads_nothing(packed, monkeypatch, capfd):
    monkeypatch.setattr(fetching, "ASKED_FROM", 0)
    assert pull(["org/model"]) == 1
    assert "GB of org/model will be downloaded; there is no terminal" in capfd.readouterr().err and not weights(packed)
    assert pull(["org/model", "--yes"]) == 0
    out, err = capfd.readouterr()
    assert "are to be downloaded to" in err and "moeflux chat --model org/model runs it" in err
    assert "loaded in" not in err and "expert I/O" not in err and len(weights(packed)) == 4
    assert locate("org/model").path == Path(out.strip()) and pull(["org/model"]) == 0
    assert len(weights(packed)) == 4 and capfd.readouterr().out == out


def test_pull_takes_a_repository(tmp_path, capsys):
    for name in ("qwen3:30b", str(tmp_path)):
        assert pull([name]) == 1
        assert f"error: {name} is not a repository of the Hugging Face Hub; give org/name" in capsys.readouterr().err


@pytest.fixture
def hub(tmp_path):
    with SmallHub(tiny_directory("qwen3_moe")) as hub, connected(hub, tmp_path / "cache") as hub.environment:
        yield hub


def test_downloaded_models_are_listed_and_removed(hub, capsys):
    assert main(["list"]) == 0 and capsys.readouterr() == ("", f"downloaded models: 0, in {cache()}\n")
    path = fetch("org/model")
    assert main(["list"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("org/model ") and out.endswith(" GB\n") and err.startswith("downloaded models: 1, in ")
    assert main(["remove", "org/model"]) == 1 and path.exists()
    assert "GB of org/model will be deleted; there is no terminal to ask on: add --yes" in capsys.readouterr().err
    assert main(["remove", "org/modle"]) == 1
    assert "org/modle is not among the downloaded models, which moeflux list shows; did you mean org/model?" in (
        capsys.readouterr().err
    )
    assert main(["remove", "org/model", "--yes"]) == 0 and not path.exists()
    capsys.readouterr()
    assert main(["list"]) == 0 and capsys.readouterr().out == ""


def test_an_incomplete_model_is_listed_as_such(hub, capsys):
    path = fetch("org/model")
    next(path.glob("packed_experts/*.bin")).unlink()
    assert main(["list"]) == 0
    assert capsys.readouterr().out.endswith("not all of it is here\n")


def test_what_cannot_be_run_is_left_alone(hub, capsys):
    (fetch("org/model") / "config.json").unlink()
    assert main(["list"]) == 0 and capsys.readouterr().out == ""
    assert main(["remove", "org/model", "--yes"]) == 1 and "is not among" in capsys.readouterr().err


def test_gguf_models_are_listed_too(tmp_path, capsys):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in (1, 2):
        write_gguf(folder / f"Tiny{number}-Q4_0.gguf", "qwen3_moe", lambda name: "Q4_0", split_max_tensors=20)
    with SmallHub(folder) as hub, connected(hub, tmp_path / "cache"):
        first = fetch("org/model:Tiny1-Q4_0")
        assert main(["list"]) == 0
        assert capsys.readouterr().out.startswith("org/model ") and not list(first.parent.glob("Tiny2*"))
        next(part for part in first.parent.iterdir() if part != first).unlink()
        assert main(["list"]) == 0 and capsys.readouterr().out.endswith("not all of it is here\n")


def cache():
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
