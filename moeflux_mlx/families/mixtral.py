"""Mixtral: plain attention, perhaps in a window, and a softmax over the chosen experts."""

from ..files import JsonDict
from .fields import Family, Fields, common, experts, grouped_query, layer_count, layers
from .gguf import ATTENTION, EXPERTS, NORM, Change, GgufFamily, Metadata, neighbours_apart
from .gguf_keys import WINDOWLESS
from .minimax import RENAMES


def _mixtral(read: Fields) -> JsonDict:
    attention = grouped_query(read, norm=None, window=read.count("sliding_window", None))
    moe, count = experts(read, width="intermediate_size"), layer_count(read)
    return {**common(read, eps=1e-5), "layers": layers(read, [attention] * count, moe, range(count))}


FAMILIES = {"mixtral": Family(_mixtral, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """Of an architecture that dense models have too, which lack the number of experts."""
    config = {**read.sizes(), **read.attention(), **read.choice()}
    read.must_equal("rope.dimension_count", config["head_dim"])
    scaling = read.slowed_scaling(config["head_dim"])
    return {**config, "intermediate_size": read.count("feed_forward_length"), "rope_scaling": scaling}


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    heads = {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}
    return neighbours_apart(config[heads[name]], shape[0]) if name in heads else None


GGUF = {"llama": GgufFamily(("mixtral",), _gguf, (*ATTENTION, *NORM, *EXPERTS), _change, WINDOWLESS)}
