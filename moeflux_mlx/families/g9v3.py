"""G9v3 of AI9Stars: gated attention without norms of queries and keys, and many small experts."""

from ..files import JsonDict
from .deepseek import RENAMES
from .fields import Family, Fields, after_dense_layers, common, grouped_query, layer_count, layers, noaux_experts


def _g9v3(read: Fields) -> JsonDict:
    gate = "joined" if read.optional("use_gated_attention", bool, True) else None
    mixers = [grouped_query(read, norm=None, gate=gate)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


FAMILIES = {"g9v3": Family(_g9v3, renames=RENAMES)}
