"""Draft heads in GGUF files: blocks behind the model's last one, in its file or in one of their own."""

import converted_gguf
import gguf_models
import goldens
import head_weights
import mlx.core as mx
import numpy as np
import pytest
from grids import taking_turns
from minmax import convert
from test_gguf_families import cache  # noqa: F401 (a fixture)

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.checkpoint import read_header
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.heads import find_head
from moeflux_mlx.opening.load_settings import locate
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.gguf_folder import draft_tensors

pytest.importorskip("gguf")

TOKENS = list(range(5, 25))
COPIES = ("embed_tokens", "shared_head_head")  # which the model has itself


def type_of(name):
    return "F32" if "conv1d" in name else "Q8_0"


def floats(name):
    return "F32"


def write_headed(path, family, more=None):
    """Writes the model with its draft head in float32, and with the copies of the model's matrices that GLM's has."""
    layers, architecture = goldens.text_config(family)["num_hidden_layers"], gguf_models.ARCHITECTURES[family]
    keys = {f"{architecture}.block_count": layers + 1, f"{architecture}.nextn_predict_layers": 1}
    copies = {f"blk.{layers}.nextn.{name}.weight": np.ones((128, 128), np.float32) for name in COPIES}
    gguf_models.write_gguf(path, family, type_of, keys, gguf_models.head_block(family) | copies | (more or {}))
    return path


def write_checkpoint(path, family):
    """Writes a head as a checkpoint has it, but with matrices of latent attention in the two that a GGUF has, because
    rounding in groups of other values gives other bits."""
    tensors = {}
    for name, tensor in head_weights.head_tensors(family).items():
        if not name.endswith("kv_b_proj.weight"):
            tensors[name] = tensor
            continue
        c, array = goldens.text_config(family), goldens.as_float(tensor)
        both = array.reshape(c["num_attention_heads"], -1, array.shape[-1])
        keys, values = np.split(both, [c["qk_nope_head_dim"]], axis=1)
        tensors[name.replace("kv_b_proj", "embed_q")] = "F32", np.ascontiguousarray(keys.swapaxes(1, 2))
        tensors[name.replace("kv_b_proj", "unembed_out")] = "F32", np.ascontiguousarray(values)
    goldens.write_safetensors(path, tensors)
    return path


@pytest.mark.parametrize("family, place", taking_turns(converted_gguf.HEADED, ("within", "beside")))
def test_a_head_has_the_bits_of_the_checkpoint_s(tmp_path, family, place):
    """In the model's file, and in one beside it as llama.cpp's converter writes it."""
    path = tmp_path / "m.gguf"
    if place == "within":
        write_headed(path, family)
    else:
        gguf_models.write_gguf(path, family, type_of)
        gguf_models.write_head(tmp_path / "mtp-tiny.gguf", family, floats)
    weights = open_weights(locate(path))
    head, wanted = (
        find_head(weights.args, tensors.values(), {}, weights.experts.layout)
        for tensors in (
            draft_tensors(open_gguf(path)),
            read_header(write_checkpoint(tmp_path / "head.safetensors", family)),
        )
    )
    made, right = head.read(), wanted.read()
    assert made.keys() == right.keys()
    for name in right:
        assert mx.array_equal(made[name], right[name]), name
    assert np.array_equal(head.records(), wanted.records())


def text_with(source, draft):
    """Returns what a model writes, and the form of one matrix of its head."""
    model = load_model(source, dtype=mx.float32, draft=str(draft))
    tokens = [int(token) for token, *_ in generate_step(mx.array(TOKENS), model, max_tokens=12)]
    model.experts.close()
    return tokens, model.head and model.head.fc.quant.mode


def test_a_head_keeps_its_types(tmp_path):
    """Beside a GGUF, and named for a packed model."""
    family, model, packed = "glm4_moe", tmp_path / "m.gguf", tmp_path / "packed"
    gguf_models.write_gguf(model, family, type_of)
    convert(model, packed)
    head = tmp_path / "mtp-tiny.gguf"
    gguf_models.write_head(head, family, lambda name: "Q4_0" if "_exps" in name else "Q5_0")
    plain = text_with(model, "off")[0]
    for source, draft in ((model, "head"), (packed, head)):
        assert text_with(source, draft) == (plain, "q5_0")
    weights = open_weights(locate(packed))
    layout = find_head(weights.args, draft_tensors(open_gguf(head)).values(), {}, weights.experts.layout).experts.layout
    assert {one.mode for one in layout.records[0].quants} == {"q4_0"}


def test_tensors_of_one_name_are_refused(tmp_path):
    family = "glm4_moe"
    twice = {f"blk.{goldens.text_config(family)['num_hidden_layers']}.eh_proj.weight": np.ones((128, 256), np.float32)}
    write_headed(tmp_path / "m.gguf", family, twice)
    with pytest.raises(ModelFileError, match="two tensors are model.layers.*eh_proj.weight"):
        draft_tensors(open_gguf(tmp_path / "m.gguf"))


def test_which_head_is_meant_must_be_clear(tmp_path):
    family, model = "glm4_moe", tmp_path / "m.gguf"
    gguf_models.write_gguf(model, family, type_of)
    with pytest.raises(ModelFileError, match="holds no draft head"):
        load_model(model, draft="head")
    for name in ("mtp-a.gguf", "mtp-b.gguf"):
        gguf_models.write_head(tmp_path / name, family, floats)
    with pytest.raises(ModelFileError, match=r"mtp-a.gguf, mtp-b.gguf; give one as --draft FILE"):
        load_model(model, draft="head")
    gguf_models.write_head(tmp_path / "mtp-c.gguf", "qwen3_next", floats)
    with pytest.raises(ModelFileError, match="holds no draft head"):
        load_model(model, draft=str(tmp_path / "mtp-c.gguf"))
