"""Arcee's Trinity: rotation only in windows, a gate per value of attention, norms around both parts of a layer."""

from ..files import JsonDict
from ..kinds import Residual
from .fields import (
    Family,
    Fields,
    common,
    experts,
    layer_count,
    layers,
    one_full_in,
    rotating_in_windows,
    shared_expert,
)
from .gguf import ATTENTION, DENSE, EXPERTS, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata


def _afmoe(read: Fields) -> JsonDict:
    read.must_have(score_func="sigmoid", n_group=1, topk_group=1)
    factor, normalise = read.number("route_scale", 1.0, least=1e-6, most=1e6), read.optional("route_norm", bool, True)
    moe = experts(read, shared_expert(read), score="sigmoid", correction_bias=True, normalise=normalise, scale=factor)
    count, every = layer_count(read), read.count("global_attn_every_n_layers", 4)
    mixers = rotating_in_windows(read, one_full_in(every, count), gate="sigmoid")
    sparse = range(read.count("num_dense_layers", 1, least=0, most=count), count)
    return {
        **common(read, eps=1e-5),
        "embedding_scale": read.count("hidden_size") ** 0.5 if read.optional("mup_enabled", bool, False) else 1.0,
        "layers": layers(read, mixers, moe, sparse, Residual(output_norms=True)),
    }


RENAMES = (
    *((".self_attn.gate_proj.", ".self_attn.g_proj."), (".mlp.shared_experts.", ".mlp.shared_expert.")),
    (".post_attention_layernorm.", ".mixer_output.norm."),
    *((".pre_mlp_layernorm.", ".post_attention_layernorm."), (".post_mlp_layernorm.", ".mlp.output.norm.")),
    *((".mlp.router.gate.", ".mlp.gate."), (".mlp.expert_bias", ".mlp.e_score_correction_bias")),
)
FAMILIES = {"afmoe": Family(_afmoe, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp always multiplies embeddings, and every fourth layer sees all positions there, as in all published
    models."""
    read.must_equal("expert_gating_func", SIGMOID)
    read.one_full_in(4)
    return {
        **read.sizes(),
        **read.attention(),
        **read.experts(),
        "intermediate_size": read.count("feed_forward_length"),
        "num_dense_layers": read.count("leading_dense_block_count", 0),
        "num_shared_experts": read.count("expert_shared_count", 0),
        "route_norm": read.flag("expert_weights_norm", True),
        "route_scale": read.weights_scale(),
        "sliding_window": read.count("attention.sliding_window"),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


NAMES = (
    *(("attn_gate.", "self_attn.gate_proj."), ("post_attention_norm.", "post_attention_layernorm.")),
    *(("ffn_norm.", "pre_mlp_layernorm."), ("post_ffw_norm.", "post_mlp_layernorm.")),
)
GGUF = {"afmoe": GgufFamily(("afmoe",), _gguf, (*NAMES, *ATTENTION, *DENSE, *EXPERTS, *SHARED_EXPERT))}
