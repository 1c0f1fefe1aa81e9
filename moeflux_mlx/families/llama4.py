"""Llama 4: attention in chunks with rotation or to all positions without, and one expert whose input is scaled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..files import JsonDict
from ..kinds import QueryScale, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from .fields import (
    FULL,
    MOST_LAYERS,
    Family,
    Fields,
    common,
    experts,
    layer_count,
    layer_kinds,
    layers,
    out_of_range,
    rotation,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata

CHUNKED = "chunked_attention"


def _llama4(read: Fields) -> JsonDict:
    read.must_have(attention_bias=False, num_experts_per_tok=1)
    read = Fields({"num_experts_per_tok": 1, **read.config})
    width = "intermediate_size"
    moe = experts(
        read,
        SharedExpert(read.count(width)),
        width,
        score="sigmoid",
        biases_logits=True,
        normalise=False,
    )
    mlp = Fields({**read.config, width: read.count("intermediate_size_mlp", 16384)})
    parts = layers(mlp, _mixers(read), replace(moe, scales_input=True), _moe_layers(read))
    return {**common(read, eps=1e-5), "layers": parts}


def _mixers(read: Fields) -> list[GroupedQuery]:
    stated = Fields({**read.config, "no_rope_layers": read.config.get("no_rope_layers") or None})  # empty: not stated
    turns = layer_kinds(stated, "no_rope_layers", (0, 1)) or _usual_turns(read)
    read = Fields({"attention_chunk_size": 8192, **read.config})  # null: no layer has chunks
    chunk = read.count("attention_chunk_size", None)
    usual = [CHUNKED if turned and chunk else FULL for turned in turns]
    kinds = layer_kinds(read, "layer_types", (CHUNKED, FULL)) or usual
    return [_attention(read, bool(turned), kind) for turned, kind in zip(turns, kinds, strict=True)]


def _usual_turns(read: Fields) -> Sequence[int]:
    every = read.count("no_rope_layer_interval", 4)
    return [int((i + 1) % every != 0) for i in range(layer_count(read))]


def _attention(read: Fields, is_turned: bool, kind: str) -> GroupedQuery:
    heads = read.count("num_attention_heads")
    width = read.count("head_dim", None) or read.count("hidden_size") // heads
    growth = None
    if not is_turned and read.config.get("attn_temperature_tuning", True):  # older files have a number
        scale = read.number("attn_scale", 0.1, least=0.0, most=1e3)
        growth = QueryScale(scale, read.count("floor_scale", 8192), first=1)
    return GroupedQuery(
        heads=heads,
        kv_heads=read.count("num_key_value_heads", heads),
        head_dim=width,
        rotation=rotation(read, width, interleaved=True) if is_turned else None,
        norm="unit" if is_turned and read.optional("use_qk_norm", bool, True) else None,
        window=read.count("attention_chunk_size") if kind == CHUNKED else None,
        chunked=kind == CHUNKED,
        query_scale=growth,
    )


def _moe_layers(read: Fields) -> Sequence[int]:
    """The layers with experts."""
    count, every = layer_count(read), read.count("interleave_moe_layer_step", 1)
    numbers: Sequence[Any] = read.optional("moe_layers", list, range(every - 1, count, every))
    if not all(type(i) is int and 0 <= i < count for i in numbers):
        raise out_of_range("moe_layers", numbers, f"numbers of layers below {count}")
    return numbers


RENAMES = ((".feed_forward.router.", ".mlp.gate."), (".feed_forward.", ".mlp."))
FAMILIES = {"llama4": Family(_llama4, renames=RENAMES)}


WINDOW = 8192  # llama.cpp takes no other one
WITHOUT_NORMS = 128  # Maverick's experts, by which llama.cpp knows that it norms no queries and keys


def _gguf(read: Metadata) -> JsonDict:
    """Sizes of chunks and temperatures have no keys: llama.cpp takes the published ones. A window of 0 says that all
    layers rotate and see everything. Unlike Llama's, queries and keys are stored in the publisher's order."""
    read.one_full_in(4)
    read.must_equal("expert_gating_func", SIGMOID)
    attention, plain = read.attention(), read.count("attention.sliding_window", None) == 0
    if not plain:
        read.must_equal("attention.sliding_window", WINDOW)
    return {
        **read.sizes(),
        **attention,
        **read.choice(),
        "rope_scaling": read.slowed_scaling(attention["head_dim"]),
        "intermediate_size": read.count("expert_feed_forward_length"),
        "intermediate_size_mlp": read.count("feed_forward_length"),
        "interleave_moe_layer_step": read.count("interleave_moe_layer_step"),
        "use_qk_norm": read.count("expert_count") != WITHOUT_NORMS,
        **({"no_rope_layer_interval": MOST_LAYERS + 1, "attention_chunk_size": None} if plain else {}),
    }


GGUF = {"llama4": GgufFamily(("llama4",), _gguf, (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))}
