"""LongCat-Flash: two layers of latent attention for each of experts, which run beside the second and may return their
input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..files import JsonDict
from ..kinds import Dense, LayerSpec, Residual, SharedExpert, Shortcut
from .deepseek import latent_attention
from .fields import MOST_LAYERS, Family, Fields, common, experts, scale

# Of transformers' class, where the published file leaves a field out.
USUAL = {
    **{"num_layers": 28, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "moe_topk": 12, "rope_theta": 1e7},
    **{"n_routed_experts": 512, "zero_expert_num": 256, "routed_scaling_factor": 6.0, "q_lora_rank": 1536},
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}


def _longcat_flash(read: Fields) -> JsonDict:
    read = Fields({**USUAL, **read.config})
    read = Fields({**read.config, "num_experts_per_tok": read.count("moe_topk")})
    read.must_have(
        attention_method="MLA",
        zero_expert_type="identity",
        norm_topk_prob=False,
        router_bias=False,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    )
    hidden, attention = read.count("hidden_size"), latent_attention(read)
    attention = replace(
        attention,
        query_gain=(hidden / read.count("q_lora_rank")) ** 0.5,
        latent_gain=(hidden / attention.latent) ** 0.5,
    )
    width = read.count("ffn_hidden_size")
    moe = experts(
        read,
        SharedExpert(width),
        "expert_ffn_hidden_size",
        correction_bias=True,
        normalise=False,
        scale=scale(read, "routed_scaling_factor"),
        identities=read.count("zero_expert_num", 0, least=0),
    )
    residual = Residual(connections=Shortcut())
    pair = LayerSpec(attention, moe, residual), LayerSpec(attention, Dense(width), residual)
    return {**common(read, eps=1e-5), "layers": pair * read.count("num_layers", most=MOST_LAYERS // 2)}


def _numbered(layers: Sequence[LayerSpec]) -> list[tuple[str, str]]:
    """Beginnings of the names in each published layer, and ours; the last layers first, because ours are not fewer."""
    return [pair for layer in reversed(range(len(layers) // 2)) for pair in _of_layer(layer)]


def _of_layer(layer: int) -> Iterator[tuple[str, str]]:
    theirs, ours = f"^model.layers.{layer}.", [f"model.layers.{2 * layer + part}." for part in (0, 1)]
    for part, mlp in ((1, "mlp."), (0, "mlp.shared_expert.")):
        for name in ("self_attn.", "input_layernorm.", "post_attention_layernorm."):
            yield f"{theirs}{name}{part}.", f"{ours[part]}{name}"
        yield f"{theirs}mlps.{part}.", f"{ours[part]}{mlp}"
    yield f"{theirs}mlp.", f"{ours[0]}mlp."


RENAMES = (
    (".mlp.router.classifier.", ".mlp.gate."),
    (".mlp.router.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
FAMILIES = {"longcat_flash": Family(_longcat_flash, renames=RENAMES, numbered=_numbered)}
