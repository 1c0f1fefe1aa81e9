"""Qwen3, Qwen3-Next and Qwen3.5."""

import reprlib
from typing import Any

from ..errors import ConfigError
from ..kinds import FULL, LINEAR
from .fields import Family, Fields, common, dense_width, head_dim, layer_count, rope, sparse_layers


def _qwen3_moe(read: Fields) -> dict[str, Any]:
    moe_layers = sparse_layers(read)
    return {
        **common(read),
        "head_dim": head_dim(read),
        "norm_topk_prob": read.optional("norm_topk_prob", bool, False),
        "layer_types": (FULL,) * layer_count(read),
        "moe_layers": moe_layers,
        "intermediate_size": dense_width(read, moe_layers),
    }


def _layer_types(read: Fields) -> tuple[str, ...]:
    count = layer_count(read)
    types = read.optional("layer_types", list, None)
    if types is None:
        interval = read.count("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if len(types) != count:
        raise ConfigError(f"config field 'layer_types' has {len(types)} entries for {count} layers")
    unknown = [kind for kind in types if kind not in (FULL, LINEAR)]
    if unknown:
        raise ConfigError(f"config field 'layer_types' has {reprlib.repr(unknown)}; only {FULL!r} and {LINEAR!r}")
    return tuple(types)


def _qwen3_next(read: Fields, norm_topk_prob: bool | None = None) -> dict[str, Any]:
    if norm_topk_prob is None:
        norm_topk_prob = read.optional("norm_topk_prob", bool, True)
    read.must_equal("attn_output_gate", True)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return {
        **_qwen3_moe(read),
        **{name: read.count(name) for name in names},
        "shared_expert_intermediate_size": read.count("shared_expert_intermediate_size", least=0),
        "shared_expert_gate": True,
        "norm_topk_prob": norm_topk_prob,
        "linear_conv_kernel_dim": read.count("linear_conv_kernel_dim", 4, least=2),
        "layer_types": _layer_types(read),
        "attn_output_gate": True,
        "partial_rotary_factor": rope(read).get("partial_rotary_factor", 0.25),
    }


def _qwen3_5_moe(read: Fields) -> dict[str, Any]:
    """The family always normalises the routing weights, and its config has no field for it."""
    read.must_equal("norm_topk_prob", True)
    return _qwen3_next(read, norm_topk_prob=True)


ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
FAMILIES = {
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_next": Family(_qwen3_next, ZERO_CENTRED),
    "qwen3_5_moe": Family(_qwen3_5_moe, ZERO_CENTRED),
}
