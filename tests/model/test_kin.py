"""Families made of other families' parts: their goldens in every chunking, and the effect of typical mistakes."""

import inspect
import json
from dataclasses import replace
from functools import partial

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tiny_models import on_cpu, tiny_directory, tiny_model, use_plain_operations, with_config

from moeflux_mlx.kinds import Activation, QueryGrowth, QueryLog, QueryScale
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.compressed import op as compressed
from moeflux_mlx.mixers.latent import module as mla
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.mixers.mamba import op as mamba
from moeflux_mlx.model import feed_forward, moe, ngrams
from moeflux_mlx.model.residual import NormedApart, OneStream
from moeflux_mlx.model.streams import ShortcutConnection
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.elementwise import softplus
from moeflux_mlx.ops.experts import MAX_SLOTS
from moeflux_mlx.ops.rope import Rope, turned
from moeflux_mlx.ops.streams import weighed

TOLERANCE = 2e-4  # maximal absolute error of logits with standard deviation 1, float32


ENDS = "a few one by one, many, a few one by one"


def lengths(total, chunk):
    """Returns the lengths of the pieces in which a text of `total` tokens is computed."""
    if chunk == ENDS:
        return [1] * 6 + [total - 15] + [1] * 9
    return [len(piece) for piece in np.split(range(total), range(chunk or total, total, chunk or total))]


def run(model, family, chunk=None):
    """Returns the logits [T, V] of the golden's tokens, computed `chunk` at a time from their first position on.

    If `chunk` is None, all tokens are computed at once.
    """
    tokens, cache = mx.array(goldens.golden(family)[0])[None], model.make_cache()
    for layer in cache:
        layer.shift(goldens.first_position(family))
    pieces = lengths(tokens.shape[1], chunk)
    parts = [model(piece, cache) for piece in mx.split(tokens, np.cumsum(pieces)[:-1].tolist(), axis=1)]
    return np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32))


def error(model, family, chunk=None):
    return np.abs(run(model, family, chunk) - goldens.golden(family)[1]).max()


def error_after(mistake, family, *given):
    """The error of a model whose layers were changed by `mistake`, which also gets `given`."""
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    for layer in model.layers:
        mistake(layer, *given)
    return error(model, family)


@pytest.mark.parametrize("family, computing", drawn(goldens.KIN, ["native", "plain operations"]))
def test_logits_match_hugging_face(monkeypatch, family, computing):
    if computing == "plain operations":
        use_plain_operations(monkeypatch)
        if goldens.top_k(family) > MAX_SLOTS:
            pytest.skip("plain operations take no more slots than the kernels")
    model = tiny_model(family, mx.float32, "hub")
    for chunk in (None, 7, ENDS):
        assert error(model, family, chunk) < TOLERANCE, chunk


# ---- mistakes that a reader of these families can make: each must exceed the tolerance

LOOP = goldens.text_config("inkling2_loop")["loop_config"]
SPARSE = goldens.text_config("minimax_m3_vl")["sparse_attention_config"]
GEMMAS = goldens.text_config("gemma4")["rope_parameters"]
LINEAR = goldens.text_config("glm5_next")["linear_attn_config"]
KIMI = goldens.text_config("kimi_k3")["linear_attn_config"]
MELLUMS = goldens.config("mellum")["rope_parameters"]
DEEPSEEK_YARN = goldens.config("sarvam_mla")["rope_scaling"]


def of(change, families):
    return [(family, change) for family in families.split()]


def each(family, *changes):
    return [(family, change) for change in changes]


# A change of the configuration, and the families whose logits it changes.
IGNORED = [
    *of({"final_logit_softcapping": 30.0}, "gemma4 beam"),
    *of({"hc_eps": 1e-6}, "deepseek_v41 hy_v4 hy_v4_vl"),
    *of({"hc_sinkhorn_iters": 1}, "deepseek_v4 glm5_next"),
    *of({"index_topk": 13}, "deepseek_v32 dots3_note axk2"),
    *of({"index_topk": 64}, "glm5_next mistral_large4 deepseek_v41 hy_v4 hy_v4_vl glm_moe_dsa"),
    *of({"indexer_rope_interleave": True}, "deepseek_v32 axk2"),
    *of({"layer_types": None, "sliding_window_pattern": 4}, "exaone_moe cohere2_moe"),
    *of(
        {"norm_topk_prob": False},
        "kimi_k2 nemotron_h_latent bailing_hybrid flint cohere2_moe hy_v4 sarvam_moe mellum lfm2_moe",
    ),
    *of({"norm_topk_prob": True}, "olmoe qwen2_moe kolibri1 cohere2_moe_north"),
    *of({"partial_rotary_factor": 0.5}, "solar_open minimax_m3_vl sarvam_moe"),
    *of({"partial_rotary_factor": 1.0}, "glm4_moe mimo_v2_flash"),
    *of({"rms_norm_eps": 1e-6}, "glm4_moe_lite qwen4_exp glm5_next gemma4"),
    *of(
        {"rms_norm_eps": None},
        "kimi_linear olmoe longcat_flash granitemoehybrid mistral_large4 beam kimi_k3 deepseek_v41 hy_v4 "
        "hy_v4_vl sarvam_moe sarvam_mla mellum dots1 hunyuan_v1_moe dots3_note muse_spark axk2",
    ),
    *of({"rope_parameters": None}, "mistral_large4 beam"),
    *of({"rope_parameters": {"rope_theta": 1e4}}, "hy_v3 glm_moe_dsa"),
    *of({"rope_parameters": {"rope_theta": 1e6}}, "hy_v4 hy_v4_vl"),
    *of({"rope_scaling": None}, "kimi_k2 step3p5 deepseek_v32 llama4 deepseek_v41 sarvam_mla hunyuan_v1_moe"),
    *of(
        {"rope_theta": 1e4},
        "glm4_moe_lite qwen3_vl_moe exaone_moe bailing_hybrid qwen2_moe ernie4_5_moe sarvam_moe dots1",
    ),
    *of(
        {"routed_scaling_factor": 1.0},
        "kimi_k2 moonlight g9v3 exaone_moe deepseek_v4 glm5_next minimax_m3_vl nemotron_h kimi_linear "
        "mistral_large4 hy_v4 sarvam_moe sarvam_mla",
    ),
    *of({"routed_scaling_factor": None}, "dots1 dots3_note lfm2_moe"),
    *of({"sliding_window": 10}, "laguna gemma4 kolibri1"),
    *of(
        {"sliding_window": 8},
        "exaone_moe mixtral afmoe flint cohere2_moe beam deepseek_v41 mellum dots1 dots3_note muse_spark",
    ),
    *of({"swiglu_limit": 10.0}, "deepseek_v4 glm5_next deepseek_v41 hy_v4"),
    *of({"topk_group": 1}, "bailing_hybrid beam"),
    *each("hy_v3", {"router_scaling_factor": 1.0}),
    *each("minimax_m2", {"rotary_dim": 32}),
    *each("glm4_moe_air", {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    *each("glm4v_moe", {"rope_theta": 1e6}),
    *each("g9v3", {"num_experts_per_tok": 31}),
    *each("gpt_oss", {"sliding_window": 7}, {"sliding_window": 5}),
    *each("gpt_oss", {"layer_types": None, "num_hidden_layers": 4, "sliding_window": 40}, {"swiglu_limit": 1e3}),
    *each("gpt_oss", {"rope_scaling": {**goldens.config("gpt_oss")["rope_scaling"], "truncate": True}}),
    *each("mimo_v2_flash", {"sliding_window_size": 6}, {"attention_value_scale": None}, {"swa_rope_theta": 1e3}),
    *each("laguna", {"moe_routed_scaling_factor": 1.0}, {"moe_router_logit_softcapping": 0.0}),
    *each("step3p5", {"sliding_window": 11}, {"yarn_only_types": []}, {"partial_rotary_factors": None}),
    *each("step3p5", {"swiglu_limits": None}, {"swiglu_limits_shared": None}),
    *each("deepseek_v4", {"sliding_window": 6}, {"index_topk": 3}, {"compress_rope_theta": 10000}),
    *each("deepseek_v4", {"qk_rope_head_dim": 32}, {"hc_eps": 0.1}),
    *each("qwen4_exp", {"indexer_budget": 12}, {"indexer_compress_ratio": 2}, {"output_gate_type": None}),
    *each("qwen4_exp", {"eos_token_id": [255, 7]}),
    *each("qwen4_exp", {"rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.5}}, {"seed": 1235}),
    *each("glm5_next", {"index_topk": 12}, {"linear_attn_config": {**LINEAR, "gate_lower_bound": -4.0}}),
    *each("minimax_m3_vl", {"swiglu_limit": 7.0}, {"sparse_attention_config": {**SPARSE, "sparse_block_size": 7}}),
    *each("minimax_m3_vl", {"sparse_attention_config": {**SPARSE, "sparse_topk_blocks": 2}}),
    *each(
        "gemma4",
        {"rope_parameters": {**GEMMAS, "full_attention": {**GEMMAS["full_attention"], "rope_type": "default"}}},
    ),
    *each("gemma4", {"rope_parameters": {**GEMMAS, "sliding_attention": GEMMAS["full_attention"]}}),
    *each("nemotron_h", {"time_step_limit": None}, {"time_step_limit": [0.5, 0.8]}, {"layer_norm_epsilon": 1e-5}),
    *each("bailing_hybrid", {"kda_lower_bound": -5.0}),
    *each("kimi_linear", {"moe_renormalize": False}),
    *each("mixtral", {"sliding_window": None}),
    *each("afmoe", {"mup_enabled": False}, {"route_norm": False}, {"route_scale": 1.0}),
    *each("afmoe", {"layer_types": None, "global_attn_every_n_layers": 4}),
    *each("flint", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
    *each("kolibri1", {"layer_types": ["sliding_attention"] * 5}),
    *each("llama4", {"attention_chunk_size": 11}, {"attention_chunk_size": None}, {"attn_temperature_tuning": 0}),
    *each("llama4", {"floor_scale": 6}, {"attn_scale": 0.1}, {"use_qk_norm": False}, {"no_rope_layers": []}),
    *each("llama4", {"rms_norm_eps": 1e-5}),
    *each("cohere2_moe", {"layer_norm_eps": None}, {"rms_norm_eps": 0.01}, {"logit_scale": None}),
    *each("cohere2_moe", {"expert_selection_fn": "softmax"}, {"shared_expert_combination_strategy": "sum"}),
    *each("cohere2_moe_north", {"prefix_dense_sliding_window_pattern": 4}),
    *each("cohere2_moe_north", {"rms_norm_eps": None, "layer_norm_eps": 0.01}),
    *each("longcat_flash", {"routed_scaling_factor": 6.0}, {"rope_theta": 1e7}),
    *each("granitemoehybrid", {"embedding_multiplier": None}, {"residual_multiplier": None}),
    *each("granitemoehybrid", {"attention_multiplier": None}, {"logits_scaling": None}),
    *each("granitemoehybrid", {"position_embedding_type": "rope"}),
    *each("mistral_large4", {"final_logit_softcapping": None}),
    *each("kimi_k3", {"activation_situ_beta": 1.0}, {"activation_situ_linear_beta": None}, {"attn_res_block_size": 3}),
    *each("kimi_k3", {"linear_attn_config": {**KIMI, "gate_lower_bound": None}}),
    *each("kimi_k3", {"linear_attn_config": {**KIMI, "gate_lower_bound": -4.5}}),
    *each("deepseek_v41", {"compress_rope_theta": 1e4}, {"candidate_topk_blocks": 64}, {"candidate_block_size": 3}),
    *each("deepseek_v41", {"candidate_source_layer_id": 5}, {"engram_pad_token_id": 3}, {"engram_vocab_size": 20}),
    *each("hy_v4", {"hc_magnitude": 2.0}),
    *each("sarvam_mla", {"rope_scaling": {**DEEPSEEK_YARN, "mscale_all_dim": 0.0}}, {"n_group": 6, "topk_group": 2}),
    *each("mellum", {"layer_types": None, "use_sliding_window": None}),
    *each("mellum", {"rope_parameters": {**MELLUMS, "sliding_attention": MELLUMS["full_attention"]}}),
    *each("mellum", {"rope_parameters": {**MELLUMS, "full_attention": MELLUMS["sliding_attention"]}}),
    *each("dots1", {"max_window_layers": None}, {"norm_topk_prob": None}),
    *each("hunyuan_v1_moe", {"moe_topk": 2}),
    *each("dots3_note", {"swa_rope_theta": None}, {"rope_theta": 500}),
    *each("muse_spark", {"qk_scale_factor": 2.6}, {"post_norm_eps": 1e-8}, {"output_multiplier": 0.8}),
    *each("muse_spark", {"routed_scaling_factor": 1}, {"layer_rope_theta": [500.0] * 4}),
    *each("muse_spark", {"final_logit_softcapping": 4.0}),
    *each("axk2", {"rope_parameters": {"rope_theta": 1e5}}),
    *each("lfm2_moe", {"norm_eps": None}, {"rope_theta": None}),
    *each("glm_moe_dsa", {"indexer_rope_interleave": False}),
    *(("k2_horizon", {name: value}) for name, value in (("layernorm_num_groups", 1), ("router_scaling_factor", 1.0))),
    *(("k2_horizon", {name: value}) for name, value in (("mova_num_experts_per_tok", 2), ("rms_norm_eps", None))),
    *(("inkling2", {name: None}) for name in ("qk_l2_clip_threshold", "rel_l2_clip_threshold", "route_scale")),
    *(("inkling2", {name: None}) for name in ("mlp_gate_softcap", "mlp_up_softcap", "final_logit_softcapping")),
    *(("inkling2", {name: None}) for name in ("log_scaling_n_floor", "rms_norm_eps")),
    ("inkling2_loop", {"loop_config": {**LOOP, "num_passes": 2}}),
    *(("inkling", {name: None}) for name in ("log_scaling_n_floor", "log_scaling_alpha", "route_scale")),
    *(("inkling", {name: None}) for name in ("logits_mup_width_multiplier", "rms_norm_eps")),
]


@pytest.mark.parametrize("family, change", IGNORED)
def test_a_field_that_is_not_read(tmp_path, family, change):
    path = with_config(tiny_directory(family, "hub"), tmp_path / "model", change)
    assert error(load_model(path, dtype=mx.float32), family) > 10 * TOLERANCE


def test_windows_as_the_published_file_of_flint_has_them(tmp_path):
    path = with_config(tiny_directory("flint", "hub"), tmp_path / "model", {"use_sliding_window": True})
    assert error(load_model(path, dtype=mx.float32), "flint") < TOLERANCE


ROPE = goldens.config("mistral4")["rope_parameters"]


@pytest.mark.parametrize("field, value", [("llama_4_scaling_beta", 0.0), ("original_max_position_embeddings", 4096)])
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_temperature_that_does_not_change_at_8192(tmp_path, field, value, chunk):
    """The golden's tokens are on both sides of this position."""
    change = {"rope_parameters": {**ROPE, field: value}}
    path = with_config(tiny_directory("mistral4", "hub"), tmp_path / "model", change)
    assert error(load_model(path, dtype=mx.float32), "mistral4", chunk) > 10 * TOLERANCE


def test_only_rounding_makes_deepseek_v41_depend_on_cuts(monkeypatch):
    """A last bit decides to which step a value is rounded; all else is the same for every cut."""
    exact = lambda x, *rule, **more: x  # noqa: E731
    for place in (compressed, ngrams):
        for name in {"to_e4m3", "to_e2m1"} & vars(place).keys():
            monkeypatch.setattr(place, name, exact)
    model, rng = load_model(tiny_directory("deepseek_v41", "hub"), dtype=mx.float32), np.random.default_rng(0)
    for length in (23, 48):
        text = mx.array(rng.integers(3, 256, length))[None]
        whole = np.array(model(text))
        for _ in range(3):
            cuts, cache = sorted(set(rng.integers(1, length, 4).tolist())), model.make_cache()
            parts = [model(piece, cache) for piece in mx.split(text, cuts, axis=1)]
            assert np.abs(np.array(mx.concatenate(parts, axis=1)) - whole).max() < TOLERANCE, cuts


BIASED = ("kimi_k2", "hy_v3", "minimax_m2", "glm4_moe", "solar_open", "g9v3", "exaone_moe", "nemotron_h")
BIASED += (
    "lfm2_moe",
    "ernie4_5_moe",
    "afmoe",
    "kolibri1",
    "bailing_hybrid",
    "kimi_linear",
    "beam",
    "hy_v4",
    "hy_v4_vl",
)
BIASED += ("kimi_k3", "sarvam_moe", "sarvam_mla", "dots1")
BIASED += ("deepseek_v41", "longcat_flash", "k2_horizon", "axk2", "dots3_note", "muse_spark", "inkling")
BIASED += ("inkling2", "inkling2_loop")


@pytest.mark.parametrize("family", BIASED)
def test_a_correction_bias_that_is_left_out(family):
    biases = [t for n, (_, t) in goldens.hub_tensors(family).items() if n.endswith(("correction_bias", "expert_bias"))]
    assert all(bias.min() < 0 < bias.max() for bias in biases)
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    for layer in model.args.moe_layers:
        model.layers[layer].mlp.e_score_correction_bias *= 0
    assert error(model, family) > 10 * TOLERANCE


def without(name, part=""):
    """Removes a part of the Mamba module, or of a part of it."""

    def leave_out(mamba):
        owner = mamba[part] if part else mamba
        owner[name] = owner[name] * 0
        mamba.arrange()

    return leave_out


def with_one_norm(patch):
    """Norms the groups' results together."""
    right = mamba.rms_norm
    patch.setattr(mamba, "rms_norm", lambda y, *rest: right(y.reshape(*y.shape[:2], 1, -1), *rest))


MAMBA = {
    "no D": without("D"),
    "no bias of step sizes": without("dt_bias"),
    "no bias of the convolution": without("bias", "conv1d"),
    "a norm of all groups": with_one_norm,
}


def of_rows(order):
    """Puts the thirds of the projection, B, C and x, in another order."""

    def change(conv):
        for name in conv.in_proj.tensors():
            thirds = mx.split(conv.in_proj[name], 3)
            conv.in_proj[name] = mx.concatenate([thirds[i] for i in order])

    return change


def of_taps(change):
    return lambda conv: _set(conv.conv, "weight", change(conv.conv.weight))


CONV = {
    "the gates the other way round": of_rows((1, 0, 2)),
    "x before the gates": of_rows((2, 0, 1)),
    "the newest input first": of_taps(lambda weight: weight[:, ::-1]),
    "the newest input alone": of_taps(lambda weight: weight * mx.array([0, 0, 0, 1])[:, None]),
}


def without_weight_of_keys(attention):
    """Makes values the normed keys, as if the norm came before keys and values are separated."""
    begin = attention.begin

    def with_norm(x, norm):
        q, k = attention._inputs.parted(begin(x, norm))[1]
        rows = np.asarray(k).reshape(*k.shape[:-1], attention.mixer.kv_heads, -1)
        return [np.concatenate([q, attention.k_norm(rows).reshape(k.shape)], axis=-1)]

    attention.begin = with_norm


# Parts of a Gemma 4 layer that an implementation may leave out or confuse with another, and whether a layer has them.
GEMMA4 = {
    "values that are not normed": lambda layer: _switch(layer, value_norm=False),
    "scores in the usual scale": lambda layer: _switch(layer, scale=None),
    "values of normed keys": lambda layer: (
        layer.self_attn.mixer.value_is_key and without_weight_of_keys(layer.self_attn)
    ),
    "layers that are not scaled": lambda layer: layer.mlp.output.pop("layer_scalar"),
    "a mixer's output as it is": lambda layer: setattr(
        layer, "residual", OneStream(layer.mixer, layer.input_layernorm)
    ),
    "a router in the norm of the experts": lambda layer: _own_norm(layer.mlp, layer.post_attention_layernorm.weight),
    "a router without the width in its norm": lambda layer: _own_norm(layer.mlp, layer.mlp.gate_norm.weight),
    "experts that are not scaled": lambda layer: _set(layer.mlp, "expert_scales", mx.ones((11,))),
    "experts in the norm of the dense MLP": lambda layer: _set(
        layer.post_attention_layernorm, "weight", layer.mlp.shared_input_norm.weight
    ),
    "a dense MLP in the norm of the experts": lambda layer: _set(
        layer.mlp.shared_input_norm, "weight", layer.post_attention_layernorm.weight
    ),
}


def _switch(layer, **switches):
    layer.self_attn.mixer = replace(layer.self_attn.mixer, **switches)


def _own_norm(mlp, weight):
    mlp._gate_norm = replace(mlp._gate_norm, weight=weight)


def _set(module, name, value):
    module[name] = value


def by_head(norm, width=32):
    def normed(x):
        rows = np.asarray(x).reshape(*x.shape[:-1], -1, width)
        scaled = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + norm.eps)
        return backend.of_kind((scaled.reshape(x.shape) * np.array(norm.weight)).astype(np.float32), x)

    return normed


@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_a_temperature_of_only_the_rotated_part(monkeypatch, chunk):
    if chunk == 1 and backend.has_kernels():
        pytest.skip("a kernel scales a single token's queries")
    right = latent.Queries.scaled

    def wrong(self, q, offset):
        scaled = right(self, q, offset)
        scaled[..., :64] = q[..., :64]
        return scaled

    monkeypatch.setattr(latent.Queries, "scaled", wrong)
    assert error(load_model(tiny_directory("mistral4", "hub"), dtype=mx.float32), "mistral4", chunk) > 10 * TOLERANCE


# Parts of a K2 Horizon layer that an implementation may leave out or confuse with another.
K2_HORIZON = {
    "a gate to base e": lambda attention: setattr(
        attention, "end", lambda out, parts, x: attention.o_proj(_gated_to_base_e(attention, out, parts), residual=x)
    ),
    "a bias of values' scores that is added to the logits": lambda attention: _of_values(attention, biases_logits=True),
    "values that are weighed by 1": lambda attention: _of_values(attention, scale=1.0),
    "values that are not normalised": lambda attention: _of_values(attention, normalise=False),
    "no bias by which value experts are chosen": lambda attention: (
        "value_experts" in attention
        and _set(attention.value_experts, "e_score_correction_bias", attention.value_experts.gate.weight[:, 0] * 0)
    ),
}


def _gated_to_base_e(attention, out, parts):
    return out * softplus(attention._named(parts)[1]["gates"])


def _of_values(attention, **change):
    if "value_experts" in attention:
        attention.value_experts.rule = replace(attention.value_experts.rule, **change)


@pytest.mark.parametrize("mistake", K2_HORIZON)
def test_mistakes_in_k2_horizon(mistake):
    assert error_after(lambda layer: K2_HORIZON[mistake](layer.self_attn), "k2_horizon") > 10 * TOLERANCE


# Parts of an A.X-K2 layer that an implementation may leave out or confuse with another.
AXK2 = {
    "no gates of values": lambda layer, patch: _set(
        layer.self_attn.g_b_proj, "weight", layer.self_attn.g_b_proj.weight * 0
    ),
    "the normed latent twice": lambda layer, patch: patch.setattr(
        mla, "beside_normed", lambda x, norm: np.concatenate([norm(x), norm(x)], axis=-1)
    ),
    "the latent itself before the normed one": lambda layer, patch: patch.setattr(
        mla, "beside_normed", lambda x, norm: np.concatenate([x, norm(x)], axis=-1)
    ),
    "index queries of the latent itself": lambda layer, patch: setattr(
        layer.self_attn.indexer, "wq_b", partial(_without_norm, layer.self_attn.indexer.wq_b)
    ),
    "norms of latents with the eps of the others": lambda layer, patch: setattr(
        layer.self_attn.q_a_layernorm, "eps", 1e-3
    ),
    "no gates in norms": lambda layer, patch: setattr(layer.residual, "norm", layer.input_layernorm.norm),
    "no gates in norms of experts": lambda layer, patch: (
        "norm" in layer.post_attention_layernorm
        and setattr(layer.residual, "behind", layer.post_attention_layernorm.norm)
    ),
}


def _without_norm(matrix, x, norm):
    return matrix(x)


# Parts of a dots3-note layer that an implementation may leave out or place wrongly.
DOTS3_NOTE = {
    "rotated keys that are not normed": lambda layer: setattr(layer.self_attn, "k_rope_norm", lambda keys: keys),
    "no gain of queries": lambda layer: setattr(layer.self_attn, "scale", layer.self_attn.mixer.head_dim**-0.5),
    "no gain of latents": lambda layer: (_switch_mixer(layer, latent_gain=1.0), layer.self_attn.arrange()),
    "no gates": lambda layer: setattr(
        layer.self_attn, "end", lambda out, parts, x: layer.self_attn.o_proj(out, residual=x)
    ),
    "pairs by halves": lambda layer: setattr(
        layer.self_attn, "rope", Rope(replace(layer.self_attn.mixer.rotation, interleaved=False))
    ),
    "index keys and queries with pairs by halves": lambda layer: _in_indexer(
        layer, rope=Rope(replace(layer.self_attn.mixer.rotation, interleaved=False))
    ),
    "a window of one position more": lambda layer: _switch_mixer(layer, window=layer.self_attn.mixer.window and 10),
}


def _weigh_equally(layer):
    """Gives shared experts logits of 0."""
    if "gate" in layer.mlp:
        shared = layer.mlp.gate.weight[layer.mlp.rule.experts :] * 0
        layer.mlp.gate.weight = mx.concatenate([layer.mlp.gate.weight[: layer.mlp.rule.experts], shared])
        layer.mlp.arrange()


def _of_convolution(*path):
    """Leaves the convolution out."""

    def leave_out(layer):
        owner = layer
        for name in path:
            owner = owner[name]
        owner.weight = owner.weight * 0
        layer.self_attn.arrange()

    return leave_out


# Parts of an Inkling layer that an implementation may leave out or confuse with another.
INKLING = {
    "keys without a convolution": _of_convolution("self_attn", "k_sconv"),
    "values without a convolution": _of_convolution("self_attn", "v_sconv"),
    "attention's output without a convolution": _of_convolution("attn_sconv"),
    "the experts' output without a convolution": _of_convolution("mlp_sconv"),
    "taps in another order": lambda layer: _set(layer.mlp_sconv, "weight", layer.mlp_sconv.weight[:, ::-1]),
    "no bias by distance": lambda layer: _set(layer.self_attn, "rel_proj", layer.self_attn.rel_proj * 0),
    "scores times 1 / sqrt(d)": lambda layer: _switch(layer, scale=32**-0.5),
    "queries that grow in windows": lambda layer: _switch(layer, query_scale=QueryLog(0.5, 10)),
    "shared experts of equal weights": _weigh_equally,
    "no learned factor": lambda layer: _set(layer.mlp, "output_scale", mx.ones((1,))),
}


@pytest.mark.parametrize("mistake", INKLING)
def test_mistakes_in_inkling(mistake):
    assert error_after(INKLING[mistake], "inkling") > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["inkling", "inkling2"])
def test_embeddings_without_their_norm(family):
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    model.model.embed_tokens.pop("norm")
    assert error(model, family) > 10 * TOLERANCE


def _first_of_inputs(hc):
    """Gives queries, keys and values the same input."""
    if hc.inputs > 1:
        hc.query = mx.broadcast_to(hc.query[:1], hc.query.shape)
        hc.arrange()


# Parts of an Inkling 2 layer that an implementation may leave out or confuse with another.
INKLING2 = {
    "no taps of tokens": lambda layer: _switch(
        layer, convolution=replace(layer.self_attn.mixer.convolution, dynamic=False)
    ),
    "values without their norm": lambda layer: _switch(layer, value_norm=False),
    "scores times 1 / d": lambda layer: _switch(layer, scale=1 / 32),
    "convolutions that are not divided": lambda layer: _set_factor(layer.attn_sconv),
    "one input of queries, keys and values": lambda layer: _first_of_inputs(layer.attn_hc),
    "sums in a norm with the model's epsilon": lambda layer: setattr(layer.ffn_hc, "eps", 0.01),
    "queries without a learned factor": lambda layer: _set(
        layer.self_attn.q_norm, "weight", mx.ones(layer.self_attn.q_norm.weight.shape)
    ),
}


def _set_factor(convolution):
    convolution.factor = 1.0


@pytest.mark.parametrize("mistake", INKLING2)
def test_mistakes_in_inkling2(mistake):
    assert error_after(INKLING2[mistake], "inkling2") > 10 * TOLERANCE


# Parts of a Muse Spark layer that an implementation may leave out or place wrongly.
MUSE_SPARK = {
    "experts that are not normed": lambda layer: "expert_norm" in layer.mlp and layer.mlp.pop("expert_norm"),
    "norms before the scale of experts": lambda layer: (
        "expert_norm" in layer.mlp and setattr(layer.mlp, "expert_norm", _scaled_last(layer.mlp.expert_norm))
    ),
    "norms before the scale of outputs": lambda layer: setattr(
        layer.output_sum, "norm", _scaled_last(layer.output_sum.norm)
    ),
    "heads that are not normed": lambda layer: _switch(layer, output_norm=False),
    "a latent that is not normed": lambda layer: (
        "latent_input_norm" in layer.mlp and layer.mlp.pop("latent_input_norm")
    ),
    "a stream that is added as it is": lambda layer: setattr(
        layer.residual, "first", lambda h, made: h + layer.mixer_sum(h * 0, made)
    ),
    "logits of the router that are not scaled": lambda layer: (
        hasattr(layer.mlp, "rule") and _set_rule(layer, logit_scale=1.0)
    ),
}


def _scaled_last(norm):
    return RMSNorm.__call__.__get__(norm)


# Parts of a Beam layer that an implementation may leave out or place wrongly.
BEAM = {
    "no bias of gates": lambda layer, number: _without_gate_bias(layer.self_attn),
    "queries that do not grow": lambda layer, number: _switch(layer, query_scale=None),
    "queries that grow from another length": lambda layer, number: (
        layer.self_attn.mixer.query_scale and _switch(layer, query_scale=QueryGrowth(0.1, 4096))
    ),
    "queries that grow in windows": lambda layer, number: _switch(layer, query_scale=QueryGrowth(0.1, 2048)),
    "a plain residual": lambda layer, number: _set_eps(layer, 1, 1),
    "a residual that counts from the first sublayer": lambda layer, number: _set_eps(layer, 2 * number, 2 * number + 1),
    "a residual that counts layers": lambda layer, number: _set_eps(layer, number + 1, number + 1),
}


def _without_gate_bias(attention):
    attention.gate_bias *= 0
    attention.arrange()


def _set_eps(layer, before, behind):
    eps = layer.mixer_output.norm.eps
    layer.input_layernorm.eps, layer.post_attention_layernorm.eps = before * eps, behind * eps


# Parts of a Hy4 layer that an implementation may place wrongly.
HY_V4 = {
    "index keys and queries that turn their first values": lambda layer: _in_indexer(layer, rotates_last=False),
    "index keys and queries with pairs by halves": lambda layer: _in_indexer(
        layer, rope=Rope(replace(layer.self_attn.mixer.rotation, interleaved=False))
    ),
    "pairs by halves": lambda layer: setattr(
        layer.self_attn, "rope", Rope(replace(layer.self_attn.mixer.rotation, interleaved=False))
    ),
    "streams that are not added to": lambda layer: _set(
        layer.attn_hc, "base", mx.concatenate([layer.attn_hc.base[:4], layer.attn_hc.base[4:] - 1e9])
    ),
    "weights of the output of the other part": lambda layer: _set(layer.ffn_hc, "fn", layer.attn_hc.fn),
    "a clip in shared experts": lambda layer: (
        "shared_expert" in layer.mlp
        and setattr(layer.mlp.shared_expert, "activation", Activation("clip then silu", 0.7))
    ),
}


def _in_indexer(layer, **attributes):
    if "indexer" in layer.self_attn:
        for name, value in attributes.items():
            setattr(layer.self_attn.indexer, name, value)


# Parts of a DeepSeek-V4.1 layer that an implementation may leave out or place wrongly.
DEEPSEEK_V41 = {
    "keys that are not rounded": lambda layer: _switch_mixer(layer, rounds=False),
    "sums that are not shifted": lambda layer: setattr(
        layer.ffn_hc, "gather_behind", lambda *given: _with_own_sum(layer.ffn_hc, *given)
    ),
    "all entries where a choice is reused": lambda layer: (
        "indexer" not in layer.self_attn and _switch_mixer(layer, compressor=None)
    ),
    "keys of entries that are not normed": lambda layer: (
        "wk" in layer.self_attn.get("indexer", {}) and setattr(layer.self_attn.indexer, "k_norm", lambda made: made)
    ),
    "no gates between the positions of an entry": lambda layer: (
        "wgate" in layer.self_attn.get("compressor", {})
        and _set(layer.self_attn.compressor.wgate, "weight", layer.self_attn.compressor.wgate.weight * 0)
    ),
    "entries at their last positions": lambda layer: (
        "compressor" in layer.self_attn
        and setattr(layer.self_attn.compressor, "_turned", _turned_late(layer.self_attn.compressor))
    ),
}


# The same of the rows that n-grams add.
ENGRAM = {
    "rows that are not rounded": lambda patch, part: replace(part, rounds=False),
    "n-grams that end at the token for none": lambda patch, part: replace(part, ends_texts=True),
    "no rows": lambda patch, part: None,
}


@pytest.mark.parametrize("mistake", ENGRAM)
def test_mistakes_in_engram(monkeypatch, mistake):
    """The golden's text has the token that stands for those before the first one."""
    model = load_model(tiny_directory("deepseek_v41", "hub"), dtype=mx.float32)
    assert error(model, "deepseek_v41") < TOLERANCE
    for layer in (model.layers[i] for i in model.args.ngrams):
        part = ENGRAM[mistake](monkeypatch, layer.ple.part)
        if part is None:
            layer.ple.value_proj.weight = layer.ple.value_proj.weight * 0
            layer.ple.arrange()
        else:
            layer.ple.part = part
    model.tables.parts = {i: model.layers[i].ple.part for i in model.args.ngrams}
    assert error(model, "deepseek_v41") > 10 * TOLERANCE


def test_tokens_that_are_hashed_themselves(monkeypatch):
    model = load_model(tiny_directory("deepseek_v41", "hub"), dtype=mx.float32)
    for reader in model.tables.readers.values():
        reader.token_map = None
    assert error(model, "deepseek_v41") > 10 * TOLERANCE


def _switch_mixer(layer, **switches):
    layer.self_attn.mixer = replace(layer.self_attn.mixer, **switches)


def _with_own_sum(hc, *given):
    streams, _, *mixing = type(hc).gather_behind(hc, *given)
    return streams, weighed(streams, mixing[0]), *mixing


def _turned_late(pool):
    return lambda x, first: turned(x[:, :, None], Rope(pool.mixer.rotation, 1), first * pool.mixer.ratio + 1)[:, :, 0]


# Parts of a Kimi K3 layer that an implementation may leave out or place wrongly.
KIMI_K3 = {
    "blocks that begin a layer late": lambda layer, number: setattr(layer.ffn_hc, "begins", number % 2 == 1),
    "no new block": lambda layer, number: number and setattr(layer.ffn_hc, "begins", False),
    "no norm before the weights of sums": lambda layer, number: _replace_weight(layer.attn_hc, norm=1.0),
    "the other part's weights of sums": lambda layer, number: _set(layer.ffn_hc, "_weight", layer.attn_hc._weight),
    "the last part alone": lambda layer, number: setattr(layer.attn_hc, "gather", lambda h: (h[..., -128:],)),
    "silu": lambda layer, number: _activate(layer, Activation()),
    "a latent that is not normed": lambda layer, number: "latent_norm" in layer.mlp and layer.mlp.pop("latent_norm"),
    "the last rates of decay": lambda layer, number: (
        "A_log" in layer.self_attn and _set(layer.self_attn, "A_log", layer.self_attn.A_log[::-1])
    ),
}


def _replace_weight(hc, norm):
    hc._weight = norm * hc.proj_weight[0]


def _activate(layer, activation):
    mlps = [layer.mlp.shared_expert] if "shared_expert" in layer.mlp else [layer.mlp]
    for mlp in mlps:
        mlp.activation = activation


def _one_after_another(stream, *given, right=NormedApart.mixed):
    _, h = right(stream, *given)
    return stream.norm(h), h


def _added_at_once(connection, h, out, *mixing):
    """Adds the routed experts' output behind their own layer."""
    parts = [out[..., i : i + connection.width] for i in range(0, out.shape[-1], connection.width)]
    return backend.library_of(h).concatenate([h + sum(parts), h * 0], axis=-1)


def _without_own(ids, weights, experts, right=feed_forward.without_identities):
    *others, own = right(ids, weights, experts)
    return *others, own * 0


# Parts of LongCat that an implementation may leave out or place wrongly.
LONGCAT = {
    "a shortcut of no layer": lambda model, patch: patch.setattr(ShortcutConnection, "scatter", _added_at_once),
    "experts that return nothing": lambda model, patch: patch.setattr(feed_forward, "without_identities", _without_own),
    "no gain of queries": lambda model, patch: [setattr(one.self_attn, "scale", 48**-0.5) for one in model.layers],
    "no gain of latents": lambda model, patch: [
        setattr(one.self_attn, "_latent_norm", one.self_attn.kv_a_layernorm) for one in model.layers
    ],
    "normalised weights": lambda model, patch: [_set_rule(one, normalise=True) for one in model.layers[::2]],
    "sigmoids": lambda model, patch: [_set_rule(one, score="sigmoid") for one in model.layers[::2]],
}


@pytest.mark.parametrize("kind", [np.array, mx.array])
def test_an_expert_that_returns_its_input_is_replaced_by_another_of_the_token(kind):
    ids, weights = kind([[7, 2, 9, 4], [8, 9, 7, 5], [1, 0, 3, 2]]), kind(np.float32([[4, 3, 2, 1]] * 3))
    made = feed_forward.without_identities(ids, weights, 5)
    assert [np.array(part).tolist() for part in made] == [
        [[2, 2, 2, 4], [0, 0, 0, 0], [1, 0, 3, 2]],
        [[0, 3, 0, 1], [0, 0, 0, 0], [4, 3, 2, 1]],
        [[6], [10], [0]],
    ]


def _grown(where):
    """Returns a change of a layer that leaves the growth of some queries out."""

    def change(layer):
        parts = {"attention": layer.self_attn, "index": layer.self_attn.get("indexer", {})}
        if "softmax_scaling" in parts[where]:
            parts[where].softmax_scaling = lambda q, position: q

    return change


def _late_growth(layer):
    own = layer.self_attn.softmax_scaling
    layer.self_attn.softmax_scaling = lambda q, position: own(q, position + 1)


# Parts of Mistral Large 4 that an implementation may leave out or place wrongly.
MISTRAL_LARGE4 = {
    "queries that do not grow": _grown("attention"),
    "index queries that do not grow": _grown("index"),
    "queries that grow one later": _late_growth,
    "frequencies that are not learned": lambda layer: [rope.learn(mx.zeros(8)) for rope in layer.self_attn._ropes()],
    "norms of latents with another eps": lambda layer: setattr(layer.self_attn.kv_a_layernorm, "eps", 1e-6),
    "a norm of its own in layers that borrow latents": lambda layer: (
        layer.self_attn.mixer.borrows and _set(layer.self_attn.kv_a_layernorm, "weight", mx.ones(64))
    ),
    "index queries of an input without a norm": lambda layer: (
        "indexer" in layer.self_attn and setattr(layer.self_attn.indexer, "q_input_norm", lambda x: x)
    ),
}


# Parts of Llama 4 that an implementation may place wrongly.
LLAMA4 = {
    "windows instead of chunks": lambda layer, patch: _switch(layer, chunked=False),
    "queries that grow in chunks too": lambda layer, patch: _switch(layer, query_scale=QueryScale(0.7, 5, first=1)),
    "queries that grow one later": lambda layer, patch: (
        layer.self_attn.mixer.query_scale and _switch(layer, query_scale=QueryScale(0.7, 5))
    ),
    "queries and keys in norms without rotation too": lambda layer, patch: _switch(layer, norm="unit"),
    "outputs that are scaled": lambda layer, patch: patch.setattr(moe, "scaled_input", lambda *given: given),
    "a softmax": lambda layer, patch: hasattr(layer.mlp, "rule") and _set_rule(layer, score="softmax"),
}


def _set_rule(layer, **change):
    layer.mlp.rule = replace(layer.mlp.rule, **change)


# The norms of a stream that is kept divided by the factor of parts, and those that read no stream.
NORMS_OF_GRANITE = {
    "norms of the stream": lambda layer: [_change_eps(layer, name, 0.4**2) for name in BEFORE_PARTS],
    "norms of Mamba": lambda layer: "mamba" in layer and _change_eps(layer.mamba, "norm", 0.4**-2),
}
BEFORE_PARTS = ("input_layernorm", "post_attention_layernorm")


def _change_eps(owner, name, factor):
    owner[name].eps *= factor
    if hasattr(owner, "arrange"):
        owner.arrange()


def _of_sinks(factor, more=0.0):
    return lambda attention: attention.mixer.sinks and setattr(attention, "sinks", attention.sinks * factor - more)


def _norm_heads(attention):
    attention.q_norm, attention.k_norm = by_head(attention.q_norm), by_head(attention.k_norm)


def _with_eps(eps):
    """Gives norms of latents this eps, or the model's. DeepSeek's have an eps of their own, those of GLM-5.3-Flash and
    Hy4's container do not."""

    def change(model):
        for norm in (module for path, module in model.named_modules() if path.endswith("_a_layernorm")):
            norm.eps = model.args.rms_norm_eps if eps is None else eps

    return change


def _with_pairs(interleaved):
    def change(attention):
        if attention.rope:
            attention.rope = Rope(replace(attention.mixer.rotation, interleaved=interleaved))
            attention.arrange()

    return change


def _rotate_everywhere(model):
    turned = next(layer.self_attn.rope for layer in model.layers if layer.self_attn.rope)
    for attention in (layer.self_attn for layer in model.layers):
        attention.rope = turned
        attention.arrange()


def _exchange_norms(layer):
    """The norm before the experts and that behind attention have confusing names in these families."""
    before, behind = layer.post_attention_layernorm, layer.mixer_output.norm
    before.weight, behind.weight = behind.weight, before.weight


def _of_rule(**change):
    return lambda layer: hasattr(layer.mlp, "rule") and _set_rule(layer, **change)


# What several families have, and what one family has.
OF_SEVERAL = {
    "no biases": (
        "glm4_moe_air glm4v_moe qwen2_moe",
        lambda attention: _set(attention._inputs.stacked, "bias", 0 * attention._inputs.stacked.bias),
    ),
    "no sinks": ("gpt_oss mimo_v2_flash flint hy_v4", _of_sinks(0, 1e9)),
    "sinks with the other sign": ("gpt_oss mimo_v2_flash flint hy_v4", _of_sinks(-1)),
    "no gates": (
        "laguna step3p5 afmoe bailing_hybrid beam hy_v4 kimi_k3",
        lambda layer: layer.self_attn.mixer.attention and _switch(layer, gate=None),
    ),
    "norms of each head": ("minimax_m2 olmoe", _norm_heads),
    "norms of latents with the model's eps": ("glm4_moe_lite kimi_linear kimi_k3 hy_v4", _with_eps(None)),
    "norms of latents with an eps of their own": ("glm5_next hy_v4_vl", _with_eps(1e-6)),
    "a bias of logits that is added to scores": ("kolibri1", _of_rule(biases_logits=False)),
    "a bias of scores that is added to logits": ("ernie4_5_moe", _of_rule(biases_logits=True)),
    "sigmoids instead of a softmax": ("ernie4_5_moe", _of_rule(score="sigmoid")),
    "a softmax instead of sigmoids": ("flint", _of_rule(score="softmax")),
    "pairs by halves": ("ernie4_5_moe cohere2_moe llama4 sarvam_mla", _with_pairs(False)),
    "neighbouring pairs": ("mixtral hunyuan_v1_moe sarvam_moe", _with_pairs(True)),
    "a rotation in layers without a window": ("afmoe flint kolibri1 beam cohere2_moe", _rotate_everywhere),
    "norms around a part that are exchanged": ("afmoe kolibri1 beam", _exchange_norms),
    "embeddings that are not normed": (
        "muse_spark",
        lambda model: setattr(model, "args", replace(model.args, embedding_norm=None)),
    ),
    "norms before a rotation": ("hunyuan_v1_moe", lambda layer: _switch(layer, rotates_first=False)),
    "experts behind attention instead of beside it": (
        "cohere2_moe",
        lambda patch: patch.setattr(NormedApart, "mixed", _one_after_another),
    ),
}
PARTS = {"nemotron_h": MAMBA, "lfm2_moe": CONV, "gemma4": GEMMA4, "axk2": AXK2, "dots3_note": DOTS3_NOTE}
PARTS |= {"muse_spark": MUSE_SPARK, "beam": BEAM, "hy_v4": HY_V4, "hy_v4_vl": HY_V4, "deepseek_v41": DEEPSEEK_V41}
PARTS |= {"kimi_k3": KIMI_K3, "longcat_flash": LONGCAT, "mistral_large4": MISTRAL_LARGE4, "llama4": LLAMA4}
PARTS |= {"granitemoehybrid": NORMS_OF_GRANITE}
MISTAKES = [(family, what, change) for family, parts in PARTS.items() for what, change in parts.items()]
MISTAKES += [(family, what, change) for what, (several, change) in OF_SEVERAL.items() for family in several.split()]


@pytest.mark.parametrize("family, what, change", MISTAKES)
def test_mistakes_in_a_layer(monkeypatch, family, what, change):
    """`change` takes the model, or what its parameters name of each layer that has it."""
    model, wanted = load_model(tiny_directory(family, "hub"), dtype=mx.float32), inspect.signature(change).parameters
    for number, layer in enumerate(model.layers[: 1 if wanted.keys() <= {"model", "patch"} else None]):
        known = {"layer": layer, "number": number, "model": model, "patch": monkeypatch}
        known |= {"attention": layer.get("self_attn"), "mamba": layer.get("mamba"), "conv": layer.get("conv")}
        given = [known[name] for name in wanted]
        if None not in given:
            change(*given)
        if family in ("axk2", "deepseek_v41"):
            layer.self_attn.arrange()
    assert error(model, family) > 10 * TOLERANCE


AGREED = (
    "kimi_k2",
    "moonlight",
    "minimax_m2",
    "glm4_moe",
    "glm4_moe_air",
    "solar_open",
    "qwen3_vl_moe",
    "exaone_moe",
    "minimax_m3_vl",
    "gemma4",
    "olmoe",
    "qwen2_moe",
    "afmoe",
    "bailing_hybrid",
    "granitemoehybrid",
    "longcat_flash",
)


@pytest.mark.parametrize("family", [*AGREED, "glm4_moe_lite", "mimo_v2_flash", "laguna", "ernie4_5_moe", "kimi_linear"])
def test_where_mlx_lm_differs_from_hugging_face(tmp_path, family):
    """mlx-lm norms GLM-4.7-Flash's and Kimi Linear's latents with `rms_norm_eps`; transformers uses 1e-6, and so do we.
    mlx-lm sees one position less in MiMo's windows, and leaves out Laguna's `attention_factor` and ERNIE's correction
    bias."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")
    weights = {name: ("F32", w.astype(np.float32)) for name, w in goldens.dequantised(family).items()}
    goldens.write_safetensors(tmp_path / "model.safetensors", weights)
    sizes = {"vocab_size": goldens.text_config(family)["vocab_size"]}  # mlx-lm also reads it outside of the text part
    (tmp_path / "config.json").write_text(json.dumps({**goldens.config(family), **sizes}))
    tokens, wanted = goldens.golden(family)
    with on_cpu():
        theirs, _ = utils.load_model(tmp_path)
        difference = np.abs(np.array(theirs(mx.array(tokens)[None])[0]) - wanted).max()
    assert difference < TOLERANCE if family in AGREED else difference > 10 * TOLERANCE
