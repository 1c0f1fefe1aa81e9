"""Hy3 of Tencent's Hunyuan."""

from ..files import JsonDict
from .fields import (
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    grouped_query,
    layer_count,
    layers,
    scale,
    shared_expert,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata


def _hy_v3(read: Fields) -> JsonDict:
    for name in ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "qk_norm", "route_norm"):
        read.must_equal(name, True)
    read.must_equal("mlp_bias", False)
    factor = scale(read, "router_scaling_factor")
    moe = experts(read, shared_expert(read), score="sigmoid", correction_bias=True, scale=factor)
    mixers = [grouped_query(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


RENAMES = (
    (".mlp.router.expert_bias", ".mlp.expert_bias"),  # where mlx-lm's conversions have it
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
)
FAMILIES = {"hy_v3": Family(_hy_v3, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    read.must_equal("expert_gating_func", SIGMOID)
    width = read.count("expert_feed_forward_length")
    return {
        "model_type": "hy_v3",
        **read.sizes(),
        **read.attention(),
        **read.experts(),
        "intermediate_size": read.count("feed_forward_length"),
        "first_k_dense_replace": read.leading_dense(),
        "num_shared_experts": read.count("expert_shared_feed_forward_length", width) // max(width, 1),
        "router_scaling_factor": read.weights_scale(),
        "route_norm": read.flag("expert_weights_norm", False),
    }


GGUF = {"hy_v3": GgufFamily(_gguf, (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))}
