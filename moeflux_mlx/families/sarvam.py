"""Sarvam 30B and 105B: DeepSeek-V3's experts, with grouped attention or with latent attention."""

from ..files import JsonDict
from ..kinds import Mixer
from .bailing import RENAMES as OF_LING
from .deepseek import RENAMES as OF_DEEPSEEK
from .deepseek import latent_attention
from .fields import (
    Family,
    Fields,
    after_dense_layers,
    common,
    grouped_query,
    layer_count,
    layers,
    noaux_experts,
)
from .fused_rows import joined_attention
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, GgufFamily, Metadata

# Of transformers' classes, where the published files leave a field out. Groups are disputed: the code beside the
# published 105B has 16 of them and keeps 2. Transformers 5.24, SGLang and NVIDIA's code that trains it have none.
USUAL = {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}


def _sarvam_moe(read: Fields) -> JsonDict:
    read = read.with_usual({**USUAL, "rope_theta": 8e6})
    read.must_have(use_qk_norm=True, use_bias=False, use_qkv_bias=False)
    return _of_mixer(read, grouped_query(read))


def _sarvam_mla(read: Fields) -> JsonDict:
    read = read.with_usual({**USUAL, "rope_theta": 1e4})
    scaling = read.config.get("rope_scaling")
    if isinstance(scaling, dict) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        read = Fields({**read.config, "rope_scaling": {**scaling, "type": "yarn", "rope_type": "yarn"}})
    return _of_mixer(read, latent_attention(read))


def _of_mixer(read: Fields, mixer: Mixer) -> JsonDict:
    read.must_have(score_function="sigmoid", moe_router_enable_expert_bias=True)
    parts = layers(read, [mixer] * layer_count(read), noaux_experts(read), after_dense_layers(read))
    return {**common(read), "layers": parts}


RENAMES = (
    *OF_LING,
    *((".self_attn.query_layernorm.", ".self_attn.q_norm."), (".self_attn.key_layernorm.", ".self_attn.k_norm.")),
)
FAMILIES = {
    "sarvam_moe": Family(
        _sarvam_moe,
        renames=RENAMES,
        fused_rows=lambda spec, layer, shards: joined_attention(spec, layer, shards, "query_key_value"),
    ),
    "sarvam_mla": Family(_sarvam_mla, renames=OF_DEEPSEEK),
}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp has the architecture of Ling 2, of whose heads half of the values rotate."""
    return {**read.sizes(), **read.attention(), **read.noaux()}


NAMES = (("attn_qkv.", "self_attn.query_key_value."), *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
GGUF = {"bailingmoe2": GgufFamily(("sarvam_moe",), _gguf, NAMES)}
