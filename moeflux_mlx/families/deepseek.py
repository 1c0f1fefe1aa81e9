"""DeepSeek-V3, which Cogito-V2 is one of."""

from typing import Any

from ..kinds import FULL
from .fields import Family, Fields, common, dense_width, layer_count


def _deepseek_v3(read: Fields) -> dict[str, Any]:
    for name, wanted in (
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("rope_interleave", True),
        ("moe_layer_freq", 1),
    ):
        read.must_equal(name, wanted)
    layers = layer_count(read)
    moe_layers = tuple(range(read.count("first_k_dense_replace", least=0, most=layers), layers))
    nope, rope = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    return {
        **common(read),
        **{name: read.count(name) for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "n_group", "topk_group")},
        "head_dim": nope + rope,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "norm_topk_prob": read.optional("norm_topk_prob", bool, True),
        "scoring_func": "sigmoid",
        "correction_bias": True,
        "rope_interleave": True,
        "routed_scaling_factor": read.number("routed_scaling_factor", least=1e-6, most=1e6),
        "shared_expert_intermediate_size": read.count("moe_intermediate_size")
        * read.count("n_shared_experts", least=0),
        "layer_types": (FULL,) * layers,
        "moe_layers": moe_layers,
        "intermediate_size": dense_width(read, moe_layers),
    }


FAMILIES = {"deepseek_v3": Family(_deepseek_v3)}
