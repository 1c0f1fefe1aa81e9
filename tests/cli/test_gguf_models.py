"""GGUF models of a repository, of every architecture, and the note on a quant that suits the memory better."""

from pathlib import Path

import gguf_models
import pytest
from grids import one_in_three
from small_hub import SmallHub, connected
from test_gguf_families import cache, type_of  # noqa: F401 (a fixture)

from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.load_settings import locate
from moeflux_mlx.opening.remote import Remote
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.plan import main as plan
from moeflux_mlx.planning.quants import Quants
from moeflux_mlx.pull import main as pull

pytest.importorskip("gguf")

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("family", one_in_three(sorted(gguf_models.ARCHITECTURES)))
def test_a_model_is_planned_from_its_header_and_comes_alone(tmp_path, capfd, family):
    folder = tmp_path / "files"
    folder.mkdir()
    gguf_models.write_gguf(folder / "Tiny-Q8_0.gguf", family, type_of(family))
    (folder / "Tiny-Q2_K.gguf").write_bytes(b"GGUF")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "hub"):
        args, layout, _ = Remote.look_up("org/model:q8_0").figures()
        assert plan(["--model", "org/model:Q8_0"]) == 0 and "Tiny" not in capfd.readouterr().out
        assert not [name for how, name, part in hub.requests if how == "GET" and not part]
        assert pull(["org/model:Q8_0"]) == 0
        path = Path(capfd.readouterr().out.strip())
    weights = open_weights(locate(path))
    assert path.name == "Tiny-Q8_0.gguf" and (args, layout) == (weights.args, weights.experts.layout)
    text = weights.located.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family, comes", [("glm4_moe", True), ("exaone_moe", False)])
def test_a_draft_head_comes_with_a_model_that_can_use_it(tmp_path, capfd, family, comes):
    """That of its name and quant, in two files; not one of another name, folder or quant."""
    folder, head = tmp_path / "files", [f"mtp-Tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    folder.mkdir()
    gguf_models.write_gguf(folder / "Tiny-UD-Q8_0.gguf", family, type_of(family))
    gguf_models.write_head(folder / "mtp-Tiny-Q8_0.gguf", "glm4_moe", lambda name: "F32", split_max_tensors=12)
    assert sorted(file.name for file in folder.glob("mtp-*")) == head
    for name in ("mtp-Tiny-Q4_0.gguf", "mtp-Other-Q8_0.gguf", "more/mtp-Tiny-Q8_0.gguf"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    with SmallHub(folder) as hub, connected(hub, tmp_path / "hub"):
        assert pull(["org/model:q8_0"]) == 0
        path = Path(capfd.readouterr().out.strip())
        assert Remote.look_up("org/model:q8_0").missing == 0
    assert sorted(file.name for file in path.parent.glob("mtp-*")) == (head if comes else [])
    if comes:
        model = load_model(path, draft="head")
        assert model.head is not None
        model.experts.close()


GB = 10**9
SIZES = {
    **{f"UD-Q4_K_XL/Tiny-UD-Q4_K_XL-0000{i}-of-00002.gguf": 20 * GB for i in (1, 2)},
    **{"Tiny-Q8_0.gguf": 70 * GB, "Tiny-UD-IQ2_XXS.gguf": 20 * GB, "Tiny-BF16.gguf": 130 * GB},
    **{"mmproj-Tiny-Q4_0.gguf": GB, "Other-Q5_K_M.gguf": 45 * GB},
}
BETTER = "UD-Q4_K_XL/Tiny-UD-Q4_K_XL (40.0 GB) is rounded less, and fits in memory too"
SMALLER = "UD-Q4_K_XL/Tiny-UD-Q4_K_XL (40.0 GB) fits in memory; Tiny-Q8_0 (70.0 GB) is streamed from disk"


@pytest.mark.parametrize(
    "chosen, memory, wanted",
    [
        ("Tiny-UD-IQ2_XXS.gguf", 64, BETTER),
        ("Tiny-UD-IQ2_XXS.gguf", 128, BETTER.replace("UD-Q4_K_XL/Tiny-UD-Q4_K_XL (4", "Tiny-Q8_0 (7")),
        ("Tiny-Q8_0.gguf", 64, SMALLER),
        ("UD-Q4_K_XL/Tiny-UD-Q4_K_XL-00001-of-00002.gguf", 64, ""),
        ("Tiny-Q8_0.gguf", 16, ""),
        ("Tiny-BF16.gguf", 64, ""),
        ("Other-Q5_K_M.gguf", 128, ""),
    ],
)
def test_a_quant_that_suits_the_memory_better(chosen, memory, wanted):
    assert Quants(SIZES, (chosen,)).note(memory * GB) == wanted


def test_parts_of_a_model_on_another_drive_count(tmp_path):
    """Also those of the model that is to run; other models count where all of their parts are."""
    here, there = tmp_path / "a", tmp_path / "b"
    sizes = {"a/Tiny-Q8_0-00001-of-00002": 1, "b/Tiny-Q8_0-00002-of-00002": 7, "a/Tiny-Q4_0": 5}
    for name, size in (sizes | {"a/Tiny-Q6_K-00001-of-00002": 6}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.gguf").write_bytes(bytes(size))
    eight = [here / "Tiny-Q8_0-00001-of-00002.gguf", there / "Tiny-Q8_0-00002-of-00002.gguf"]
    assert Quants.beside(eight).note(100) == ""
    assert Quants.beside(eight).note(9).startswith("Tiny-Q4_0 (0.0 GB) fits in memory; Tiny-Q8_0 (0.0 GB) is")
    assert Quants.beside([here / "Tiny-Q4_0.gguf"]).note(100) == ""


def test_the_note_is_one_line_of_a_plan(tmp_path, capfd):
    folder = tmp_path / "files"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        gguf_models.write_gguf(folder / f"Tiny-{kind}.gguf", "qwen3_moe", lambda name, kind=kind: kind)
    line = "Tiny-Q8_0 (0.0 GB) is rounded less, and fits in memory too"
    with SmallHub(folder) as hub, connected(hub, tmp_path / "hub"):
        for model in (str(folder / "Tiny-Q4_0.gguf"), "org/model:Q4_0"):
            assert plan(["--model", model]) == 0 and capfd.readouterr().out.splitlines().count(line) == 1
        assert pull(["org/model:Q4_0"]) == 0 and line in capfd.readouterr().err.splitlines()
