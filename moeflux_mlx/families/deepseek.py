"""DeepSeek-V3, which Cogito-V2 is one of."""

from typing import Any

from ..kinds import Latent, SharedExpert
from .fields import Family, Fields, common, experts, layer_count, layers, rotation


def _deepseek_v3(read: Fields) -> dict[str, Any]:
    for name, wanted in (
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("rope_interleave", True),
        ("moe_layer_freq", 1),
        ("attention_bias", False),
    ):
        read.must_equal(name, wanted)
    count = layer_count(read)
    width = read.count("moe_intermediate_size") * read.count("n_shared_experts", least=0)
    moe = experts(
        read,
        SharedExpert(width) if width else None,
        score="sigmoid",
        correction_bias=True,
        groups=read.count("n_group"),
        kept_groups=read.count("topk_group"),
        normalise=read.optional("norm_topk_prob", bool, True),
        scale=read.number("routed_scaling_factor", least=1e-6, most=1e6),
    )
    moe_layers = range(read.count("first_k_dense_replace", least=0, most=count), count)
    return {**common(read), "layers": layers(read, [_attention(read)] * count, moe, moe_layers)}


def _attention(read: Fields) -> Latent:
    return Latent(
        heads=read.count("num_attention_heads"),
        q_latent=read.count("q_lora_rank"),
        latent=read.count("kv_lora_rank"),
        nope=read.count("qk_nope_head_dim"),
        value=read.count("v_head_dim"),
        rotation=rotation(read, read.count("qk_rope_head_dim"), share=None, interleaved=True),
    )


RENAMES = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
FAMILIES = {"deepseek_v3": Family(_deepseek_v3, renames=RENAMES)}
