"""dots.llm1: attention with norms of each head, and DeepSeek-V3's experts."""

from dataclasses import replace

from ..files import JsonDict
from .deepseek import RENAMES
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    grouped_experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, GgufFamily, Metadata


def _dots1(read: Fields) -> JsonDict:
    """Its file calls the scores after the choice, "noaux_tc", and conversions "sigmoid", which they are."""
    if read.config.get("scoring_func") != "noaux_tc":
        read.must_equal("scoring_func", "sigmoid")
    read.must_equal("moe_layer_freq", 1)
    read = read.with_usual({"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0})
    seeing_all = grouped_query(read)
    parts = {FULL: seeing_all, SLIDING: replace(seeing_all, window=read.count("sliding_window", None))}
    mixers = [parts[kind] for kind in layer_kinds(read, "layer_types", tuple(parts)) or _kinds(read)]
    moe = grouped_experts(read, score="sigmoid", correction_bias=True)
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


def _kinds(read: Fields) -> list[str]:
    """The first `max_window_layers` see all positions."""
    first = read.count("max_window_layers", 62, least=0)
    return [FULL if i < first else SLIDING for i in range(layer_count(read))]


FAMILIES = {"dots1": Family(_dots1, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp knows no windows in this architecture, as all published models see all positions."""
    return {**read.sizes(), **read.attention(), **read.noaux()}


GGUF = {"dots1": GgufFamily(("dots1",), _gguf, (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))}
