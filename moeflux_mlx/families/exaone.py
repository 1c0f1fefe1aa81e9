"""K-EXAONE: layers with a window rotate queries and keys, the others encode no positions; DeepSeek-V3's experts."""

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
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    noaux_experts,
)
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, GgufFamily, Metadata


def _exaone_moe(read: Fields) -> JsonDict:
    turned, window = grouped_query(read), read.count("sliding_window", None)
    parts = {FULL: turned} if window is None else {
        FULL: replace(turned, rotation=None),
        SLIDING: replace(turned, window=window),
    }  # fmt: skip
    kinds = layer_kinds(read, "layer_types", tuple(parts)) or _alternating(read, window)
    mixers = [parts[kind] for kind in kinds]
    sparse = after_dense_layers(read, "is_moe_layer")
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), sparse)}


def _alternating(read: Fields, window: int | None) -> list[str]:
    """One layer in `sliding_window_pattern` sees everything."""
    every = 1 if window is None else read.count("sliding_window_pattern", 4)
    return [SLIDING if (i + 1) % every else FULL for i in range(layer_count(read))]


FAMILIES = {"exaone_moe": Family(_exaone_moe, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    return {
        **read.sizes(),
        **read.attention(),
        **read.noaux(),
        "layer_types": [SLIDING if slides else FULL for slides in read.windows(4)],
        "sliding_window": read.count("attention.sliding_window"),
    }


GGUF = {"exaone-moe": GgufFamily(("exaone_moe",), _gguf, (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))}
