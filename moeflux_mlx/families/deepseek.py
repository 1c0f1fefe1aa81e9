"""DeepSeek-V3, and what has its layers: Cogito-V2, Kimi K2, GLM-4.7-Flash, JoyAI-LLM-Flash."""

from typing import Any

from ..kinds import Latent, QueryScale
from .fields import Family, Fields, after_dense_layers, common, layer_count, layers, noaux_experts, rotation


def _deepseek_v3(read: Fields) -> dict[str, Any]:
    read.must_equal("moe_layer_freq", 1)
    for name in ("n_group", "topk_group"):  # whose defaults differ between those who read such files
        read.count(name)
    mixers = [latent_attention(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


def latent_attention(read: Fields, query_scale: QueryScale | None = None) -> Latent:
    """Latent attention with DeepSeek's names of its sizes."""
    read.must_equal("rope_interleave", True)
    read.must_equal("attention_bias", False)
    return Latent(
        heads=read.count("num_attention_heads"),
        q_latent=read.count("q_lora_rank", None),
        latent=read.count("kv_lora_rank"),
        nope=read.count("qk_nope_head_dim"),
        value=read.count("v_head_dim"),
        rotation=rotation(read, read.count("qk_rope_head_dim"), share=None, interleaved=True),
        query_scale=query_scale,
    )


RENAMES = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
TYPES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "joyai_llm_flash")
FAMILIES = dict.fromkeys(TYPES, Family(_deepseek_v3, renames=RENAMES))
