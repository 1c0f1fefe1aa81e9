"""Step-3.5-Flash, and the text part of Step-3.7-Flash: layers with a window have more heads than the others."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import SILU, Activation, Dense, Experts, LayerSpec, Router, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from .fields import FULL, SLIDING, Family, Fields, common, layer_count, of_kind, out_of_range, rotation, scale
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata
from .gguf_keys import SLOWED
from .gguf_rope import llama3_scaling


def _step3p5(read: Fields) -> JsonDict:
    read.must_have(
        attention_bias=False, mlp_bias=False, use_head_wise_attn_gate=True, gating=True, norm_expert_weight=True
    )
    kinds, sparse = _by_layer(read, "layer_types", FULL), _moe_layers(read)
    if not set(kinds) <= {FULL, SLIDING}:
        raise out_of_range("layer_types", kinds, f"{FULL!r} or {SLIDING!r} for each layer")
    parts = [_experts(read, i) if i in sparse else _dense(read, i) for i in range(len(kinds))]
    mixers = [_attention(_of_layer(read, i, kind), kind) for i, kind in enumerate(kinds)]
    return {**common(read), "layers": tuple(map(LayerSpec, mixers, parts))}


def _by_layer(read: Fields, name: str, missing: Any) -> list[Any]:
    """A value for each layer; the hub's lists go on with those of layers that draft."""
    count = layer_count(read)
    values = read.optional(name, list, [missing] * count)
    if len(values) < count:
        raise ConfigError(f"config field {name!r} has {len(values)} entries for {count} layers")
    return values[:count]


def _moe_layers(read: Fields) -> set[int]:
    kinds = read.optional("mlp_layer_types", list, None)
    if kinds is not None:
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    listed = read.optional("moe_layers_enum", str, None)
    if listed is None:
        return set(range(3, layer_count(read)))
    try:
        return {int(one) for one in listed.split(",") if one.strip()}
    except ValueError:
        raise out_of_range("moe_layers_enum", listed, "numbers of layers with commas between them") from None


def _experts(read: Fields, layer: int) -> Experts:
    router = Router(
        read.count("moe_num_experts|n_routed_experts"),
        read.count("moe_top_k|num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        scale=scale(read, "moe_router_scaling_factor"),
    )
    width = read.count("share_expert_dim|share_expert_dims")
    shared = SharedExpert(width, activation=_activation(read, "swiglu_limits_shared", layer))
    return Experts(router, read.count("moe_intermediate_size"), shared, _activation(read, "swiglu_limits", layer))


def _dense(read: Fields, layer: int) -> Dense:
    return Dense(read.count("intermediate_size"), _activation(read, "swiglu_limits_shared", layer))


def _activation(read: Fields, name: str, layer: int) -> Activation:
    """0 and null stand for no limit."""
    limit = Fields({name: _by_layer(read, name, None)[layer]}).number(name, 0.0, least=0.0, most=1e6)
    return Activation("silu then clip", limit) if limit else SILU


def _of_layer(read: Fields, layer: int, kind: str) -> Fields:
    """The fields as they are for one layer: the hub has lists of rotations, and scales those of some kinds only."""
    of = of_kind(read, kind)
    if of is not read:
        return of
    own: JsonDict = {}
    if isinstance(read.config.get("rope_theta"), list):
        own["rope_theta"] = _by_layer(read, "rope_theta", None)[layer]
    if read.config.get("partial_rotary_factors") is not None:
        own["partial_rotary_factor"] = _by_layer(read, "partial_rotary_factors", 1.0)[layer]
    if kind not in read.optional("yarn_only_types", list, [FULL]):
        own["rope_scaling"] = None
    return Fields({**read.config, **own})


def _attention(read: Fields, kind: str) -> GroupedQuery:
    other = Fields(read.optional("attention_other_setting", Mapping, {}) if kind == SLIDING else {})
    heads = read.count("num_attention_heads")
    if kind == SLIDING:
        heads = read.count("num_sliding_attention_heads", None) or other.count("num_attention_heads", heads)
    width = other.count("head_dim", read.count("head_dim"))
    scalar = read.number("query_pre_attn_scalar", float(width), least=1e-6, most=1e9)
    return GroupedQuery(
        heads=heads,
        kv_heads=other.count("num_attention_groups", read.count("num_attention_groups|num_key_value_heads")),
        head_dim=width,
        rotation=rotation(read, width),
        gate="sigmoid head",
        window=read.count("sliding_window") if kind == SLIDING else None,
        scale=None if scalar == width else scalar**-0.5,
    )


ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
RENAMES = (
    (".moe.router_bias", ".mlp.e_score_correction_bias"),
    (".mlp.gate.router_bias", ".mlp.e_score_correction_bias"),  # where mlx-lm's conversions have it
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".moe.gate.", ".mlp.gate."),
    (".mlp.gate.gate.", ".mlp.gate."),
    (".moe.", ".mlp.experts."),
    (".mlp.share_expert.", ".mlp.shared_expert."),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".share_expert.", ".mlp.shared_expert."),
)
FAMILIES = {"step3p5": Family(_step3p5, ZERO_CENTRED, RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """Of layers without a window half of a head rotates, by published configurations and in llama.cpp."""
    windows = read.windows(4)
    kinds = [SLIDING if slides else FULL for slides in windows]
    read.must_have(expert_gating_func=SIGMOID, moe_every_n_layers=1)
    width, theta, dense = read.head_width(1), read.theta(), read.count("leading_dense_block_count", 0)
    read.must_equal("rope.dimension_count", width)
    theta_of = {FULL: theta, SLIDING: read.number("rope.freq_base_swa", theta)}
    heads, heads_swa = read.of_each_kind("attention.head_count", windows)
    kv_heads, kv_heads_swa = read.of_each_kind("attention.head_count_kv", windows)
    other = {"num_attention_heads": heads_swa, "num_attention_groups": kv_heads_swa, "head_dim": width}
    return {
        **read.sizes(),
        "num_attention_heads": heads,
        "num_attention_groups": kv_heads,
        "attention_other_setting": other,
        "head_dim": width,
        "layer_types": kinds,
        "sliding_window": read.count("attention.sliding_window"),
        "rope_theta": [theta_of[kind] for kind in kinds],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in kinds],
        "rope_scaling": _gguf_scaling(read, width, theta),
        "yarn_only_types": [FULL],
        "intermediate_size": read.count("feed_forward_length"),
        "moe_layers_enum": ",".join(map(str, range(dense, read.layers))),
        "moe_num_experts": read.count("expert_count"),
        "moe_top_k": read.count("expert_used_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "share_expert_dim": read.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": read.weights_scale(),
        "norm_expert_weight": read.flag("expert_weights_norm", False),
        "swiglu_limits": read.each_number("swiglu_clamp_exp"),
        "swiglu_limits_shared": read.each_number("swiglu_clamp_shexp"),
    }


def _gguf_scaling(read: Metadata, width: int, theta: float) -> JsonDict | None:
    """Llama 3's scaling of layers without a window, for whose heads only the first half of the divisors is.

    Raises:
        ConfigError: another scaling, or no such divisors.
    """
    read.must_be_unscaled()
    if read.slowed and len(read.slowed) != width // 2:
        raise ConfigError(f"GGUF tensor {SLOWED} has {len(read.slowed)} values; the model needs {width // 2}")
    return llama3_scaling(read.slowed[: width // 4], theta)


NAMES = (("attn_gate.", "self_attn.g_proj."), *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
GGUF = {"step35": GgufFamily(("step3p5",), _gguf, NAMES)}
