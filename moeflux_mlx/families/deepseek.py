"""DeepSeek-V3 and families with its layers: Cogito-V2, Kimi K2, GLM-4.7-Flash, JoyAI-LLM-Flash; with indexers
DeepSeek-V3.2 and GLM-5.
"""

from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..kinds import Indexer, QueryFactor
from ..mixers.latent.spec import Latent
from .fields import (
    NEXT_LAYER,
    Family,
    Fields,
    after_dense_layers,
    common,
    layer_count,
    layer_kinds,
    layers,
    noaux_experts,
    rotation,
)

FULL, SHARED = "full", "shared"  # a layer that has an indexer, and one that takes what the last of these chose


def _deepseek_v3(read: Fields) -> dict[str, Any]:
    read.must_equal("moe_layer_freq", 1)
    for name in ("n_group", "topk_group"):  # readers of such files have different defaults
        read.count(name)
    mixers = [latent_attention(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


def _indexed(read: Fields, interleaved: bool) -> dict[str, Any]:
    """DeepSeek-V3 with indexers, whose rotation is `interleaved` unless a field says otherwise."""
    args, attention = _deepseek_v3(read), latent_attention(read)
    own = Indexer(
        heads=read.count("index_n_heads"),
        dim=read.count("index_head_dim"),
        top=read.count("index_topk"),
        interleaved=read.optional("indexer_rope_interleave", bool, interleaved),
    )
    of = {kind: replace(attention, indexer=replace(own, reuses=kind == SHARED)) for kind in (FULL, SHARED)}
    layers = zip(args["layers"], indexer_types(read), strict=True)
    return {**args, "layers": tuple(replace(layer, mixer=of[kind]) for layer, kind in layers)}


def indexer_types(read: Fields) -> list[str]:
    """The type of each layer's indexer, from a list, a pattern of names or letters, or a period after the first
    layers.
    """
    pattern = read.config.get("index_topk_pattern")
    kinds = layer_kinds(read, "indexer_types", (FULL, SHARED))
    if kinds is None and isinstance(pattern, str):
        letters = Fields({**read.config, "index_topk_pattern": list(pattern)})
        kinds = [FULL if one == "F" else SHARED for one in layer_kinds(letters, "index_topk_pattern", "FS") or ()]
    kinds = kinds or layer_kinds(read, "index_topk_pattern", (FULL, SHARED))
    if kinds is None:
        period, skipped = read.count("index_topk_freq", 1), read.count("index_skip_topk_offset", 2, least=0)
        kinds = [SHARED if max(i - skipped + 1, 0) % period else FULL for i in range(layer_count(read))]
    if kinds[0] != FULL:
        raise ConfigError("config field 'indexer_types' is 'shared' for layer 0, which has none before it to share")
    return kinds


def latent_attention(read: Fields, query_scale: QueryFactor | None = None) -> Latent:
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
FAMILIES = dict.fromkeys(TYPES, Family(_deepseek_v3, renames=RENAMES, head=NEXT_LAYER)) | {
    "deepseek_v32": Family(lambda read: _indexed(read, interleaved=False), renames=RENAMES, head=NEXT_LAYER),
    "glm_moe_dsa": Family(lambda read: _indexed(read, interleaved=True), renames=RENAMES, head=NEXT_LAYER),
}
