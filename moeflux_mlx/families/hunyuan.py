"""Hunyuan-A13B and Hy3 of Tencent."""

from ..files import JsonDict, JsonValue
from ..kinds import SharedExpert
from .fields import (
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    scale,
    shared_expert,
    sizes,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata


def _hy_v3(read: Fields) -> JsonDict:
    read.must_have(
        **dict.fromkeys(("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "qk_norm", "route_norm"), True),
        mlp_bias=False,
    )
    factor = scale(read, "router_scaling_factor")
    moe = experts(read, shared_expert(read), score="sigmoid", correction_bias=True, scale=factor)
    mixers = [grouped_query(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


def _hunyuan_v1_moe(read: Fields) -> JsonDict:
    """Of fields that may have a number for each layer, all numbers must be the same."""
    read.must_have(
        hidden_act="silu",
        use_qk_norm=True,
        use_mixed_mlp_moe=True,
        norm_topk_prob=True,
        **dict.fromkeys(("use_cla", "use_mla", "mlp_bias"), False),
        moe_layer_num_skipped=0,
        routed_scaling_factor=1.0,
    )
    of_layers = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    read = Fields({**read.config, **{name: _of_all_layers(read, name) for name in of_layers}})
    names = {"num_experts_per_tok": "moe_topk", "head_dim": "attention_head_dim"}
    read = read.with_usual({name: read.config.get(theirs) for name, theirs in names.items()})
    dense = read.count("intermediate_size")
    moe = experts(
        read.with_usual({"moe_intermediate_size": dense}), SharedExpert(dense * read.count("num_shared_expert", 1))
    )
    mixers = [grouped_query(read, rotates_first=True)] * layer_count(read)
    return {
        **sizes(read, eps=1e-5),
        "is_tied": read.optional("tie_word_embeddings", bool, False),
        "layers": layers(read, mixers, moe, range(len(mixers))),
    }


def _of_all_layers(read: Fields, name: str) -> JsonValue:
    """A number, or that of a list with the same one for each layer."""
    value = read.config.get(name)
    kinds = layer_kinds(read, name, value[:1]) if isinstance(value, list) else None
    return kinds[0] if kinds else value


RENAMES = (
    (".mlp.router.expert_bias", ".mlp.expert_bias"),  # where mlx-lm's conversions have it
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
)
OF_A13B = (
    *((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm.")),
    *((".mlp.gate.wg.", ".mlp.gate."), (".mlp.shared_mlp.", ".mlp.shared_expert.")),
)
FAMILIES = {
    "hy_v3": Family(_hy_v3, renames=RENAMES),
    **dict.fromkeys(("hunyuan_v1_moe", "hunyuan"), Family(_hunyuan_v1_moe, renames=OF_A13B)),  # MLX copies' name too
}


def _gguf(read: Metadata) -> JsonDict:
    read.must_equal("expert_gating_func", SIGMOID)
    width = read.count("expert_feed_forward_length")
    return {
        **read.sizes(),
        **read.attention(),
        **read.experts(),
        "intermediate_size": read.count("feed_forward_length"),
        "first_k_dense_replace": read.leading_dense(),
        "num_shared_experts": read.count("expert_shared_feed_forward_length", width) // max(width, 1),
        "router_scaling_factor": read.weights_scale(),
        "route_norm": read.flag("expert_weights_norm", False),
    }


def _gguf_a13b(read: Metadata) -> JsonDict:
    """The base of rotations is stored as scaling makes it, and one shared expert is all that llama.cpp reads."""
    return {
        **read.sizes(),
        **read.attention(),
        **read.experts(),
        "moe_topk": read.count("expert_used_count"),
        "intermediate_size": read.count("expert_shared_feed_forward_length"),
        "num_shared_expert": 1,
    }


NAMES = (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
GGUF = {
    "hy_v3": GgufFamily(("hy_v3",), _gguf, NAMES),
    "hunyuan-moe": GgufFamily(("hunyuan_v1_moe", "hunyuan"), _gguf_a13b, NAMES),
}
