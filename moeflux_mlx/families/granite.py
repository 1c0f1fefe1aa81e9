"""Granite 4 with experts: Mamba-2, now and then attention without positions, and factors of embeddings, scores, parts
of layers and logits."""

import math

import numpy as np

from ..files import JsonDict
from ..kinds import Experts, LayerSpec, Mixer, Residual, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from ..mixers.mamba.spec import Mamba2
from .fields import (
    FULL,
    LINEAR,
    Family,
    Fields,
    FusedRows,
    experts,
    layer_count,
    layer_kinds,
    out_of_range,
    rotation,
    sizes,
)
from .fused_rows import grouped_rows
from .gguf import ATTENTION, EXPERTS, NORM, SHARED_EXPERT, Change, GgufFamily, Metadata, neighbours_apart
from .nemotron import step_limits

KINDS = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}


def _granitemoehybrid(read: Fields) -> JsonDict:
    read.must_have(hidden_act="silu", attention_bias=False, mamba_proj_bias=False, mamba_conv_bias=True)
    moe = experts(read, SharedExpert(read.count("shared_intermediate_size", 1024)), width="intermediate_size")
    parts: dict[str, Mixer] = {LINEAR: _mamba(read), FULL: _attention(read)}
    kinds = layer_kinds(read, "layer_types|layers_block_type", tuple(KINDS)) or [LINEAR] * layer_count(read)
    residual = Residual(scale=_factor(read, "residual_multiplier"))
    return {
        **sizes(read),
        "embedding_scale": _factor(read, "embedding_multiplier"),
        "logit_scale": 1 / _factor(read, "logits_scaling"),
        "is_tied": read.optional("tie_word_embeddings", bool, False),
        "layers": tuple(LayerSpec(parts[KINDS[kind]], moe, residual) for kind in kinds),
    }


def _factor(read: Fields, name: str) -> float:
    factor: float = read.number(name, 1.0, least=1e-6, most=1e6)
    return factor


def _mamba(read: Fields) -> Mamba2:
    heads, width = read.count("mamba_n_heads", 128), read.config.get("mamba_d_head", "auto")
    made = read.count("mamba_expand", 2) * read.count("hidden_size")
    width = made // heads if width == "auto" else read.count("mamba_d_head")
    if heads * width != made:
        raise out_of_range("mamba_d_head", width, f"a width that gives {made} with {heads} heads")
    return Mamba2(
        heads=heads,
        head_dim=width,
        state_dim=read.count("mamba_d_state", 256),
        groups=read.count("mamba_n_groups", 1),
        taps=read.count("mamba_d_conv", 4, least=2),
        **step_limits(read),
    )


def _attention(read: Fields) -> GroupedQuery:
    heads = read.count("num_attention_heads")
    width, positions = read.count("hidden_size") // heads, read.config.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise out_of_range("position_embedding_type", positions, "'rope', 'nope' or null")
    turned = rotation(read, width) if positions == "rope" else None
    scale = _factor(read, "attention_multiplier")
    return GroupedQuery(heads, read.count("num_key_value_heads", heads), width, turned, norm=None, scale=scale)


def _joined_rows(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """Gate and up of the shared expert."""
    part, stem = spec.feed_forward, f"model.layers.{layer}."
    if shards > 1 or not isinstance(part, Experts) or part.shared is None:
        return {}
    rows = grouped_rows(1, [part.shared.width] * 2)
    names = (f"{stem}mlp.shared_expert.{name}_proj" for name in ("gate", "up"))
    return {f"{stem}mlp.shared_expert.gate_up_proj": tuple(zip(names, rows, strict=True))}


RENAMES = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    *((".block_sparse_moe.router.layer.", ".mlp.gate."), (".block_sparse_moe.router.", ".mlp.gate.")),
    *((".block_sparse_moe.", ".mlp."), (".shared_mlp.input_linear.", ".mlp.shared_expert.gate_up_proj.")),
    (".shared_mlp.output_linear.", ".mlp.shared_expert.down_proj."),
)
FAMILIES = {"granitemoehybrid": Family(_granitemoehybrid, renames=RENAMES, fused_rows=_joined_rows)}


def _gguf(read: Metadata) -> JsonDict:
    """A layer has as many key heads as attention has, or none."""
    kv_heads, heads = read.heads_or_none(), read.count("ssm.time_step_rank")
    attention_heads = read.of_layers("attention.head_count", read.layers)
    width = read.count("embedding_length") // max(attention_heads, 1)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        read.must_equal(key, width)
    return {
        **read.sizes(),
        **read.choice(),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "num_attention_heads": attention_heads,
        "num_key_value_heads": max(kv_heads),
        "intermediate_size": read.count("feed_forward_length"),
        "shared_intermediate_size": read.count("expert_shared_feed_forward_length"),
        "embedding_multiplier": read.number("embedding_scale", 1.0),
        "attention_multiplier": read.number("attention.scale"),
        "residual_multiplier": read.number("residual_scale", 1.0),
        "logits_scaling": read.number("logit_scale", 1.0),
        "position_embedding_type": "rope" if read.flag("rope.scaling.finetuned", True) else None,
        "rope_theta": read.theta(),
        "rope_scaling": read.slowed_scaling(width),
        "mamba_n_heads": heads,
        "mamba_d_head": read.quotient("ssm.inner_size", heads),
        "mamba_expand": read.quotient("ssm.inner_size", read.count("embedding_length")),
        "mamba_d_state": read.count("ssm.state_size"),
        "mamba_n_groups": read.count("ssm.group_count"),
        "mamba_d_conv": read.count("ssm.conv_kernel"),
    }


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """llama.cpp orders rows of queries and keys for a rotation, also where nothing rotates; it stores -exp(A_log), and
    has axes of length 1 elsewhere."""
    heads = {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}
    if name in heads:
        return neighbours_apart(config[heads[name]], shape[0])
    if name == "mamba.conv1d.weight":
        return Change((*shape, 1))
    if name in ("mamba.A_log", "mamba.D", "mamba.norm.weight"):
        return Change((math.prod(shape),), values=(lambda values: np.log(-values)) if name.endswith("A_log") else None)
    return None


MAMBA = (
    *(("ssm_in.", "mamba.in_proj."), ("ssm_conv1d.", "mamba.conv1d."), ("ssm_dt.bias", "mamba.dt_bias")),
    *(("ssm_norm.", "mamba.norm."), ("ssm_out.", "mamba.out_proj."), ("ssm_a", "mamba.A_log"), ("ssm_d", "mamba.D")),
)
GGUF = {
    "granitehybrid": GgufFamily(
        ("granitemoehybrid",), _gguf, (*MAMBA, *ATTENTION, *NORM, *EXPERTS, *SHARED_EXPERT), _change
    )
}
