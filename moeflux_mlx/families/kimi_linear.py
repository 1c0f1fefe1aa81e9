"""Kimi Linear and Kimi K3: Kimi's delta rule, and now and then latent attention without positions.

K3's published text part has the `model_type` of Kimi Linear. Its fields that Kimi Linear leaves out switch on bounded
decays and gates of full rank, a gate per value in attention, experts in a latent with another activation, and sums of
blocks of layers in place of one stream. Draft heads and images are not read.
"""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import Activation, BlockSums, Dense, Experts, LayerSpec, Mixer, Residual, Rotation
from ..mixers.delta.spec import LEAST_FLOOR, ChannelDecay, Delta
from ..mixers.latent.spec import Latent
from .deepseek import GGUF_NAMES, OF_LATENT_HEAD, gguf_latent, latent_sizes
from .deepseek import RENAMES as OF_DEEPSEEK
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
from .gguf import Change, GgufFamily, Metadata
from .glm5_next import DELTA_NAMES, delta_change, gguf_delta, joined_rows, linear_sizes, of_linear_attention
from .minimax import RENAMES as OF_EXPERTS


def _kimi_linear(read: Fields) -> JsonDict:
    read = as_of_kimi(read)
    read.must_have(
        mla_use_nope=True,
        attention_bias=False,
        moe_router_activation_func="sigmoid",
        moe_layer_freq=1,
        use_grouped_topk=True,
    )
    parts: dict[str, Mixer] = {LINEAR: _delta(read), FULL: _attention(read)}
    mixers = [parts[kind] for kind in _kinds(read)]
    made = layers(read, mixers, _experts(read), after_dense_layers(read), _residual(read))
    known = read if read.config.get("hidden_act") != "situ" else Fields({**read.config, "hidden_act": None})
    return {**common(known, eps=1e-5), "layers": tuple(_activated(layer, _activation(read)) for layer in made)}


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
    own, (heads, width, taps) = of_linear_attention(read), linear_sizes(read, heads=32)
    floor = own.number("gate_lower_bound", None, least=LEAST_FLOOR, most=-1e-6)
    decay = ChannelDecay(floor, width, own.optional("use_full_rank_gate", bool, False))
    return Delta(heads, heads, width, width, taps, "sigmoid", channel_decay=decay)


def _attention(read: Fields) -> Latent:
    """A part of each key is the same for all heads, but no pair of its values turns."""
    turned = Rotation(read.count("qk_rope_head_dim"), 1e4, pairs=0)
    has_gate = read.optional("mla_use_output_gate", bool, False)
    return Latent(**latent_sizes(read), rotation=turned, gate="sigmoid" if has_gate else None)


def _experts(read: Fields) -> Experts:
    latent = read.count("routed_expert_hidden_size", None)
    return replace(
        noaux_experts(read),
        latent=latent,
        latent_norm=latent is not None and read.optional("latent_moe_use_norm", bool, False),
    )


def _residual(read: Fields) -> Residual:
    block, count = read.count("attn_res_block_size", None), layer_count(read)
    return Residual(connections=block and BlockSums(min(block, count), count))


def _activation(read: Fields) -> Activation:
    if read.config.get("hidden_act") != "situ":
        return Activation()
    limit, beta = (
        read.number(f"activation_situ_{name}", usual, least=1e-6, most=1e6)
        for name, usual in (("linear_beta", None), ("beta", 1.0))
    )
    return Activation("situ", limit, beta)


def _activated(layer: LayerSpec, activation: Activation) -> LayerSpec:
    """The layer with this activation in all of its MLPs."""
    part = layer.feed_forward
    assert isinstance(part, Dense | Experts)
    if isinstance(part, Experts) and part.shared is not None:
        part = replace(part, shared=replace(part.shared, activation=activation))
    return replace(layer, feed_forward=replace(part, activation=activation))


# Of the weights between sums of blocks, with a dot in one writer's names and an underscore in the other's.
OF_SUMS = tuple(
    (f"{theirs}{start}{part}{end}weight", f"{ours}.{part}_weight")
    for theirs, ours in ((".self_attention_res", ".attn_hc"), (".mlp_res", ".ffn_hc"), (".output_attn_res", ".hc_head"))
    for part in ("norm", "proj")
    for start, end in ("_.", "._")
)
RENAMES = (
    *((".self_attn.forget_gate.", ".self_attn."), *((f".{one}_conv.conv.", f".{one}_conv1d.") for one in "qkv")),
    *((".routed_expert_down_proj.", ".fc1_latent_proj."), (".routed_expert_up_proj.", ".fc2_latent_proj.")),
    (".routed_expert_norm.", ".latent_norm."),
    *OF_SUMS,
    *OF_EXPERTS,
    *OF_DEEPSEEK,
)
FAMILIES = dict.fromkeys(
    ("kimi_linear", "kimi_k3"), Family(_kimi_linear, renames=RENAMES, fused_rows=joined_rows, longer=("A_log",))
)


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp always normalises the routing weights of this architecture, as the published model does. It takes the
    epsilon of all norms for latents too; here it is the publisher's.
    """
    return {
        **read.sizes(),
        **read.noaux(),
        **gguf_latent(read),
        **gguf_delta(read),
        "norm_topk_prob": True,
    }


def _gguf_k3(read: Metadata) -> JsonDict:
    config = _gguf(read)
    return {
        **config,
        "norm_topk_prob": read.flag("expert_weights_norm", False),
        "hidden_act": "situ",
        "activation_situ_beta": read.number("activation.situ_beta"),
        "activation_situ_linear_beta": read.number("activation.situ_linear_beta"),
        "attn_res_block_size": read.count("attn_res.block_size"),
        "linear_attn_config": {**config["linear_attn_config"], "use_full_rank_gate": True},
        "mla_use_output_gate": any(f"blk.{i}.attn_gate.weight" in read.tensors for i in range(read.layers)),
        "routed_expert_hidden_size": read.count("expert_latent_length", None),
        "latent_moe_use_norm": any(f"blk.{i}.ffn_routed_norm.weight" in read.tensors for i in range(read.layers)),
    }


def _k3_change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """As of Kimi's delta rule; weights between sums of blocks have lost an axis of length 1."""
    if name.endswith("_hc.proj_weight") or name == "model.hc_head.proj_weight":
        return Change((1, *shape))
    return delta_change(config, name, shape)


UNREAD = {**OF_LATENT_HEAD, "rope.freq_base": "no values of heads rotate"}
NAMES = (*DELTA_NAMES, *GGUF_NAMES)
OF_K3 = (
    *(("attn_res_score.", "attn_hc.proj_"), ("ffn_res_score.", "ffn_hc.proj_")),
    *(("ssm_g.", "self_attn.g_proj."), ("attn_gate.", "self_attn.g_proj.")),
    *((f"ffn_routed_{theirs}.", f"mlp.fc{i}_latent_proj.") for i, theirs in ((1, "down"), (2, "up"))),
    ("ffn_routed_norm.", "mlp.latent_norm."),
)
GGUF = {
    "kimi-linear": GgufFamily(("kimi_linear",), _gguf, NAMES, delta_change, UNREAD),
    "kimi-k3": GgufFamily(
        ("kimi_k3",), _gguf_k3, (*OF_K3, *NAMES), _k3_change, UNREAD, products=((".proj_weight", ".norm_weight"),)
    ),
}
