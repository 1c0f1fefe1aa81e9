"""MiniMax-M2 to M2.7, and MiniMax-M3."""

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Activation, Dense, HeadBlocks, Indexer, LayerSpec, SharedExpert
from .fields import (
    FULL,
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    scale,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata

SPARSE = "minimax_m3_sparse"


def _minimax_m2(read: Fields) -> JsonDict:
    count = layer_count(read)
    read.must_have(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        shared_intermediate_size=0,
    )
    layer_kinds(read, "attn_type_list", (1,))  # the linear attention of MiniMax-01 is 0
    moe = experts(read, width="intermediate_size", score="sigmoid", correction_bias=True)
    attention = grouped_query(read, share=_turned_share(read), norm="flat")
    return {**common(read), "layers": layers(read, [attention] * count, moe, range(count))}


def _turned_share(read: Fields) -> float:
    """The rotated share of a head; earlier releases of transformers have the number of rotated values."""
    width = read.count("head_dim")
    return read.count("rotary_dim", width, most=width) / width


def _minimax_m3(read: Fields) -> JsonDict:
    """The text part. The publisher nests what the indexer has under `sparse_attention_config`."""
    read.must_have(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_head",
        use_gemma_norm=True,
        swiglu_alpha=1.702,
    )
    activation = Activation("clip then swish", read.number("swiglu_limit", 7.0, least=1e-6, most=1e6))
    shared = SharedExpert(read.count("shared_intermediate_size"), activation=activation)
    moe = replace(
        experts(
            read,
            shared,
            width="intermediate_size",
            score="sigmoid",
            correction_bias=True,
            scale=scale(read, "routed_scaling_factor"),
        ),
        activation=activation,
    )
    dense = Dense(read.count("dense_intermediate_size"), activation)
    share, sparse = _turned_share(read), after_dense_layers(read, "moe_layer_freq")
    plain = grouped_query(read, share=share)
    mixers = {FULL: plain, SPARSE: replace(plain, blocks=_head_blocks(read))}
    kinds = [mixers[kind] for kind in _attention_kinds(read)]
    parts = (LayerSpec(mixer, moe if i in sparse else dense) for i, mixer in enumerate(kinds))
    return {**common(Fields({**read.config, "hidden_act": None})), "layers": tuple(parts)}


def _sparse_fields(read: Fields) -> Fields:
    """The indexer's fields under transformers' names."""
    own = read.optional("sparse_attention_config", Mapping, {})
    names = {"num_index_heads": "n_heads", "index_dim": "head_dim", "block_size": "block_size"}
    names |= {"topk_blocks": "topk_blocks", "local_block": "local_blocks"}
    theirs = {f"index_{ours}": own[f"sparse_{name}"] for name, ours in names.items() if f"sparse_{name}" in own}
    return Fields({**read.config, **own, **theirs})


def _head_blocks(read: Fields) -> HeadBlocks:
    own = _sparse_fields(read)
    own.must_have(index_local_blocks=1, sparse_score_type="max", sparse_init_block=0)
    sparse, without = (own.optional(f"sparse_{name}", list, []) for name in ("attention_freq", "disable_index_value"))
    if any(flag and not is_without for flag, is_without in zip(sparse, without, strict=False)):
        raise ConfigError("config field 'sparse_disable_index_value' asks for values of the indexer, not implemented")
    top = own.count("index_topk_blocks", 16, least=2)
    indexer = Indexer(own.count("index_n_heads", 4), own.count("index_head_dim", 128), top)
    return HeadBlocks(own.count("index_block_size", 128, most=1 << 20), indexer)


def _attention_kinds(read: Fields) -> list[str]:
    kinds = layer_kinds(read, "layer_types", (FULL, SPARSE))
    flags = layer_kinds(_sparse_fields(read), "sparse_attention_freq", (0, 1))
    return kinds or [SPARSE if flag else FULL for flag in flags or [0] * layer_count(read)]


RENAMES = (
    (".block_sparse_moe.", ".mlp."),
    *((f".{theirs}.", f".{ours}_proj.") for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))),
)
M3_RENAMES = (
    *((f".index_{part}.", f".indexer.{part}.") for part in ("q_proj", "k_proj", "q_norm", "k_norm")),
    *((".shared_experts.", ".shared_expert."), (".gate.e_score_correction_bias", ".e_score_correction_bias")),
    *RENAMES,
)
ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
FAMILIES = {
    "minimax_m2": Family(_minimax_m2, renames=RENAMES),
    "minimax_m3_vl": Family(_minimax_m3, ZERO_CENTRED, renames=M3_RENAMES, either_centred=True),
}


def _gguf(read: Metadata) -> JsonDict:
    read.must_equal("expert_gating_func", SIGMOID)
    config = {**read.sizes(), **read.attention(), **read.choice()}
    width, turned = read.count("expert_feed_forward_length"), read.count("rope.dimension_count")
    return {**config, "intermediate_size": width, "rotary_dim": turned}


PUBLISHED_LIMIT = 7.0  # llama.cpp takes no other one; GGUF has no key for it


def _gguf_m3(read: Metadata) -> JsonDict:
    """The layers with experts have indexers."""
    read.must_have(expert_gating_func=SIGMOID, expert_weights_norm=True)
    width, dense = read.count("expert_feed_forward_length"), read.count("leading_dense_block_count", 0)
    flags = [int(layer >= dense) for layer in range(read.layers)]
    has_own = [int(f"blk.{layer}.indexer.k_proj.weight" in read.tensors) for layer in range(read.layers)]
    names = {"num_index_heads": "head_count", "index_dim": "key_length", "topk_blocks": "top_k"}
    names |= {"block_size": "block_size", "local_block": "local_blocks"}
    return {
        **read.sizes(),
        **read.attention(),
        **read.choice(),
        "intermediate_size": width,
        "shared_intermediate_size": width * read.count("expert_shared_count"),
        "dense_intermediate_size": read.count("feed_forward_length"),
        "rotary_dim": read.count("rope.dimension_count"),
        "moe_layer_freq": flags,
        "routed_scaling_factor": read.weights_scale(),
        "swiglu_limit": PUBLISHED_LIMIT,
        "sparse_attention_config": {
            "sparse_attention_freq": has_own,
            **{f"sparse_{ours}": read.count(f"attention.indexer.{theirs}") for ours, theirs in names.items()},
        },
    }


M3_NAMES = (("indexer.", "self_attn.indexer."),)
GGUF = {
    "minimax-m2": GgufFamily(("minimax_m2",), _gguf, (*ATTENTION, *NORM, *EXPERTS, *SHARED_EXPERT)),
    "minimax-m3": GgufFamily(
        ("minimax_m3_vl",), _gguf_m3, (*M3_NAMES, *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
    ),
}
