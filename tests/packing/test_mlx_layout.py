"""Conversions in mlx-lm's layout: mlx-lm loads them, and its logits are ours."""

import json

import goldens
import image_goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from test_convert import tree, write_tiny
from test_small_floats import FORMS, write_model
from tiny_models import on_cpu

from moeflux_mlx.convert import convert, main
from moeflux_mlx.errors import ConfigError, ModelFileError, NotPackedError
from moeflux_mlx.families.names import is_aside
from moeflux_mlx.formats.checkpoint import RECIPE, read_header
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing import resident as resident_file
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.mlx_layout import INDEX, LOADED
from moeflux_mlx.packing.recipe import Recipe
from moeflux_mlx.vision.encoder import is_installed
from moeflux_mlx.vision.vision import VisionFiles

pytestmark = pytest.mark.usefixtures("cpu_device")
TOLERANCE = 2e-4  # relative to the largest logit
TOKENS = mx.array([[3, 17, 200, 5]])  # fewer than any window, in which MiMo's loses one position in mlx-lm
# What mlx-lm does not read from config.json, with the value that it uses instead.
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 8.0, "original_max_position_embeddings": 16, "truncate": True}
FIXED = {
    "gpt_oss": {"swiglu_limit": 7.0, "rope_scaling": YARN},
    "gemma4": {"vocab_size": 256},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},  # of latents, too
}
DIFFERENT = ("laguna",)  # mlx-lm leaves out its attention_factor
ALWAYS = ("qwen3_moe", "qwen3_next", "gpt_oss", "lfm2_moe", "nemotron_h", "minimax_m3_vl")
VARIANTS = [("deepseek_v3", "fp8"), ("qwen3_moe", "hub_sharded"), ("qwen3_next", "mlx4")]
PROVEN = [name for name in (*goldens.families(), *goldens.KIN) if goldens.config(name)["model_type"] in LOADED]


def source_of(tmp_path, family, variant="hub"):
    source = goldens.write_variant(tmp_path / "source", family, variant)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **FIXED.get(family, {})}))
    return source


def ours(path):
    with on_cpu():
        return np.array(load_model(path, dtype=mx.float32)(TOKENS))[0]


def theirs(path):
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")
    with on_cpu():
        model, _ = utils.load_model(path)
        model.set_dtype(mx.float32)
        return np.array(model(TOKENS)[0].astype(mx.float32))


def agrees(path):
    mine, other = ours(path), theirs(path)
    return bool(np.abs(mine - other).max() < TOLERANCE * np.abs(other).max())


WAYS = [pytest.param(name, "hub", marks=marks(name in ALWAYS)) for name in PROVEN] + VARIANTS


@pytest.mark.parametrize(("family", "variant"), WAYS)
def test_mlx_lm_has_our_logits(tmp_path, family, variant):
    source = source_of(tmp_path, family, variant)
    with on_cpu():
        convert(source, tmp_path / "mlx", layout="mlx", recipe="balanced")
        convert(source, tmp_path / "packed", recipe="balanced")
    assert agrees(tmp_path / "mlx") is (family not in DIFFERENT)
    names = {name for file in (tmp_path / "mlx").glob("*.safetensors") for name in read_header(file)}
    if not any(".embed_q." in name for name in names):
        assert np.array_equal(ours(tmp_path / "mlx"), ours(tmp_path / "packed"))
        return
    recipe = Recipe.from_json({"default": 8, "attention": "float"}, "", "")  # both forms quantise along other rows
    with on_cpu():
        convert(source, tmp_path / "floats", layout="mlx", recipe=recipe)
        convert(source, tmp_path / "whole", recipe=recipe)
    assert np.abs(ours(tmp_path / "floats") - ours(tmp_path / "whole")).max() < TOLERANCE


def test_every_family_that_is_offered_is_proven():
    assert {goldens.config(name)["model_type"] for name in PROVEN} == {*LOADED}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe", "kimi_k25"])
def test_an_image_encoder_is_kept_where_mlx_lm_skips_it(tmp_path, family):
    source = image_goldens.write(tmp_path / "source", family)
    report = convert(source, tmp_path / "mlx", layout="mlx")
    assert report.left_out == 0 and agrees(tmp_path / "mlx")
    theirs, ours = (encoder_of(path) for path in (source, tmp_path / "mlx"))
    assert theirs and theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    if is_installed():
        assert isinstance(open_weights(Located(tmp_path / "mlx")).vision(), VisionFiles)


def encoder_of(path):
    tensors = [one for file in path.glob("*.safetensors") for one in read_header(file).values()]
    return {one.name: np.array(one.read().view(mx.uint8)) for one in tensors if is_aside(one.name, 99)}


def test_other_tensors_beside_the_model_are_left_out(tmp_path, capsys):
    source, out = goldens.write_variant(tmp_path / "source", "gemma4", "hub"), str(tmp_path / "out")
    assert main(["--hf-path", str(source), "--mlx-path", out, "--layout", "mlx"]) == 0
    assert "left out: 4 tensors of an image encoder or a draft head" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mxfp4 of compressed-tensors", "mxfp8", "nvfp4 of ModelOpt"])
def test_published_codes(tmp_path, name):
    make, hub, quant = FORMS[name]
    write_model(tmp_path / "source", make, hub)
    convert(tmp_path / "source", tmp_path / "mlx", layout="mlx")
    stated = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    assert stated["model.layers.1.mlp.switch_mlp.down_proj"]["mode"] == quant.mode and stated["bits"] == 8
    if quant.has_global_scale:  # which MLX computes with on a GPU only
        pytest.importorskip("mlx_lm.utils").load_model(tmp_path / "mlx", lazy=True)
        assert np.isfinite(ours(tmp_path / "mlx")).all()
    else:
        assert agrees(tmp_path / "mlx")


def test_a_checkpoint_of_mlx_comes_out_as_it_was(tmp_path):
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "mlx4")
    convert(source, tmp_path / "mlx", layout="mlx")
    given = {t.name: t for file in source.glob("*.safetensors") for t in read_header(file).values()}
    written = read_header(tmp_path / "mlx" / "model.safetensors")
    assert written.keys() == given.keys() and not (tmp_path / "mlx" / RECIPE).exists()
    for name, tensor in written.items():
        assert (tensor.dtype, tensor.shape) == (given[name].dtype, given[name].shape), name
        assert np.array_equal(np.array(tensor.read().view(mx.uint8)), np.array(given[name].read().view(mx.uint8))), name


def test_it_is_written_in_shards_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(resident_file, "SHARD_BYTES", 40_000)
    source, made = write_tiny(tmp_path / "source"), []
    convert(source, tmp_path / "whole", layout="mlx")
    whole = tree(tmp_path / "whole")
    shards = sorted(name for name in whole if name.endswith(".safetensors"))
    index = json.loads(whole[INDEX])
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    for name in shards:
        tensors = read_header(tmp_path / "whole" / name)
        assert {one for one, file in index["weight_map"].items() if file == name} == tensors.keys()
    assert not (tmp_path / "whole" / "convert_state.json").exists()

    def stopped(done, total, name):
        made.append(name)
        if len({*made}) == 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, layout="mlx", progress=stopped)
    assert not (out / "config.json").exists()
    with pytest.raises(NotPackedError, match="unfinished conversion of .*; run the command"):
        load_model(out)
    with pytest.raises(ModelFileError, match="with other options"):
        convert(source, out)
    report = convert(source, out, layout="mlx")
    assert len(report.kept) == 2 and tree(out) == whole


def test_what_cannot_be_written_is_refused(tmp_path):
    source = write_tiny(tmp_path / "source")
    with pytest.raises(ConfigError, match="layout is 'gguf'; give packed or mlx"):
        convert(source, tmp_path / "out", layout="gguf")
    for options in ({"delete_source": True}, {"also": [tmp_path / "other"]}):
        with pytest.raises(ConfigError, match="--layout mlx converts a directory that stays"):
            convert(source, tmp_path / "out", layout="mlx", **options)
    for family in ("deepseek_v4", "hy_v3", "qwen4_exp"):
        source = goldens.write_variant(tmp_path / family, family, "hub")
        with pytest.raises(ConfigError, match=f"mlx-lm is not known to load a {family}; leave the option out"):
            convert(source, tmp_path / "out", layout="mlx")
    assert not (tmp_path / "out").exists()
    moeflux = goldens.write_variant(tmp_path / "moeflux", "deepseek_v3", "moeflux")
    with pytest.raises(
        ConfigError, match="--layout mlx cannot unpack experts; give the checkpoint that they were made from"
    ):
        convert(moeflux, tmp_path / "out", layout="mlx")


def test_the_command(tmp_path, capsys):
    out = str(tmp_path / "out")
    words = ["--hf-path", str(write_tiny(tmp_path / "source")), "--mlx-path", out, "--layout", "mlx"]
    assert main([*words]) == 0
    assert f"{out} is ready" in (err := capsys.readouterr().err) and "recipe uniform: default 4" in err
    assert main(words) == 1
    assert "is not empty and has no convert_state.json" in capsys.readouterr().err
