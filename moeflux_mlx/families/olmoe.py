"""OLMoE: norms over all heads of queries and keys, and a softmax whose weights do not sum to one."""

from ..files import JsonDict
from .fields import Family, Fields, common, experts, grouped_query, layer_count, layers
from .gguf import ATTENTION, EXPERTS, NORM, GgufFamily, Metadata


def _olmoe(read: Fields) -> JsonDict:
    read.must_equal("clip_qkv", None)
    moe = experts(read, width="intermediate_size", normalise=read.optional("norm_topk_prob", bool, False))
    mixers = [grouped_query(read, norm="flat")] * layer_count(read)
    return {**common(read, eps=1e-5), "layers": layers(read, mixers, moe, range(len(mixers)))}


FAMILIES = {"olmoe": Family(_olmoe)}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp never normalises the routing weights of this architecture, as no published model does."""
    config = {**read.sizes(), **read.attention(), **read.choice(), "norm_topk_prob": False}
    return {**config, "intermediate_size": read.count("feed_forward_length")}


GGUF = {"olmoe": GgufFamily(("olmoe",), _gguf, (*ATTENTION, *NORM, *EXPERTS))}
