"""Tencent's Hy4: DeepSeek-V3.2's attention with sinks and a gate per value, between streams that are never mixed.

Rotations pair neighbours. So do the publisher's code for vLLM, llama.cpp, and transformers 5.24 in `hy_v4_vl`, the
container in which Hy4 was published; its `hy_v4` pairs halves.
"""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import Activation, IndependentConnections, Indexer, Residual
from .deepseek import (
    FULL,
    GGUF_NAMES,
    OF_LATENT_HEAD,
    SHARED,
    gguf_indexer,
    gguf_latent,
    indexer_types,
    latent_attention,
)
from .deepseek import RENAMES as OF_DEEPSEEK
from .fields import Family, Fields, after_dense_layers, common, layer_count, layers, noaux_experts
from .gguf import STREAMS, GgufFamily, Metadata

# Of transformers' class, where the published file leaves a field out.
USUAL = {"first_k_dense_replace": 1, "rope_theta": 1e4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}


def _hy_v4(read: Fields, index_heads: int = 16, latent_eps: float | None = 1e-6) -> JsonDict:
    """`index_heads`: of an indexer, if the field is missing; `latent_eps`: of the norms of latents, None: that of all
    norms.
    """
    count = layer_count(read)
    kinds = [FULL if i == 0 or i % 4 == 1 else SHARED for i in range(count)]
    read = read.with_usual({**USUAL, "indexer_types": kinds})
    fields = common(read, eps=1e-5)
    indexer = Indexer(
        heads=read.count("index_n_heads", index_heads),
        dim=read.count("index_head_dim", 128),
        top=read.count("index_topk", 2048),
        interleaved=True,
        rotates_last=True,
        norm_eps=fields["rms_norm_eps"],
    )
    eps = latent_eps or fields["rms_norm_eps"]
    mixer = replace(latent_attention(read), gate="sigmoid", sinks=True, norm_eps=eps)
    mixers = [replace(mixer, indexer=replace(indexer, reuses=kind == SHARED)) for kind in indexer_types(read)]
    limit = read.number("swiglu_limit", 10.0, least=-1e6, most=1e6)
    moe = noaux_experts(read)
    moe = replace(moe, activation=Activation("clip then silu", limit)) if limit > 0 else moe
    streams = IndependentConnections(
        streams=read.count("hc_mult", 4, least=2, most=64),
        eps=read.number("hc_eps", 1e-6, least=0.0, most=1.0),
        magnitude=read.number("hc_magnitude", 2.0, least=1e-6, most=1e6),
    )
    return {**fields, "layers": layers(read, mixers, moe, after_dense_layers(read), Residual(connections=streams))}


RENAMES = (
    *((".hc_pre.hc_", ".hc_"), (".hc_attn_layer.hc_", ".attn_hc."), (".hc_mlp_layer.hc_", ".ffn_hc.")),
    *((".hc_head.hc_head_", ".hc_head."), (".hc_head.hc_", ".hc_head.")),
    *((".self_attn.learnable_sink_param", ".self_attn.sinks"), (".self_attn.linear_gate.", ".self_attn.g_proj.")),
    (".self_attn.gate_proj.", ".self_attn.g_proj."),
    *OF_DEEPSEEK,
)
FAMILIES = {
    "hy_v4": Family(_hy_v4, renames=RENAMES),
    "hy_v4_vl": Family(lambda read: _hy_v4(read, index_heads=32, latent_eps=None), renames=RENAMES),
}


def _gguf(read: Metadata) -> JsonDict:
    """As in the container in which Hy4 was published."""
    return {
        **read.sizes(),
        **read.noaux(),
        **gguf_latent(read),
        **gguf_indexer(read),
        "rope_theta": read.theta(),
        "rope_scaling": read.rope_scaling(),
        "swiglu_limit": read.limit("swiglu_clamp_exp") or 0.0,
        "hc_mult": read.count("hyper_connection.count"),
        "hc_eps": read.number("hyper_connection.epsilon"),
        "hc_magnitude": read.number("hyper_connection.magnitude"),
    }


NAMES = (
    *(("attn_sinks.weight", "self_attn.sinks"), ("attn_gate.", "self_attn.g_proj.")),
    *STREAMS,
    *GGUF_NAMES,
)
GGUF = {"hy_v4": GgufFamily(("hy_v4_vl", "hy_v4"), _gguf, NAMES, unread=OF_LATENT_HEAD)}
