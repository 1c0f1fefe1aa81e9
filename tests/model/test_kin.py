"""Families that are made of the parts of others: their goldens in every chunking, and what mistakes do to them."""

import json
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory, tiny_model, use_plain_operations

import moeflux_mlx.model.latent as mla
from moeflux_mlx.engine.engine import load_model
from moeflux_mlx.ops import latent
from moeflux_mlx.ops.experts import MAX_SLOTS

TOLERANCE = 2e-4  # max abs on logits of standard deviation 1, float32


def run(model, family, chunk=None):
    """Logits [T, V] of the golden's tokens, fed `chunk` at a time from their first position on."""
    tokens, cache = mx.array(goldens.golden(family)[0])[None], model.make_cache()
    for layer in cache:
        layer.shift(goldens.first_position(family))
    chunk = chunk or tokens.shape[1]
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, tokens.shape[1], chunk)]
    return np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32))


def error(model, family, chunk=None):
    return np.abs(run(model, family, chunk) - goldens.golden(family)[1]).max()


@pytest.mark.parametrize("computing", ["native", "plain operations"])
@pytest.mark.parametrize("family", goldens.KIN)
def test_logits_match_hugging_face(monkeypatch, family, computing):
    if computing == "plain operations":
        use_plain_operations(monkeypatch)
        if goldens.text_config(family)["num_experts_per_tok"] > MAX_SLOTS:
            pytest.skip("plain operations take no more slots than the kernels")
    model = tiny_model(family, mx.float32, "hub")
    for chunk in (None, 7, 1):
        assert error(model, family, chunk) < TOLERANCE, chunk


# ---- mistakes that a reader of these families can make: each must exceed the tolerance

IGNORED = [
    ("kimi_k2", {"routed_scaling_factor": 1.0}),
    ("kimi_k2", {"norm_topk_prob": False}),
    ("kimi_k2", {"rope_scaling": None}),
    ("moonlight", {"routed_scaling_factor": 1.0}),
    ("glm4_moe_lite", {"rope_theta": 1e4}),
    ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    ("hy_v3", {"router_scaling_factor": 1.0}),
    ("hy_v3", {"rope_parameters": {"rope_theta": 1e4}}),
    ("minimax_m2", {"rotary_dim": 32}),
    ("glm4_moe", {"partial_rotary_factor": 1.0}),
    ("glm4_moe_air", {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    ("glm4v_moe", {"rope_theta": 1e6}),
    ("solar_open", {"partial_rotary_factor": 0.5}),
    ("g9v3", {"num_experts_per_tok": 31}),
    ("g9v3", {"routed_scaling_factor": 1.0}),
    ("qwen3_vl_moe", {"rope_theta": 1e4}),
    ("gpt_oss", {"sliding_window": 7}),
    ("gpt_oss", {"sliding_window": 5}),
    ("gpt_oss", {"layer_types": None, "num_hidden_layers": 4, "sliding_window": 40}),
    ("gpt_oss", {"swiglu_limit": 1e3}),
    ("gpt_oss", {"rope_scaling": {**goldens.config("gpt_oss")["rope_scaling"], "truncate": True}}),
    ("mimo_v2_flash", {"sliding_window_size": 6}),
    ("mimo_v2_flash", {"attention_value_scale": None}),
    ("mimo_v2_flash", {"swa_rope_theta": 1e3}),
    ("mimo_v2_flash", {"partial_rotary_factor": 1.0}),
    ("laguna", {"sliding_window": 10}),
    ("laguna", {"moe_routed_scaling_factor": 1.0}),
    ("laguna", {"moe_router_logit_softcapping": 0.0}),
    ("step3p5", {"sliding_window": 11}),
    ("step3p5", {"rope_scaling": None}),
    ("step3p5", {"yarn_only_types": []}),
    ("step3p5", {"partial_rotary_factors": None}),
    ("step3p5", {"swiglu_limits": None}),
    ("step3p5", {"swiglu_limits_shared": None}),
]


def with_config(source, path, change):
    """The model with other values in the text part of its configuration."""
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config.get("text_config", config).update(change)
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family, change", IGNORED)
def test_a_field_that_is_not_read(tmp_path, family, change):
    path = with_config(tiny_directory(family, "hub"), tmp_path / "model", change)
    assert error(load_model(path, dtype=mx.float32), family) > 10 * TOLERANCE


ROPE = goldens.config("mistral4")["rope_parameters"]


@pytest.mark.parametrize("field, value", [("llama_4_scaling_beta", 0.0), ("original_max_position_embeddings", 4096)])
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_temperature_that_does_not_change_at_8192(tmp_path, field, value, chunk):
    """The golden's tokens stand on both sides of it."""
    change = {"rope_parameters": {**ROPE, field: value}}
    path = with_config(tiny_directory("mistral4", "hub"), tmp_path / "model", change)
    assert error(load_model(path, dtype=mx.float32), "mistral4", chunk) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["kimi_k2", "hy_v3", "minimax_m2", "glm4_moe", "solar_open", "g9v3"])
def test_a_correction_bias_that_is_left_out(family):
    biases = [t for n, (_, t) in goldens.hub_tensors(family).items() if n.endswith(("correction_bias", "expert_bias"))]
    assert all(bias.min() < 0 < bias.max() for bias in biases)
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    for layer in model.args.moe_layers:
        model.layers[layer].mlp.e_score_correction_bias *= 0
    assert error(model, family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["glm4_moe_air", "glm4v_moe"])
def test_a_bias_that_is_left_out(family):
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    for layer in model.layers:
        layer.self_attn._inputs.stacked.bias *= 0
    assert error(model, family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash"])
@pytest.mark.parametrize("factor", [0, -1])
def test_sinks_that_are_left_out_or_have_the_other_sign(family, factor):
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    sinks = mx.concatenate([layer.self_attn.sinks for layer in model.layers if layer.self_attn.mixer.sinks])
    assert sinks.min() < -1 and sinks.max() > 1
    for layer in model.layers:
        if layer.self_attn.mixer.sinks:
            layer.self_attn.sinks = layer.self_attn.sinks * factor - (0 if factor else 1e9)
    assert error(model, family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["laguna", "step3p5"])
def test_gates_of_heads_that_are_left_out(family):
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    for layer in model.layers:
        layer.self_attn.mixer = replace(layer.self_attn.mixer, gate=None)
    assert error(model, family) > 10 * TOLERANCE


def test_flat_norms_taken_for_norms_of_each_head():
    model = load_model(tiny_directory("minimax_m2", "hub"), dtype=mx.float32)
    for attention in (layer.self_attn for layer in model.layers):
        attention.q_norm, attention.k_norm = by_head(attention.q_norm), by_head(attention.k_norm)
    assert error(model, "minimax_m2") > 10 * TOLERANCE


def by_head(norm, width=32):
    def normed(x):
        rows = np.asarray(x).reshape(*x.shape[:-1], -1, width)
        scaled = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + norm.eps)
        return (scaled.reshape(x.shape) * np.array(norm.weight)).astype(np.float32)

    return normed


def test_norms_of_latents_with_the_eps_of_the_others(monkeypatch):
    monkeypatch.setattr(mla, "LORA_NORM_EPS", goldens.config("glm4_moe_lite")["rms_norm_eps"])
    assert error(load_model(tiny_directory("glm4_moe_lite", "hub"), dtype=mx.float32), "glm4_moe_lite") > 10 * TOLERANCE


@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_a_temperature_of_the_rotated_part_alone(monkeypatch, chunk):
    right = latent.Queries.scaled

    def wrong(self, q, offset):
        scaled = right(self, q, offset)
        scaled[..., :64] = q[..., :64]
        return scaled

    monkeypatch.setattr(latent.Queries, "scaled", wrong)
    assert error(load_model(tiny_directory("mistral4", "hub"), dtype=mx.float32), "mistral4", chunk) > 10 * TOLERANCE


# ---- mlx-lm, which reads the same checkpoints

AGREED = ("kimi_k2", "moonlight", "minimax_m2", "glm4_moe", "glm4_moe_air", "solar_open", "qwen3_vl_moe")


@pytest.mark.parametrize("family", [*AGREED, "glm4_moe_lite", "mimo_v2_flash", "laguna"])
def test_where_mlx_lm_differs_from_hugging_face(tmp_path, family):
    """In GLM-4.7-Flash it norms latents with `rms_norm_eps`; transformers with 1e-6, and so do we. It sees a position
    fewer in MiMo's windows, and leaves out Laguna's `attention_factor`."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")
    weights = {name: ("F32", w.astype(np.float32)) for name, w in goldens.dequantised(family).items()}
    goldens.write_safetensors(tmp_path / "model.safetensors", weights)
    (tmp_path / "config.json").write_text(json.dumps(goldens.config(family)))
    theirs, _ = utils.load_model(tmp_path)
    tokens, wanted = goldens.golden(family)
    difference = np.abs(np.array(theirs(mx.array(tokens)[None])[0]) - wanted).max()
    assert difference < TOLERANCE if family in AGREED else difference > 10 * TOLERANCE
