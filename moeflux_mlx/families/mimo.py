"""MiMo-V2-Flash and V2.6: all layers but a few have a window, with sinks and another number of key heads."""

from ..files import JsonDict
from ..mixers.grouped.spec import GroupedQuery
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    layer_count,
    layer_kinds,
    layers,
    of_kind,
    rotation,
)
from .fused_rows import joined_attention
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, GgufFamily, Metadata


def _mimo_v2_flash(read: Fields) -> JsonDict:
    read.must_have(topk_method="noaux_tc", scoring_func="sigmoid", attention_bias=False, n_shared_experts=0)
    moe = experts(
        read,
        score="sigmoid",
        correction_bias=True,
        groups=read.count("n_group", 1),
        kept_groups=read.count("topk_group", 1),
        normalise=read.optional("norm_topk_prob", bool, True),
        scale=read.number("routed_scaling_factor", 1.0, least=1e-6, most=1e6),
    )
    parts = {FULL: _attention(read, is_sliding=False), SLIDING: _attention(read, is_sliding=True)}
    mixers = [parts[kind] for kind in _kinds(read)]
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read, "moe_layer_freq"))}


def _kinds(read: Fields) -> list[str]:
    """The kind of attention of each layer; transformers has a pattern if the Hub's own list is missing."""
    hub = layer_kinds(read, "hybrid_layer_pattern", (0, 1))
    if hub is not None:
        return [SLIDING if one else FULL for one in hub]
    plain = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(layer_count(read))]
    return layer_kinds(read, "layer_types", (FULL, SLIDING)) or plain


def _attention(read: Fields, is_sliding: bool) -> GroupedQuery:
    """The attention of layers with a window, whose fields begin with `swa_` in the Hub's config, or of the others."""
    of = of_kind(read, SLIDING if is_sliding else FULL)
    if is_sliding and of is read and "swa_rope_theta" in read.config:
        of = Fields({**read.config, "rope_theta": read.config["swa_rope_theta"]})
    swa = "swa_{0}|{0}" if is_sliding else "{0}"
    kv_heads, width = read.count("num_key_value_heads"), read.count(swa.format("head_dim"))
    value = read.count(swa.format("v_head_dim"))
    sinks = f"add_{'swa' if is_sliding else 'full'}_attention_sink_bias"
    return GroupedQuery(
        heads=read.count(swa.format("num_attention_heads")),
        kv_heads=read.count("swa_num_key_value_heads", 2 * kv_heads) if is_sliding else kv_heads,
        head_dim=width,
        rotation=rotation(of, width, 0.334),
        norm=None,
        window=_window(read) if is_sliding else None,
        sinks=read.optional(sinks, bool, is_sliding),
        value_dim=None if value == width else value,
        value_scale=read.number("attention_value_scale", 1.0, least=1e-6, most=1e6),
    )


def _window(read: Fields) -> int:
    """`sliding_window_size` earlier positions and the query's own, as transformers has it; mlx-lm sees one fewer."""
    earlier = read.count("sliding_window_size", None)
    return read.count("sliding_window") if earlier is None else earlier + 1


RENAMES = (
    (".self_attn.attention_sink_bias", ".self_attn.sinks"),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
MIMO = Family(_mimo_v2_flash, renames=RENAMES, fused_rows=joined_attention)
FAMILIES = {"mimo_v2_flash": MIMO, "mimo_v2": MIMO}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp always normalises the routing weights of this architecture, as the published models do. Its windows
    have a position less than transformers'."""
    kinds = read.windows(6)
    kv_heads, kv_heads_swa = read.of_each_kind("attention.head_count_kv", kinds)
    sinks = {kinds[i] for i in range(read.layers) if f"blk.{i}.attn_sinks.weight" in read.tensors}
    width, theta = read.count("attention.key_length"), read.theta()
    return {
        **read.sizes(),
        **read.noaux(),
        "norm_topk_prob": True,
        "num_attention_heads": read.of_layers("attention.head_count", read.layers),
        "num_key_value_heads": kv_heads,
        "swa_num_key_value_heads": kv_heads_swa,
        "head_dim": width,
        "v_head_dim": read.count("attention.value_length", width),
        "rope_theta": theta,
        "swa_rope_theta": read.number("rope.freq_base_swa", theta),
        "partial_rotary_factor": read.share_rotated(),
        "hybrid_layer_pattern": list(map(int, kinds)),
        "sliding_window_size": read.count("attention.sliding_window"),
        "attention_value_scale": read.number("attention.value_scale", 1.0) or 1.0,
        "first_k_dense_replace": read.leading_dense(),
        "add_swa_attention_sink_bias": True in sinks,
        "add_full_attention_sink_bias": False in sinks,
        "rope_scaling": read.rope_scaling(),
    }


NAMES = (("attn_sinks.weight", "self_attn.sinks"), ("attn_qkv.", "self_attn.qkv_proj."))
GGUF = {
    "mimo2": GgufFamily(
        ("mimo_v2_flash", "mimo_v2"), _gguf, (*NAMES, *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
    )
}
