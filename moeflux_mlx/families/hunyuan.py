"""Hy3 of Tencent's Hunyuan."""

from typing import Any

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


def _hy_v3(read: Fields) -> dict[str, Any]:
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
