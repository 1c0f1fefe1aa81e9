"""Thinking Machines' Inkling: attention without rotations, whose scores have a bias by distance, short convolutions of
keys, values and what is added to the stream, and shared experts that are weighed with the routed ones.

Images, audio and draft layers are not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..files import JsonDict
from ..kinds import (
    Activation,
    BlockSums,
    Experts,
    LayerSpec,
    Messages,
    QueryLog,
    Residual,
    Router,
    SharedExpert,
    ShortConvolution,
)
from ..mixers.grouped.spec import GroupedQuery, RelativeBias
from .fields import (
    Family,
    Fields,
    FusedRows,
    after_dense_layers,
    common,
    experts,
    layer_count,
    layer_kinds,
    layers,
    out_of_range,
    scale,
)
from .fused_rows import grouped_rows

HYBRID, WINDOW = "hybrid", "hybrid_sliding"
# Names of published files, and those that transformers writes.
OF_FILES = {"max_position_embeddings": "model_max_length", "conv_kernel_size": "sconv_kernel_size"}
OF_FILES |= {"sliding_window": "sliding_window_size", "first_k_dense_replace": "dense_mlp_idx"}


def _inkling(read: Fields) -> JsonDict:
    read = read.with_usual({name: read.config.get(theirs) for name, theirs in OF_FILES.items()})
    read.must_have(shared_expert_sink=True, use_embed_norm=True)
    if read.optional("dense_intermediate_size", int, None) is not None:  # then the other width is that of experts
        narrow, dense = read.count("intermediate_size"), read.count("dense_intermediate_size")
        read = Fields({**read.config, "moe_intermediate_size": narrow, "intermediate_size": dense})
    fields = common(read.with_usual({"max_position_embeddings": 131072}))
    branches = ShortConvolution(fields["hidden_size"], read.count("conv_kernel_size", 4, most=64))
    parts = {kind: replace(_attention(read, kind, branches.taps), branches=branches) for kind in (HYBRID, WINDOW)}
    mixers = [parts[kind] for kind in _kinds(read)]
    multiplier = read.number("logits_mup_width_multiplier", 24.0, least=1e-6, most=1e6)
    made = layers(read, mixers, _experts(read), after_dense_layers(read), Residual(convolved=True))
    return {
        **fields,
        "vocab_size": read.count("unpadded_vocab_size", fields["vocab_size"], most=fields["vocab_size"]),
        "layers": tuple(map(_scaled, made)),
        "logit_scale": 1 / multiplier,
        "embedding_norm": "learned",
    }


def _kinds(read: Fields) -> Sequence[str]:
    """Of each layer: by `layer_types`, by the numbers of those with a window, or all but the last of each six."""
    count = layer_count(read)
    own = read.optional("local_layer_ids", list, None)
    if any(type(i) is not int or not 0 <= i < count for i in own or ()):
        raise out_of_range("local_layer_ids", own, f"numbers of layers below {count}")
    usual = [WINDOW if (i in own if own is not None else (i + 1) % 6) else HYBRID for i in range(count)]
    return layer_kinds(read, "layer_types", (HYBRID, WINDOW)) or usual


def _attention(read: Fields, kind: str, taps: int) -> GroupedQuery:
    stem, window = ("swa_", read.count("sliding_window")) if kind == WINDOW else ("", None)
    heads, kv_heads = (read.count(f"{stem}num_{name}_heads") for name in ("attention", "key_value"))
    width, floor = read.count(f"{stem}head_dim"), read.count("log_scaling_n_floor", None)
    growth = QueryLog(read.number("log_scaling_alpha", 0.1, least=0.0, most=1e3), floor) if floor else None
    return GroupedQuery(
        heads,
        kv_heads,
        width,
        None,
        window=window,
        scale=1 / width,
        query_scale=None if window else growth,
        relative=RelativeBias(read.count("d_rel", 16), window or read.count("rel_extent", 1024)),
        convolution=ShortConvolution(2 * kv_heads * width, taps),
    )


OF_CLASS = {  # of transformers, where a file of Inkling 2 leaves a field out
    **{"sliding_window": 1024, "swa_num_attention_heads": 48, "swa_num_key_value_heads": 8, "swa_head_dim": 128},
    **{"log_scaling_n_floor": 128000, "max_position_embeddings": 1048576, "scoring_func": "sigmoid"},
    **{"qk_l2_clip_threshold": 512**0.5, "rel_l2_clip_threshold": 8.0, "n_layers_per_attn_res_block": 6},
    **{"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0, "final_logit_softcapping": 30.0, "route_scale": 8.0},
}


def _inkling2(read: Fields) -> JsonDict:
    """Its attention has no norms: lengths of heads are limited. Layers that see all positions have three inputs."""
    names = {**OF_FILES, "moe_intermediate_size": "intermediate_size"}
    read = read.with_usual({name: read.config.get(theirs) for name, theirs in names.items()}).with_usual(OF_CLASS)
    read.must_equal("scoring_func", "sigmoid")
    fields, taps = common(read), read.count("conv_kernel_size", 4, most=64)
    branches = ShortConvolution(fields["hidden_size"], taps, (taps + 1) ** -0.5)
    parts = {kind: replace(_clipped(read, kind, taps), branches=branches) for kind in (HYBRID, WINDOW)}
    limits = {name: read.number(f"mlp_{name}_softcap", least=1e-3, most=1e6) for name in ("up", "gate")}
    moe = experts(read, score="sigmoid", correction_bias=True, scale=scale(read, "route_scale"))
    moe = replace(moe, activation=Activation("situ", limits["up"], limits["gate"]))
    mixers = [parts[kind] for kind in _kinds(read)]
    sums = BlockSums(read.count("n_layers_per_attn_res_block"), len(mixers), normed=True, eps=1e-6)
    return {
        **fields,
        "vocab_size": read.count("unpadded_vocab_size", 200058, most=fields["vocab_size"]),
        "layers": layers(read, mixers, moe, range(len(mixers)), Residual(connections=sums, convolved=True)),
        "logit_softcap": read.number("final_logit_softcapping", least=1e-3, most=1e6),
        "embedding_norm": "learned",
    }


LOOP = {"core_start": 6, "core_end": 18, "num_passes": 3, "gate_rank": 64}  # of transformers' class
OF_LOOP = {  # the names that it writes
    **{"core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end"},
    **{"num_passes": "loop_num_passes", "gate_rank": "loop_gate_rank"},
}


def _inkling2_loop(read: Fields) -> JsonDict:
    """Inkling 2, of which a token passes some layers several times."""
    fields = _inkling2(read.with_usual({"swa_num_attention_heads": 24, "log_scaling_n_floor": 8192}))
    layers, residual = fields["layers"], fields["layers"][0].residual
    loop = Fields({ours: read.config.get(theirs) for ours, theirs in OF_LOOP.items()}).with_usual(LOOP)
    loop = Fields(read.optional("loop_config", Mapping, {})).with_usual(loop.config)
    passes, block = loop.count("num_passes", most=16), residual.connections.block
    if passes == 1:
        return fields
    first, end = loop.count("core_start", most=len(layers) - 1), loop.count("core_end", most=len(layers))
    if first % block or end % block or first >= end:
        raise out_of_range("loop_config", [first, end], f"core_start below core_end, both multiples of {block}")
    sums = replace(residual.connections, messages=Messages(first, end, loop.count("gate_rank")))
    return {
        **fields,
        "layers": tuple(
            replace(
                layer,
                mixer=replace(layer.mixer, parted=first <= i < end),
                residual=replace(residual, connections=sums),
                passes=passes if first <= i < end else 1,
            )
            for i, layer in enumerate(layers)
        ),
    }


def _clipped(read: Fields, kind: str, taps: int) -> GroupedQuery:
    part = _attention(read, kind, taps)
    assert part.relative is not None and part.convolution is not None
    limits = (read.number(f"{name}_l2_clip_threshold", least=1e-3, most=1e6) for name in ("qk", "rel"))
    clip, of_distances = limits
    is_dynamic = kind == HYBRID
    convolution = replace(part.convolution, factor=(taps * (1 + is_dynamic) + 1) ** -0.5, dynamic=is_dynamic)
    return replace(
        part,
        norm="clip",
        clip=clip,
        scale=None,
        gate="sigmoid",
        token_sinks=True,
        value_norm=True,
        relative=replace(part.relative, clip=of_distances),
        convolution=convolution,
        inputs=3 if is_dynamic else 1,
    )


def _experts(read: Fields) -> Experts:
    width, shared = read.count("moe_intermediate_size"), read.count("n_shared_experts", most=64)
    counts = read.count("n_routed_experts"), read.count("num_experts_per_tok")
    factor = scale(read.with_usual({"route_scale": 8.0}), "route_scale")
    rule = Router(*counts, "sigmoid", True, scale=factor, shared=shared, learned_scale=True)
    return Experts(rule, width, SharedExpert(width * shared))


def _scaled(layer: LayerSpec) -> LayerSpec:
    """The layer, whose MLP has a learned factor if it has no experts."""
    part = layer.feed_forward
    return (
        layer if isinstance(part, Experts) or part is None else replace(layer, feed_forward=replace(part, scaled=True))
    )


def _fused(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """Rows of gate and up that alternate, and what mlx-vlm makes of the matrices that read the input of attention."""
    mixer, part, stem = spec.mixer, spec.feed_forward, f"model.layers.{layer}."
    mlp = part.shared if isinstance(part, Experts) else part
    if shards > 1 or not isinstance(mixer, GroupedQuery) or mixer.relative is None or mlp is None:
        return {}
    shared = "shared_expert." if isinstance(part, Experts) else ""
    widths = [mixer.heads * mixer.head_dim, *[mixer.kv_heads * mixer.head_dim] * 2, mixer.heads * mixer.relative.width]
    pairs, attention = f"{stem}mlp.{shared}", f"{stem}self_attn."
    return {
        f"{pairs}gate_up_proj": _named(pairs, ("gate", "up"), grouped_rows(mlp.width, (1, 1))),
        f"{attention}qkvr_proj": _named(attention, "qkvr", grouped_rows(1, widths)),
    }


def _named(stem: str, names: Sequence[str], parts: Sequence[np.ndarray]) -> tuple[tuple[str, np.ndarray], ...]:
    """The rows of each part, by its module path."""
    return tuple((f"{stem}{name}_proj", rows) for name, rows in zip(names, parts, strict=True))


MATRICES = {"wq_du": "q", "wk_dv": "k", "wv_dv": "v", "wr_du": "r", "wo_ud": "o"}
RENAMES = (
    *(("^model.llm.embed_norm.", "model.embed_tokens.norm."), ("^model.llm.embed.", "model.embed_tokens.")),
    *(("^model.llm.unembed.", "lm_head."), ("^model.llm.", "model.")),
    ("^model.embed_norm.", "model.embed_tokens.norm."),
    *((".attn.", ".self_attn."), (".rel_logits_proj.proj$", ".rel_proj"), ("sconv.conv.", "sconv.")),
    *((f".{theirs}.", f".{ours}_proj.") for theirs, ours in MATRICES.items()),
    *((".attn_norm.", ".input_layernorm."), (".mlp_norm.", ".post_attention_layernorm.")),
    *((f".mlp.{owner}global_scale$", ".mlp.output_scale") for owner in ("gate.", "")),
    (".gate_weight$", ".gate.weight"),
    *((".mlp.gate.bias$", ".mlp.e_score_correction_bias"), (".w13_dn.", ".gate_up_proj."), (".w2_md.", ".down_proj.")),
    *((".shared_experts.", ".shared_expert."), (".shared_w13_weight", ".gate_up_proj.weight")),
    *((".shared_w2_weight", ".down_proj.weight"), (".experts.w13_weight", ".experts.gate_up_proj")),
    *((".experts.w2_weight", ".experts.down_proj"), ("_proj.scale2$", "_proj.weight_scale_2")),
)
INKLING = Family(
    _inkling,
    renames=RENAMES,
    fused_rows=_fused,
    grouped=(".shared_expert.gate_up_proj",),
    longer=("model.embed_tokens.weight", "lm_head.weight"),
    interleaved_experts=True,
)
RENAMES2 = (
    *((".attn.q_l2_clip.scale$", ".self_attn.q_norm.weight"), (".attn.rel_l2_clip.scale$", ".self_attn.r_norm.weight")),
    *((".attn.gate_attn.", ".self_attn.g_proj."), (".attn.attn_sink_proj.", ".self_attn.sink_proj.")),
    *((f".{name}_input_norm.", f".self_attn.{name}_input_norm.") for name in "qkv"),
    ("sconv.weight_proj$", "sconv.weight_proj.weight"),
    *RENAMES,
)


def _numbered(layers: Sequence[LayerSpec]) -> list[tuple[str, str]]:
    """Queries of attention begin at the second layer."""
    names = [(f"attn_res.attn_queries.{i}$", f"layers.{i + 1}.attn_hc.query") for i in range(len(layers) - 1)]
    names += [(f"attn_res.mlp_queries.{i}$", f"layers.{i}.ffn_hc.query") for i in range(len(layers))]
    return [*names, ("attn_res.output_query$", "hc_head.query")]


INKLING2 = Family(_inkling2, renames=RENAMES2, numbered=_numbered, interleaved_experts=True, longer=INKLING.longer)
LOOPED = (
    (".controllers.attn.", ".controllers.q."),
    *((f".{name}_weight$", f".{name}_proj.weight") for name in ("down", "forget", "gain")),
    *(
        (f".experts.{theirs}_weight_{end}$", f".experts.{ours}_proj.weight_{end}")
        for theirs, ours in (("w13", "gate_up"), ("w2", "down"))
        for end in ("amax", "outer_scale_denominator")
    ),
    ("middle_cycle_cross_pass_queries$", "messages.query"),
    ("middle_cycle_cross_pass_kv_queries$", "messages.kv_query"),
)
FAMILIES = {
    **dict.fromkeys(("inkling", "inkling_mm_model"), INKLING),  # the second is of the container
    "inkling2": INKLING2,
    "inkling2_loop": replace(INKLING2, read=_inkling2_loop, renames=(*LOOPED, *RENAMES2)),
}
