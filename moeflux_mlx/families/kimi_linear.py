"""Kimi Linear: Kimi's delta rule, whose decays have no bound, and now and then latent attention without positions."""

from typing import Any

from ..kinds import Mixer, Rotation
from ..mixers.delta.spec import ChannelDecay, Delta
from ..mixers.latent.spec import Latent
from .deepseek import RENAMES as OF_DEEPSEEK
from .deepseek import latent_sizes
from .fields import (
    FULL,
    LINEAR,
    Family,
    Fields,
    after_dense_layers,
    as_of_kimi,
    common,
    layer_count,
    layer_kinds,
    layers,
    noaux_experts,
    out_of_range,
)
from .glm5_next import linear_sizes, of_linear_attention
from .minimax import RENAMES as OF_EXPERTS


def _kimi_linear(read: Fields) -> dict[str, Any]:
    read = as_of_kimi(read)
    for name, wanted in (
        *(("mla_use_nope", True), ("mla_use_output_gate", False), ("attention_bias", False)),
        *(("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1), ("use_grouped_topk", True)),
        *(("attn_res_block_size", None), ("routed_expert_hidden_size", None)),  # of Kimi K3
    ):
        read.must_equal(name, wanted)
    parts: dict[str, Mixer] = {LINEAR: _delta(read), FULL: _attention(read)}
    mixers = [parts[kind] for kind in _kinds(read)]
    return {**common(read, eps=1e-5), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


def _kinds(read: Fields) -> list[str]:
    """The kind of each layer; the publisher counts layers from 1."""
    kinds, count = layer_kinds(read, "layer_types", (LINEAR, FULL)), layer_count(read)
    if kinds is not None:
        return kinds
    own = {
        kind: of_linear_attention(read).required(name, list)
        for name, kind in (("kda_layers", LINEAR), ("full_attn_layers", FULL))
    }
    by_layer = {layer: kind for kind, of_kind in own.items() for layer in of_kind if type(layer) is int}
    if sorted(by_layer) != list(range(1, count + 1)):
        raise out_of_range("linear_attn_config", sorted(by_layer), f"each layer from 1 to {count} once")
    return [by_layer[i + 1] for i in range(count)]


def _delta(read: Fields) -> Delta:
    for name, wanted in (("use_full_rank_gate", False), ("gate_lower_bound", None)):  # of Kimi K3
        of_linear_attention(read).must_equal(name, wanted)
    heads, width, taps = linear_sizes(read, heads=32)
    return Delta(heads, heads, width, width, taps, "sigmoid", channel_decay=ChannelDecay(None, width))


def _attention(read: Fields) -> Latent:
    """A part of each key is the same for all heads, but no pair of its values turns."""
    return Latent(**latent_sizes(read), rotation=Rotation(read.count("qk_rope_head_dim"), 1e4, pairs=0))


RENAMES = (
    *((".self_attn.forget_gate.", ".self_attn."), *((f".{one}_conv.conv.", f".{one}_conv1d.") for one in "qkv")),
    *OF_EXPERTS,
    *OF_DEEPSEEK,
)
FAMILIES = {"kimi_linear": Family(_kimi_linear, renames=RENAMES)}
