"""JetBrains' Mellum 2: Qwen3's layers, with a window in most of them and a rotation for each kind."""

from dataclasses import replace

from ..files import JsonDict
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    of_kind,
)
from .gguf import ATTENTION, EXPERTS, NORM, GgufFamily, Metadata

# Of transformers' class, where the file leaves a field out.
ROPE = {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}


def _mellum(read: Fields) -> JsonDict:
    read = read.with_usual({"rope_parameters": ROPE, "head_dim": 128, "first_k_dense_replace": 0})
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING)) or [FULL] * layer_count(read)
    parts = {kind: grouped_query(of_kind(read, kind)) for kind in dict.fromkeys(kinds)}
    if SLIDING in parts:
        parts[SLIDING] = replace(parts[SLIDING], window=read.count("sliding_window", 1024))
    moe = experts(read, normalise=read.optional("norm_topk_prob", bool, True))
    mixers = [parts[kind] for kind in kinds]
    return {**common(read, windows=SLIDING in parts), "layers": layers(read, mixers, moe, after_dense_layers(read))}


FAMILIES = {"mellum": Family(_mellum)}


def _gguf(read: Metadata) -> JsonDict:
    """Layers with a window rotate by a base of their own, and YaRN scales the others. llama.cpp always normalises the
    routing weights of this architecture, as the published model does."""
    attention = read.attention()
    theta, scaling = attention.pop("rope_theta"), attention.pop("rope_scaling")
    return {
        **read.sizes(),
        **attention,
        **read.experts(),
        "layer_types": [SLIDING if slides else FULL for slides in read.windows(4)],
        "sliding_window": read.count("attention.sliding_window"),
        "rope_parameters": {
            FULL: {"rope_theta": theta, **(scaling or {})},
            SLIDING: {"rope_theta": read.number("rope.freq_base_swa", theta)},
        },
    }


GGUF = {"mellum": GgufFamily(("mellum",), _gguf, (*ATTENTION, *NORM, *EXPERTS))}
