"""Mixtral: plain attention, perhaps in a window, and a softmax over the chosen experts."""

from typing import Any

from .fields import Family, Fields, common, experts, grouped_query, layer_count, layers
from .minimax import RENAMES


def _mixtral(read: Fields) -> dict[str, Any]:
    attention = grouped_query(read, norm=None, window=read.count("sliding_window", None))
    moe, count = experts(read, width="intermediate_size"), layer_count(read)
    return {**common(read, eps=1e-5), "layers": layers(read, [attention] * count, moe, range(count))}


FAMILIES = {"mixtral": Family(_mixtral, renames=RENAMES)}
