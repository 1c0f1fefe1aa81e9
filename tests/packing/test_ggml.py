"""Floats that are rounded to GGUF's types: those with tables by ggml's quantisers, which libgguf has."""

import json

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from minmax import convert
from test_convert import tree, write_tiny
from tiny_models import on_cpu, write_tokenizer

from moeflux_mlx.calibration.calibrated import Calibration, convert_calibrated
from moeflux_mlx.calibration.weights import PackedWeights
from moeflux_mlx.convert import main
from moeflux_mlx.errors import ConfigError
from moeflux_mlx.formats.checkpoint import GRIDS_LICENSE
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.packing import ggml
from moeflux_mlx.packing.conversion import ConvertSettings
from moeflux_mlx.packing.gguf_forms import FORMS, repacked
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.recipe import Recipe
from moeflux_mlx.quant import TABLE

gguf, libgguf = pytest.importorskip("gguf"), pytest.importorskip("libgguf")
OF_GGML = [kind for kind in ggml.TYPES if FORMS[kind].quant.codes == TABLE]
SLOW = ("IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS")  # ggml first searches their tables
NEEDS_TEXT = ("IQ2_XXS", "IQ2_XS", "IQ1_S")
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 2}
MIXED = {"name": "mixed", "default": 8, "gate_up": "iq3_xxs", "down": "q4_k", "attention": "Q5_K", "head": "q6_k"}


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


@pytest.fixture
def source(tmp_path):
    config = goldens.text_config("qwen3_moe") | WIDE
    path = write_tiny(tmp_path / "source", config=config)
    write_tokenizer(path, "qwen3_style")
    return path


def blocks(kind, rows, importance=None):
    return libgguf.quantize_rows(rows, libgguf.GGMLQuantizationType[kind], imatrix=importance)


def values(kind, rows):
    if kind not in OF_GGML:
        quant = FORMS[kind].quant
        return np.array(unpacked_float32(quant, *ggml.rounded(mx.array(rows), quant)))
    return gguf.dequantize(blocks(kind, rows), gguf.GGMLQuantizationType[kind])


def experts(path, layer, expert):
    """Gate, up and down as a packed model has them."""
    return [np.array(one) for one in PackedWeights(Located(path)).expert(layer, expert, mx.float32).matrices]


def floats(source, layer, expert):
    tensors, stem = mx.load(str(source / "model.safetensors")), f"model.layers.{layer}.mlp.experts.{expert}"
    return [np.array(tensors[f"{stem}.{name}_proj.weight"]) for name in ("gate", "up", "down")]


@pytest.mark.parametrize("kind", [pytest.param(one, marks=marks(one not in SLOW)) for one in OF_GGML])
def test_matrices_have_the_blocks_of_ggml(monkeypatch, kind):
    """However rows are distributed over threads; each matrix has an importance of its own."""
    monkeypatch.setattr(ggml, "PIECE_VALUES", 600)
    rng, quant = np.random.default_rng(0), FORMS[kind].quant
    stack = rng.standard_normal((2, 5, 256)).astype(np.float32)
    importance = rng.exponential(1, (2, 256)).astype(np.float32)
    for given in (importance, None)[: 1 if kind in NEEDS_TEXT else 2]:
        parts = ggml.rounded(mx.array(stack), quant, importance=None if given is None else mx.array(given))
        for i, matrix in enumerate(stack):
            wanted = repacked(kind, blocks(kind, matrix, None if given is None else given[i]))
            assert all(np.array_equal(part[i], one) for part, one in zip(parts, wanted, strict=True))


def test_a_type_for_the_experts(tmp_path, source):
    convert(source, tmp_path / "out", q_type="Q3_K")
    convert(source, tmp_path / "again", q_type="q3_k")
    assert tree(tmp_path / "out") == tree(tmp_path / "again")
    for layer, expert in ((0, 1), (1, 3)):
        for made, rows in zip(experts(tmp_path / "out", layer, expert), floats(source, layer, expert), strict=True):
            assert np.array_equal(made, values("Q3_K", rows))
    forms = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (forms["bits"], forms["mode"]) == (8, "affine"), "the rest is as balanced has it"


def test_a_recipe_mixes_types_in_every_part(tmp_path, source):
    convert(source, tmp_path / "out", recipe=Recipe.from_json(MIXED, "mixed", "test"))
    assert "MIT" in (tmp_path / "out" / GRIDS_LICENSE).read_text()
    wanted = [
        values(kind, rows) for kind, rows in zip(("IQ3_XXS", "IQ3_XXS", "Q4_K"), floats(source, 1, 2), strict=True)
    ]
    assert all(np.array_equal(made, one) for made, one in zip(experts(tmp_path / "out", 1, 2), wanted, strict=True))
    model = load_model(tmp_path / "out", dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    assert {"q5_k", "q6_k"} <= {m.quant.mode for _, m in model.named_modules() if getattr(m, "quant", None)}
    whole, parts = model(mx.array([[1, 2, 3, 4]])), []
    cache = model.make_cache()
    for token in ([1, 2], [3], [4]):
        parts.append(model(mx.array([token]), cache))
    assert np.abs(np.array(whole - mx.concatenate(parts, axis=1))).max() < 1e-4
    model.experts.close()


def test_a_text_shows_what_matters(tmp_path, source):
    """Without one ggml has no good codes of these types, and we make none."""
    with pytest.raises(ConfigError, match="IQ2_XXS needs a text .*: add --calibrate default"):
        convert(source, tmp_path / "out", q_type="IQ2_XXS")
    text = tmp_path / "text"
    text.write_text("what the model reads, and what it reads after that. " * 20)
    given = Calibration(tmp_path / "work", [str(text)], "gptq", dtype=mx.float32)
    convert_calibrated(ConvertSettings(source, tmp_path / "out", q_type="IQ2_XXS"), given)
    made, rows = experts(tmp_path / "out", 0, 0)[0], floats(source, 0, 0)[0]
    error = np.abs(made - rows).mean()
    assert 0 < error < 0.5 * np.abs(rows).mean() and not np.array_equal(made, values("IQ2_XXS", rows))


@pytest.mark.parametrize(
    "named, made", [("Q2_K", "q4_0"), ("Q3_K", "q4_0"), ("Q4_K", "q5_0"), ("Q5_K", "q5_1"), ("Q6_K", "q8_0")]
)
def test_widths_that_a_type_cannot_have_take_what_llama_cpp_takes(tmp_path, capsys, named, made):
    """Each matrix for itself: gate and up have rows of 256 here, down of 192."""
    source = write_tiny(
        tmp_path / "source", config=goldens.text_config("qwen3_moe") | WIDE | {"moe_intermediate_size": 192}
    )
    write_tokenizer(source, "qwen3_style")
    assert main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "out"), "--q-type", named]) == 0
    said = f"note: 2 matrices of 192 columns in {made} instead of {named.lower()}, whose rows are multiples of 256; "
    assert (
        f"{said}affine, mxfp4, nvfp4, mxfp8, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl would fit" in capsys.readouterr().err
    )
    forms = {one.name: one.quant.mode for one in PackedWeights(Located(tmp_path / "out")).layout.records[1].projections}
    assert forms == {"gate_proj": named.lower(), "up_proj": named.lower(), "down_proj": made}
    down, rows = experts(tmp_path / "out", 1, 2)[-1], floats(source, 1, 2)[-1]
    assert np.array_equal(down, values(made.upper(), rows))
    model = load_model(tmp_path / "out", dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3, 4]])))).all()
    model.experts.close()


def test_matrices_outside_of_experts_fall_back_too(tmp_path):
    config = goldens.text_config("qwen3_moe") | WIDE | {"hidden_size": 192}
    source = write_tiny(tmp_path / "source", config=config)
    mixed = {"default": "q4_k", "gate_up": "q4_0", "down": "q4_k", "router": "float"}
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    report = convert(source, tmp_path / "out", recipe=tmp_path / "mixed.json")
    fallen = {one.path: (one.columns, one.named.mode, one.made.mode) for one in report.fallbacks}
    assert fallen["model.layers.0.self_attn.q_proj"] == fallen["lm_head"] == (192, "q4_k", "q5_0")
    assert not any("switch_mlp" in path for path in fallen)
    wide = config["num_attention_heads"] * config["head_dim"]
    assert ("model.layers.0.self_attn.o_proj" in fallen) == (wide % 256 > 0)


def test_what_cannot_be_made_is_said(tmp_path, source, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="q_type 'Q3_X' is not made; supported: Q4_0, "):
        convert(source, tmp_path / "out", q_type="Q3_X")
    with pytest.raises(ConfigError, match="--layout mlx: .* is stored in q4_0, which mlx-lm does not read"):
        convert(source, tmp_path / "out", q_type="Q4_0", layout="mlx")
    narrow = write_tiny(tmp_path / "narrow", config=goldens.text_config("qwen3_moe") | {"hidden_size": 64})
    with pytest.raises(
        ConfigError, match="64 columns are not a multiple of 128; give smaller groups, or one of affine, "
    ):
        convert(narrow, tmp_path / "out", q_group_size=128)
    monkeypatch.setattr(ggml, "_library", lambda: None)
    assert main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "out"), "--q-type", "IQ2_S"]) == 1
    error = capsys.readouterr().err
    assert "IQ2_S is made by the package libgguf: pip install 'moeflux-mlx[libgguf]'" in error
    assert not (tmp_path / "out").exists()
    assert main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "out"), "--q-type", "Q2_K"]) == 0
