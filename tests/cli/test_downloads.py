"""Models in the Hub's cache are listed with their size, and deleted when the user agrees."""

import pytest
from gguf_models import write_gguf
from small_hub import SmallHub, connected
from tiny_models import tiny_directory

from moeflux_mlx.cli.main import main
from moeflux_mlx.opening.remote import fetch


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
