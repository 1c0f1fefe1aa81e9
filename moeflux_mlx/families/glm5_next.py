"""GLM-5.3-Flash (`glm5_next`): Kimi's delta rule, and latent attention without rotations over blocks of positions that
an indexer chooses, between DeepSeek-V4's streams."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Activation, Dense, Experts, HyperConnections, Indexer, KeyBlocks, LayerSpec, Mixer, Residual
from ..mixers.delta.spec import LEAST_FLOOR, ChannelDecay, Delta
from ..mixers.latent.spec import Latent
from .deepseek import FULL, GGUF_NAMES, OF_LATENT_HEAD, gguf_indexer, gguf_latent, latent_sizes
from .deepseek import RENAMES as OF_DEEPSEEK
from .fields import (
    LINEAR,
    NEXT_LAYER,
    Family,
    Fields,
    FusedRows,
    after_dense_layers,
    common,
    layer_count,
    layer_kinds,
    noaux_experts,
)
from .fused_rows import grouped_rows
from .gguf import STREAMS, Change, GgufFamily, Metadata

SPARSE = ("deepseek_sparse_attention", "indexed_attention", "full_attention")  # the publisher's and transformers' words


def _glm5_next(read: Fields) -> JsonDict:
    read.must_have(
        attention_bias=False,
        mhc=True,
        mla_use_nope=True,
        qk_rope_head_dim=0,
        index_kpool_compress=True,
        index_kpool_always_select_tail=True,
        index_topk_freq=1,
        index_topk_pattern=None,
        moe_router_dtype="float32",
    )
    heads = read.count("num_attention_heads")
    if read.count("num_key_value_heads", heads) != heads:
        raise ConfigError(f"num_key_value_heads is not num_attention_heads {heads}, which is not implemented")
    layer_kinds(read, "indexer_types", (FULL,))
    streams = HyperConnections(
        streams=read.count("hc_mult", 4, least=2, most=64),
        iterations=read.count("hc_sinkhorn_iters", 20, most=1000),
        eps=read.number("hc_eps", 1e-6, least=1e-30, most=1.0),
        mean=True,
    )
    fields = common(read)
    mixers: dict[str, Mixer] = {LINEAR: _delta(read), **dict.fromkeys(SPARSE, _attention(read, fields["rms_norm_eps"]))}
    dense, experts = _feed_forward(read)
    sparse = frozenset(_sparse_layers(read))
    layers = (
        LayerSpec(mixers[kind], experts if i in sparse else dense, Residual(connections=streams))
        for i, kind in enumerate(_layer_types(read))
    )
    return {**fields, "layers": tuple(layers)}


def _layer_types(read: Fields) -> list[str]:
    kinds = layer_kinds(read, "layer_types", (LINEAR, *SPARSE))
    return kinds or [SPARSE[0] if i % 4 == 3 else LINEAR for i in range(layer_count(read))]


def _sparse_layers(read: Fields) -> Any:
    """The layers with experts."""
    count = layer_count(read)
    return after_dense_layers(Fields({"first_k_dense_replace": min(3, count), **read.config}))


def of_linear_attention(read: Fields) -> Fields:
    """The publisher's fields of the delta rule."""
    return Fields(read.optional("linear_attn_config", Mapping, {}))


def linear_sizes(read: Fields, heads: int) -> tuple[int, int, int]:
    """The delta rule's number of heads (`heads` if no field has it), their width, and its taps, from the publisher's
    fields or those of transformers."""
    own = of_linear_attention(read)
    return (
        own.count("num_heads", None) or read.count("linear_num_heads", heads),
        own.count("head_dim", None) or read.count("linear_head_dim", 128),
        own.count("short_conv_kernel_size", None, least=2) or read.count("linear_conv_kernel_dim", 4, least=2),
    )


def _delta(read: Fields) -> Delta:
    own, (heads, width, taps) = of_linear_attention(read), linear_sizes(read, heads=64)
    least = {"least": LEAST_FLOOR, "most": -1e-6}
    floor = own.number("gate_lower_bound", None, **least) or read.number("linear_lower_bound", -5.0, **least)
    own.must_equal("safe_gate", True)
    return Delta(heads, heads, width, width, taps, "sigmoid", channel_decay=ChannelDecay(floor, width))


def _attention(read: Fields, eps: float) -> Latent:
    ratio, positions = read.count("index_kpool", 16), read.count("index_topk")
    if positions % ratio:
        raise ConfigError(f"index_topk {positions} is not a multiple of index_kpool {ratio}")
    indexer = Indexer(read.count("index_n_heads"), read.count("index_head_dim"), positions // ratio)
    sizes = latent_sizes(read) | {"q_latent": read.count("q_lora_rank")}  # the indexer reads this latent
    return Latent(**sizes, rotation=None, blocks=KeyBlocks(ratio, indexer, weighed=True), norm_eps=eps)


def _feed_forward(read: Fields) -> tuple[Dense, Experts]:
    """The feed-forward parts of the first layers and of the others."""
    activation = Activation("clip then silu", read.number("swiglu_limit", 10.0, least=1e-6, most=1e6))
    moe = noaux_experts(read)
    shared = moe.shared and replace(moe.shared, activation=activation)
    dense = Dense(read.count("intermediate_size"), activation)
    return dense, replace(moe, shared=shared, activation=activation)


def joined_rows(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """Matrices that mlx-vlm stores as one (0.7.10, `glm5_next/language.py`)."""
    if shards > 1:
        return {}
    stem, mixer = f"model.layers.{layer}.", spec.mixer
    joined: dict[str, dict[str, int]] = {}
    rank = mixer.channel_decay.rank if isinstance(mixer, Delta) and mixer.channel_decay else None
    if isinstance(mixer, Delta) and rank is not None:
        keys, values = mixer.key_width, mixer.value_width
        joined["self_attn.qkv_proj"] = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        joined["self_attn.qkv_conv.conv"] = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        joined["self_attn.fbg_a_proj"] = {"f_a_proj": rank, "b_proj": mixer.value_heads, "g_a_proj": rank}
    if isinstance(mixer, Latent) and mixer.q_latent is not None:
        joined["self_attn.qkv_a_proj"] = {"q_a_proj": mixer.q_latent, "kv_a_proj_with_mqa": mixer.latent}
    part = spec.feed_forward
    if isinstance(part, Dense):
        joined["mlp.gate_up_proj"] = {"gate_proj": part.width, "up_proj": part.width}
    elif part is not None and part.shared is not None:
        joined["mlp.shared_expert.gate_up_proj"] = {"gate_proj": part.shared.width, "up_proj": part.shared.width}
    return {f"{stem}{path}": _parts(f"{stem}{path}", widths) for path, widths in joined.items()}


def _parts(path: str, widths: Mapping[str, int]) -> tuple[tuple[str, np.ndarray], ...]:
    """The paths of a joined matrix's consecutive parts, and their rows."""
    parent = path.rpartition(".qkv_conv")[0] or path.rpartition(".")[0]
    rows = grouped_rows(1, list(widths.values()))
    return tuple((f"{parent}.{name}", own) for name, own in zip(widths, rows, strict=True))


RENAMES = (
    *((".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."), (".self_attn.forget_gate.", ".self_attn.")),
    *((".indexer.index_kpool_compress_ape", ".indexer.ape"),),
    *((".indexer.index_kpool_compress_gate", ".indexer.wgate.weight"),),
    *OF_DEEPSEEK,
)
FAMILIES = {"glm5_next": Family(_glm5_next, renames=RENAMES, fused_rows=joined_rows, head=NEXT_LAYER)}


def gguf_delta(read: Metadata) -> JsonDict:
    """Which layers have the delta rule, those without key heads, and the fields of Kimi's; nothing rotates."""
    read.must_be_unscaled()
    kinds = read.heads_or_none()
    return {
        "layer_types": [SPARSE[-1] if count else LINEAR for count in kinds],
        "linear_attn_config": {
            "num_heads": read.count("attention.head_count"),
            "head_dim": read.count("kda.head_dim"),
            "short_conv_kernel_size": read.count("ssm.conv_kernel"),
            "gate_lower_bound": read.number("kda.gate_lower_bound", None),
        },
    }


def _gguf(read: Metadata) -> JsonDict:
    read.must_equal("attention.layer_norm_epsilon", 1e-6)
    read.must_equal("attention.indexer.kpool_select_tail", True)
    if not all(read.each_layer("attention.indexer.types", bool, [])):
        raise ConfigError("attention.indexer.types has layers that share an indexer, which no layer here does")
    return {
        **read.sizes(),
        **read.noaux(),
        **gguf_latent(read),
        **gguf_indexer(read),
        **gguf_delta(read),
        "index_kpool": read.count("attention.indexer.kpool"),
        "indexer_types": None,
        "swiglu_limit": read.limit("swiglu_clamp_exp", "swiglu_clamp_shexp"),
        "hc_mult": read.count("hyper_connection.count"),
        "hc_sinkhorn_iters": read.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": read.number("hyper_connection.epsilon"),
    }


def delta_change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """llama.cpp stores -exp(A_log), and weights of convolutions with axes of length 1 around channels and taps."""
    if name.endswith("conv1d.weight"):
        return Change((shape[-3], 1, shape[-1])) if len(shape) == 4 and shape[0] == shape[2] == 1 else None
    return Change((math.prod(shape),), values=lambda values: np.log(-values)) if name.endswith(".A_log") else None


DELTA_NAMES = (
    *((f"ssm_conv1d_{one}.", f"self_attn.{one}_conv1d.") for one in "qkv"),
    *((f"ssm_{part}.", f"self_attn.{part}_proj.") for part in ("f_a", "f_b", "g_a", "g_b")),
    *(("ssm_a", "self_attn.A_log"), ("ssm_dt.bias", "self_attn.dt_bias")),
    *(("ssm_beta.", "self_attn.b_proj."), ("ssm_norm.", "self_attn.o_norm.")),
)
POOL_NAMES = (
    ("indexer_compressor_ape.weight", "self_attn.indexer.ape"),
    ("indexer_compressor_gate.weight", "self_attn.indexer.wgate.weight"),
)
GGUF = {
    "glm5-next": GgufFamily(
        ("glm5_next",), _gguf, (*DELTA_NAMES, *POOL_NAMES, *STREAMS, *GGUF_NAMES), delta_change, OF_LATENT_HEAD
    )
}
