"""Laguna of poolside: windows, a softplus gate per head, and different numbers of heads by layer."""

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    layer_count,
    layer_kinds,
    layers,
    of_kind,
    rotation,
    scale,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata, share_of


def _laguna(read: Fields) -> JsonDict:
    read.must_have(
        attention_bias=False, qkv_bias=False, moe_apply_router_weight_on_input=False, moe_router_score_func="sigmoid"
    )
    if read.config.get("gating", True) not in (True, "per-head"):
        raise ConfigError(f"config field 'gating' is {read.config['gating']!r}; only 'per-head' is implemented")
    shared = SharedExpert(read.count("shared_expert_intermediate_size"))
    factor = scale(read, "moe_routed_scaling_factor")
    softcap = read.number("moe_router_logit_softcapping", 0.0, least=0.0, most=1e6) or None
    moe = experts(read, shared, score="sigmoid", correction_bias=True, scale=factor, softcap=softcap)
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING)) or [FULL] * layer_count(read)
    mixers = [_attention(read, kind, heads) for kind, heads in zip(kinds, _heads(read), strict=True)]
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


def _heads(read: Fields) -> list[int]:
    """The number of query heads of each layer."""
    name, count = "num_attention_heads_per_layer", layer_count(read)
    by_layer = read.optional(name, list, [read.count("num_attention_heads")] * count)
    if len(by_layer) != count:
        raise ConfigError(f"config field {name!r} has {len(by_layer)} entries for {count} layers")
    return [Fields({name: heads}).count(name) for heads in by_layer]


def _attention(read: Fields, kind: str, heads: int) -> GroupedQuery:
    width = read.count("head_dim")
    return GroupedQuery(
        heads=heads,
        kv_heads=read.count("num_key_value_heads"),
        head_dim=width,
        rotation=rotation(of_kind(read, kind), width),
        gate="softplus head",
        window=read.count("sliding_window") if kind == SLIDING else None,
    )


RENAMES = (
    (".mlp.experts.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".mlp.gate.proj.", ".mlp.gate."),  # where mlx-lm's conversions have it
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
FAMILIES = {"laguna": Family(_laguna, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """Without a window all layers see everything."""
    read.must_have(expert_gating_func=SIGMOID, expert_weights_norm=True)
    window, width, theta = read.count("attention.sliding_window", 0), read.head_width(1), read.theta()
    turned = read.count("rope.dimension_count", width)
    narrow = read.count("rope.dimension_count_swa", turned)
    slides = read.windows(4, full_first=True) if window else [False] * read.layers
    return {
        **read.sizes(),
        **read.experts(),
        "num_attention_heads_per_layer": read.of_each("attention.head_count"),
        "num_key_value_heads": read.of_layers("attention.head_count_kv", read.layers),
        "num_attention_heads": read.of_each("attention.head_count")[0],
        "head_dim": width,
        "layer_types": [SLIDING if one else FULL for one in slides],
        "sliding_window": window or None,
        "intermediate_size": read.count("feed_forward_length"),
        "shared_expert_intermediate_size": read.count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": read.weights_scale(),
        "first_k_dense_replace": read.count("leading_dense_block_count"),
        "rope_parameters": {
            FULL: {
                "rope_theta": theta,
                "partial_rotary_factor": share_of(turned, width),
                **(read.rope_scaling() or {}),
            },
            SLIDING: {
                "rope_theta": read.number("rope.freq_base_swa", theta),
                "partial_rotary_factor": share_of(narrow, width),
            },
        },
    }


NAMES = (("attn_gate.", "self_attn.g_proj."), *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
GGUF = {"laguna": GgufFamily(("laguna",), _gguf, NAMES)}
