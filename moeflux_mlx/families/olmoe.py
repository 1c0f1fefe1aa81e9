"""OLMoE: norms over all heads of queries and keys, and a softmax whose weights do not sum to one."""

from typing import Any

from .fields import Family, Fields, common, experts, grouped_query, layer_count, layers


def _olmoe(read: Fields) -> dict[str, Any]:
    read.must_equal("clip_qkv", None)
    moe = experts(read, width="intermediate_size", normalise=read.optional("norm_topk_prob", bool, False))
    mixers = [grouped_query(read, norm="flat")] * layer_count(read)
    return {**common(read, eps=1e-5), "layers": layers(read, mixers, moe, range(len(mixers)))}


FAMILIES = {"olmoe": Family(_olmoe)}
