"""GLM-4.5 to 4.7, those that read images, and Solar Open, which has their experts."""

from typing import Any

from ..files import JsonDict
from ..mixers.grouped.spec import GroupedQuery
from .deepseek import RENAMES
from .fields import (
    NEXT_LAYER,
    Family,
    Fields,
    after_dense_layers,
    by_axes,
    common,
    grouped_query,
    layer_count,
    layers,
    noaux_experts,
)
from .gguf import ATTENTION, DENSE, EXPERTS, OTHER_NORM, SHARED_EXPERT, GgufFamily, Metadata


def _glm4_moe(read: Fields) -> JsonDict:
    return _of_attention(read, _attention(read))


def _glm4v_moe(read: Fields) -> JsonDict:
    return _of_attention(read, by_axes(read, _attention(read), (8, 12, 12), alternating=False))


def _attention(read: Fields) -> GroupedQuery:
    norm: Any = "head" if read.optional("use_qk_norm", bool, False) else None
    return grouped_query(read, share=0.5, norm=norm, bias=read.required("attention_bias", bool))


def _of_attention(read: Fields, attention: GroupedQuery) -> JsonDict:
    moe, mixers = noaux_experts(read), [attention] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


def _solar_open(read: Fields) -> JsonDict:
    read.must_equal("use_qk_norm", False)
    count = layer_count(read)
    attention = grouped_query(read, norm=None, bias=read.optional("attention_bias", bool, False))
    return {**common(read), "layers": layers(read, [attention] * count, noaux_experts(read), range(count))}


FAMILIES = {
    "glm4_moe": Family(_glm4_moe, renames=RENAMES, head=NEXT_LAYER),
    "glm4v_moe": Family(_glm4v_moe, renames=RENAMES, head=NEXT_LAYER),
    "solar_open": Family(_solar_open, renames=RENAMES),
}


def _gguf(read: Metadata) -> JsonDict:
    read.sections(())  # of files with an image encoder
    return {
        **read.sizes(),
        **read.attention(),
        **read.noaux(),
        "partial_rotary_factor": read.share_rotated(),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in read.tensors,
        "attention_bias": "blk.0.attn_q.bias" in read.tensors,
    }


GGUF = {
    "glm4moe": GgufFamily(
        ("glm4_moe", "solar_open"), _gguf, (*ATTENTION, *OTHER_NORM, *DENSE, *EXPERTS, *SHARED_EXPERT)
    )
}
