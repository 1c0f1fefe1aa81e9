"""DeepSeek-V3 and families with its layers: Cogito-V2, Kimi K2, GLM-4.7-Flash, JoyAI-LLM-Flash; with indexers
DeepSeek-V3.2 and GLM-5.
"""

from dataclasses import replace

from ..errors import ConfigError
from ..files import JsonDict
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
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata

FULL, SHARED = "full", "shared"  # a layer that has an indexer, and one that takes what the last of these chose


def _deepseek_v3(read: Fields) -> JsonDict:
    read.must_equal("moe_layer_freq", 1)
    for name in ("n_group", "topk_group"):  # readers of such files have different defaults
        read.count(name)
    mixers = [latent_attention(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


def indexed(read: Fields, interleaved: bool) -> JsonDict:
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
    read.must_have(rope_interleave=True, attention_bias=False)
    turning = rotation(read, read.count("qk_rope_head_dim"), share=None, interleaved=True)
    return Latent(**latent_sizes(read), rotation=turning, query_scale=query_scale)


def latent_sizes(read: Fields) -> JsonDict:
    """The sizes of latent attention, as `Latent` names them, without that of rotated keys."""
    return {
        "heads": read.count("num_attention_heads"),
        "q_latent": read.count("q_lora_rank", None),
        "latent": read.count("kv_lora_rank"),
        "nope": read.count("qk_nope_head_dim"),
        "value": read.count("v_head_dim"),
    }


RENAMES = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
TYPES = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "joyai_llm_flash")
FAMILIES = dict.fromkeys(TYPES, Family(_deepseek_v3, renames=RENAMES, head=NEXT_LAYER)) | {
    "deepseek_v32": Family(lambda read: indexed(read, interleaved=False), renames=RENAMES, head=NEXT_LAYER),
    "glm_moe_dsa": Family(lambda read: indexed(read, interleaved=True), renames=RENAMES, head=NEXT_LAYER),
}


def gguf_latent(read: Metadata) -> JsonDict:
    """The sizes of latent attention, which is stored as attention to one latent head: those of the model's heads have
    keys that end in `_mla`."""
    rotated = read.count("rope.dimension_count")
    return {
        "num_attention_heads": read.count("attention.head_count"),
        "q_lora_rank": read.count("attention.q_lora_rank", None),
        "kv_lora_rank": read.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": (read.count("attention.key_length_mla", None) or read.count("attention.key_length"))
        - rotated,
        "v_head_dim": read.count("attention.value_length_mla", None) or read.count("attention.value_length"),
    }


def gguf_indexer(read: Metadata) -> JsonDict:
    """The sizes of indexers, and which layers have one: where no key says it, those with its tensors."""
    stated = read.each_layer("attention.indexer.types", bool, [])
    names = (f"blk.{layer}.indexer.attn_k.weight" for layer in range(read.layers))
    has_own = stated or [name in read.tensors for name in names]
    return {
        "index_n_heads": read.count("attention.indexer.head_count"),
        "index_head_dim": read.count("attention.indexer.key_length"),
        "index_topk": read.count("attention.indexer.top_k"),
        "indexer_types": [FULL if one else SHARED for one in has_own],
    }


def gguf_config(read: Metadata, gating: int = SIGMOID) -> JsonDict:
    """DeepSeek-V3, Kimi K2 and GLM-4.7-Flash, whose configurations are read alike; `gating`: as of `Metadata.noaux`.

    Files written before llama.cpp knew groups of experts lack them; of these models only DeepSeek-V3's 61 layers of
    256 experts have any.
    """
    scaling = read.rope_scaling()
    read.must_equal("rope.scaling.attn_factor", 1)  # llama.cpp multiplies the scores of attention by it too
    mscale = round(10 * read.number("rope.scaling.yarn_log_multiplier", 0.0), 6)  # nothing without YaRN
    if scaling is not None:
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    config = {**read.sizes(), **read.noaux(gating)}
    if read.count("expert_group_count", None) is None and (read.layers, config["num_experts"]) == (61, 256):
        config |= {"n_group": 8, "topk_group": 4}
    return config | {**gguf_latent(read), "rope_theta": read.theta(), "rope_scaling": scaling}


def _gguf_sparse(read: Metadata) -> JsonDict:
    """As DeepSeek-V3's, with indexers."""
    return gguf_config(read) | gguf_indexer(read)


LATENT_NAMES = (
    *(("attn_q_a.", "self_attn.q_a_proj."), ("attn_q_a_norm.", "self_attn.q_a_layernorm.")),
    *(("attn_q_b.", "self_attn.q_b_proj."), ("attn_kv_a_mqa.", "self_attn.kv_a_proj_with_mqa.")),
    *(("attn_kv_a_norm.", "self_attn.kv_a_layernorm."), ("attn_kv_b.", "self_attn.kv_b_proj.")),
    *(("attn_k_b.", "self_attn.embed_q."), ("attn_v_b.", "self_attn.unembed_out.")),
)
INDEXER_NAMES = (
    *(("indexer.attn_q_b.", "self_attn.indexer.wq_b."), ("indexer.attn_k.", "self_attn.indexer.wk.")),
    *(("indexer.k_norm.", "self_attn.indexer.k_norm."), ("indexer.proj.", "self_attn.indexer.weights_proj.")),
)
GGUF_NAMES = (*LATENT_NAMES, *INDEXER_NAMES, *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
OF_LATENT_HEAD = dict.fromkeys(
    ("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    "they describe the latent head, whose sizes other keys have",
)
GGUF = {
    "deepseek2": GgufFamily(
        ("deepseek_v3", "kimi_k2", "glm4_moe_lite"), gguf_config, GGUF_NAMES, unread=OF_LATENT_HEAD
    ),
    "deepseek32": GgufFamily(("deepseek_v32",), _gguf_sparse, GGUF_NAMES, unread=OF_LATENT_HEAD),
    "glm-dsa": GgufFamily(("glm_moe_dsa",), _gguf_sparse, GGUF_NAMES, unread=OF_LATENT_HEAD),
}
