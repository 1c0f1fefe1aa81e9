"""GLM-4.5 to 4.7, their text parts beside an image encoder, and Solar Open, which has their experts."""

from typing import Any

from .deepseek import RENAMES
from .fields import Family, Fields, after_dense_layers, common, grouped_query, layer_count, layers, noaux_experts


def _glm4_moe(read: Fields) -> dict[str, Any]:
    norm = "head" if read.optional("use_qk_norm", bool, False) else None
    attention = grouped_query(read, share=0.5, norm=norm, bias=read.required("attention_bias", bool))
    moe, mixers = noaux_experts(read), [attention] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, after_dense_layers(read))}


def _solar_open(read: Fields) -> dict[str, Any]:
    read.must_equal("use_qk_norm", False)
    count = layer_count(read)
    attention = grouped_query(read, norm=None, bias=read.optional("attention_bias", bool, False))
    return {**common(read), "layers": layers(read, [attention] * count, noaux_experts(read), range(count))}


FAMILIES = {
    **dict.fromkeys(("glm4_moe", "glm4v_moe"), Family(_glm4_moe, renames=RENAMES)),
    "solar_open": Family(_solar_open, renames=RENAMES),
}
