"""The text part of Meta's Muse Spark: parts are added with learned weights, and experts work in a latent, each behind a
norm.
"""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import LayerSpec, Residual, WeighedSum
from ..mixers.grouped.spec import GroupedQuery
from .deepseek import RENAMES as OF_DEEPSEEK
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    FusedRows,
    after_dense_layers,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    out_of_range,
    scale,
)
from .fused_rows import grouped_rows

# Of transformers' class, where the published file leaves a field out.
USUAL = {
    **{"head_dim": 64, "rope_theta": 5e5, "sliding_window": 2048, "moe_hidden_size": 4096, "first_k_dense_replace": 0},
    **{"qk_scale_factor": 5.4730064863875, "output_multiplier": 32**-0.5, "routed_scaling_factor": 1.0},
    **{"final_logit_softcapping": 20.0, "post_norm_eps": 1e-8, "residual_gate_temperature": 0.3},
}


def _muse_spark(read: Fields) -> JsonDict:
    read = read.with_usual(USUAL)
    read.must_equal("num_shared_experts", 0)
    count, multiplier = layer_count(read), scale(read, "output_multiplier")
    eps = read.number("post_norm_eps", least=1e-30, most=1.0)
    usual = [SLIDING if (count - 1 - i) % 4 else FULL for i in range(count)]
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING)) or usual
    mixer = grouped_query(read, norm="unit", gate="sigmoid", output_norm=True)
    mixer = replace(mixer, scale=mixer.head_dim**-0.5 * scale(read, "qk_scale_factor"))
    windows = {FULL: None, SLIDING: read.count("sliding_window")}
    of_kinds = [replace(mixer, window=windows[kind]) for kind in kinds]
    turning = _turning(read, mixer, [kind == SLIDING for kind in usual])
    mixers = [one if turns else replace(one, rotation=None) for one, turns in zip(of_kinds, turning, strict=True)]
    factor = scale(read, "routed_scaling_factor")
    moe = replace(
        experts(read, score="sigmoid", correction_bias=True, scale=factor, eps=1e-15, logit_scale=multiplier),
        latent=read.count("moe_hidden_size"),
        latent_input_norm=True,
        output_eps=eps,
    )
    residual = Residual(weighed=WeighedSum(scale(read, "residual_gate_temperature"), eps))
    return {
        **common(read, eps=1e-5),
        "layers": layers(read, mixers, moe, after_dense_layers(read), residual),
        "embedding_norm": "unit",
        "logit_scale": multiplier,
        "logit_softcap": scale(read, "final_logit_softcapping"),
    }


def _turning(read: Fields, mixer: GroupedQuery, usual: list[bool]) -> list[bool]:
    """Whether each layer rotates queries and keys: 0 stands for one that does not, and all others have one base."""
    bases, theta = read.optional("layer_rope_theta", list, None), mixer.rotation.theta if mixer.rotation else 0.0
    if bases is None:
        return usual
    if len(bases) != len(usual) or any(base not in (0, theta) for base in bases):
        raise out_of_range("layer_rope_theta", bases, f"0 or {theta:g} for each of {len(usual)} layers")
    return [base != 0 for base in bases]


RENAMES = (
    *((".self_attn.gate_proj.", ".self_attn.g_proj."), (".pre_feedforward_layernorm.", ".post_attention_layernorm.")),
    (".post_feedforward_layernorm.", ".output_sum.norm."),
    *((".post_attention_residual_gate.gate", ".mixer_sum.part_gate"), (".add_attn_beta", ".mixer_sum.part_weight")),
    *((".post_feedforward_residual_gate.gate", ".output_sum.part_gate"), (".add_ffn_beta", ".output_sum.part_weight")),
    *((".mlp.experts.post_expert_norm.", ".mlp.expert_norm."), (".mlp.pre_expert_norm.", ".mlp.latent_input_norm.")),
    *((".mlp.pre_expert_proj.", ".mlp.fc1_latent_proj."), (".mlp.post_expert_proj.", ".mlp.fc2_latent_proj.")),
    *OF_DEEPSEEK,
)
ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "output_sum.norm", "expert_norm", "latent_input_norm")


def _joined_attention(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """As mlx-lm joins it: queries, keys, values and gates, of which queries and keys have rows that pair neighbours."""
    mixer, stem = spec.mixer, f"model.layers.{layer}.self_attn."
    if not isinstance(mixer, GroupedQuery) or shards > 1:
        return {}
    widths = [count * mixer.head_dim for count in (mixer.heads, mixer.kv_heads, mixer.kv_heads, mixer.heads)]
    q, k, v, g = grouped_rows(1, widths)
    q, k = (rows.reshape(-1, mixer.head_dim // 2, 2).swapaxes(1, 2).reshape(-1) for rows in (q, k))
    parts = (("q_proj", q), ("k_proj", k), ("v_proj", v), ("g_proj", g))
    return {f"{stem}qkvg_proj": tuple((stem + name, rows) for name, rows in parts)}


FAMILIES = {"muse_spark": Family(_muse_spark, ZERO_CENTRED, RENAMES, fused_rows=_joined_attention)}
