"""Mistral Small 4: DeepSeek's latent attention, with a temperature of its queries, beside a softmax router."""

from collections.abc import Mapping
from typing import Any

from ..kinds import QueryScale
from .deepseek import RENAMES, latent_attention
from .fields import Family, Fields, after_dense_layers, common, grouped_experts, layer_count, layers


def _mistral4(read: Fields) -> dict[str, Any]:
    mixers = [latent_attention(read, _query_scale(read))] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, grouped_experts(read), after_dense_layers(read))}


def _query_scale(read: Fields) -> QueryScale:
    rope = Fields(read.required("rope_parameters", Mapping))
    beta = rope.number("llama_4_scaling_beta", least=0.0, most=1e3)
    return QueryScale(beta, rope.count("original_max_position_embeddings"))


FAMILIES = {"mistral4": Family(_mistral4, renames=RENAMES)}
