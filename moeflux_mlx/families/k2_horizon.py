"""IFM's K2 Horizon: norms of two halves of the stream, and value experts beside the routed ones (MoVA).

No package has its reference; the names and the arithmetic are those of IFM's modelling file, which ports to MLX repeat.
"""

from dataclasses import replace

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Residual
from ..kinds.limits import not_multiple
from .fields import (
    Family,
    Fields,
    common,
    experts,
    grouped_query,
    layer_count,
    layers,
    scale,
    shared_expert,
    sparse_layers,
)


def _k2_horizon(read: Fields) -> JsonDict:
    if not read.optional("num_experts", int, 0):
        raise ConfigError(
            "a dense K2 Horizon model (0.9B to 7B) does not run here: it has no experts; K2-Horizon-MoVA runs"
        )
    read.must_have(
        router_score_func="sigmoid",
        norm_topk_prob=True,
        moe_gate_bias=True,
        query_key_norm=False,
        rope_head_dim=read.config.get("head_dim"),
    )
    if read.required("attention_gate_func", str) != "softplus":
        read.must_equal("attention_gate_func", "softplus")
    factor = scale(read, "router_scaling_factor")
    moe = experts(read, shared_expert(read), score="sigmoid", correction_bias=True, scale=factor)
    dense = grouped_query(read, norm=None, gate="softplus2")
    counts = {"experts": read.count("mova_num_experts", most=1024), "top_k": read.count("mova_num_experts_per_tok")}
    chooser = replace(moe.router, **counts)
    sparse, of_chosen = sparse_layers(read), replace(dense, value_experts=chooser)
    mixers = [of_chosen if i in sparse else dense for i in range(layer_count(read))]
    groups, hidden = read.count("layernorm_num_groups", most=1024), read.count("hidden_size")
    if hidden % (16 * groups):
        raise not_multiple("hidden_size", hidden, "16 * layernorm_num_groups", 16 * groups)
    return {**common(read), "layers": layers(read, mixers, moe, sparse, Residual(norm_groups=groups))}


RENAMES = (
    *((".mlp.gate.bias$", ".mlp.e_score_correction_bias"), (".mlp.shared_experts.", ".mlp.shared_expert.")),
    *((".self_attn.gate_proj.", ".self_attn.g_proj."), (".self_attn.v_experts.", ".self_attn.value_experts.")),
    (".self_attn.v_router.bias$", ".self_attn.value_experts.e_score_correction_bias"),
    (".self_attn.v_router.", ".self_attn.value_experts.gate."),
)
FAMILIES = {"k2_horizon": Family(_k2_horizon, renames=RENAMES)}
