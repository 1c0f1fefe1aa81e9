"""Qwen3, Qwen3-Next and Qwen3.5."""

from typing import Any

import numpy as np

from ..kinds import Delta, Mixer, SharedExpert
from .fields import (
    Family,
    Fields,
    FusedRows,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    sparse_layers,
)

FULL, LINEAR = "full_attention", "linear_attention"


def _qwen3_moe(read: Fields, normalise: bool | None = None) -> dict[str, Any]:
    if normalise is None:
        normalise = read.optional("norm_topk_prob", bool, False)
    moe = experts(read, normalise=normalise)
    mixers = [grouped_query(read)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, sparse_layers(read))}


def _qwen3_vl_moe(read: Fields) -> dict[str, Any]:
    """The text part. Its code normalises the routing weights, whatever its config says."""
    read.must_equal("norm_topk_prob", True)
    return _qwen3_moe(read, normalise=True)


def _layer_types(read: Fields) -> list[str]:
    types = layer_kinds(read, "layer_types", (FULL, LINEAR))
    if types is not None:
        return types
    interval = read.count("full_attention_interval", 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layer_count(read))]


def _qwen3_next(read: Fields, normalise: bool | None = None) -> dict[str, Any]:
    if normalise is None:
        normalise = read.optional("norm_topk_prob", bool, True)
    read.must_equal("attn_output_gate", True)
    delta = Delta(
        key_heads=read.count("linear_num_key_heads"),
        value_heads=read.count("linear_num_value_heads"),
        key_dim=read.count("linear_key_head_dim"),
        value_dim=read.count("linear_value_head_dim"),
        taps=read.count("linear_conv_kernel_dim", 4, least=2),
    )
    attention = grouped_query(read, share=0.25, gate="joined")
    width = read.count("shared_expert_intermediate_size", least=0)
    moe = experts(read, SharedExpert(width, gated=True) if width else None, normalise=normalise)
    mixers = [attention if kind == FULL else delta for kind in _layer_types(read)]
    return {**common(read), "layers": layers(read, mixers, moe, sparse_layers(read))}


def _qwen3_5_moe(read: Fields) -> dict[str, Any]:
    """The family always normalises the routing weights, and its config has no field for it."""
    read.must_equal("norm_topk_prob", True)
    return _qwen3_next(read, normalise=True)


def _interleaved_rows(mixer: Mixer, layer: int) -> FusedRows:
    """Qwen3-Next's projections of linear attention, which the model has flat: [q of all heads | k | v], z, b and a.

    Rows are grouped by key head, [q | k | its value heads' v | their z] and [b | a]
    (transformers, `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).
    """
    if not isinstance(mixer, Delta):
        return {}
    stem = f"model.layers.{layer}.linear_attn.in_proj_"
    heads = mixer.key_heads
    ratio = mixer.value_heads // heads
    values = ratio * mixer.value_dim
    q, k, v, z = _group(heads, [mixer.key_dim] * 2 + [values] * 2)
    b, a = _group(heads, [ratio] * 2)
    return {
        f"{stem}qkvz": ((f"{stem}qkv", np.concatenate([q, k, v])), (f"{stem}z", z)),
        f"{stem}ba": ((f"{stem}b", b), (f"{stem}a", a)),
    }


def _group(heads: int, widths: list[int]) -> list[np.ndarray]:
    """Row numbers of each part, all heads after one another."""
    rows = np.arange(heads * sum(widths)).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
FAMILIES = {
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_vl_moe": Family(_qwen3_vl_moe),
    "qwen3_next": Family(_qwen3_next, ZERO_CENTRED, fused_rows=_interleaved_rows),
    "qwen3_5_moe": Family(_qwen3_5_moe, ZERO_CENTRED),
}
