"""Qwen2-MoE, Qwen3, Qwen3-Next and Qwen3.5."""

from dataclasses import replace

import numpy as np

from ..files import JsonDict
from ..kinds import LayerSpec, SharedExpert
from ..mixers.delta.spec import Delta
from ..mixers.grouped.spec import GroupedQuery
from .fields import (
    FULL,
    LINEAR,
    NEXT_LAYER,
    Family,
    Fields,
    FusedRows,
    HeadNames,
    SpecValue,
    by_axes,
    common,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    sparse_layers,
)
from .fused_rows import grouped_rows
from .gguf import ATTENTION, EXPERTS, NORM, OTHER_NORM, SHARED_EXPERT, Change, GgufFamily, Metadata
from .gguf_keys import WINDOWLESS


def _qwen2_moe(read: Fields) -> JsonDict:
    bias = read.optional("qkv_bias", bool, True)
    shared = SharedExpert(read.count("shared_expert_intermediate_size"), gated=True)
    moe = experts(read, shared, normalise=read.optional("norm_topk_prob", bool, False))
    mixers = [grouped_query(read, norm=None, bias=bias)] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, sparse_layers(read))}


def _qwen3_moe(read: Fields) -> JsonDict:
    return _of_attention(read, grouped_query(read), read.optional("norm_topk_prob", bool, False))


def _of_attention(read: Fields, attention: GroupedQuery, normalise: bool) -> JsonDict:
    moe, mixers = experts(read, normalise=normalise), [attention] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, moe, sparse_layers(read))}


def _qwen3_vl_moe(read: Fields) -> JsonDict:
    """Its code normalises the routing weights, whatever its config says."""
    read.must_equal("norm_topk_prob", True)
    return _of_attention(read, by_axes(read, grouped_query(read), (24, 20, 20), alternating=True), True)


def _layer_types(read: Fields) -> list[str]:
    types = layer_kinds(read, "layer_types", (FULL, LINEAR))
    if types is not None:
        return types
    interval = read.count("full_attention_interval", 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layer_count(read))]


def _gated_attention(read: Fields) -> GroupedQuery:
    read.must_equal("attn_output_gate", True)
    return grouped_query(read, share=0.25, gate="joined")


def _qwen3_next(read: Fields) -> JsonDict:
    return _hybrid(read, _gated_attention(read), read.optional("norm_topk_prob", bool, True))


def _hybrid(read: Fields, attention: GroupedQuery, normalise: bool) -> JsonDict:
    width = read.count("shared_expert_intermediate_size", least=0)
    moe = experts(read, SharedExpert(width, gated=True) if width else None, normalise=normalise)
    mixers = [attention if kind == FULL else delta(read) for kind in _layer_types(read)]
    return {**common(read), "layers": layers(read, mixers, moe, sparse_layers(read))}


def delta(read: Fields, **switches: SpecValue) -> Delta:
    """Linear attention; `switches`: what the family knows of it besides."""
    return Delta(
        key_heads=read.count("linear_num_key_heads"),
        value_heads=read.count("linear_num_value_heads"),
        key_dim=read.count("linear_key_head_dim"),
        value_dim=read.count("linear_value_head_dim"),
        taps=read.count("linear_conv_kernel_dim", 4, least=2),
        **switches,
    )


def _qwen3_5_moe(read: Fields) -> JsonDict:
    """The family always normalises the routing weights, and its config has no field for it."""
    read.must_equal("norm_topk_prob", True)
    return _hybrid(read, by_axes(read, _gated_attention(read), (11, 11, 10), alternating=True), True)


def _interleaved_rows(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """Qwen3-Next's projections of linear attention, which the model has flat: [q of all heads | k | v], z, b and a.

    Rows are grouped by key head, [q | k | its value heads' v | their z] and [b | a]
    (transformers, `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).
    """
    mixer = spec.mixer
    if not isinstance(mixer, Delta) or shards > 1:
        return {}
    stem = f"model.layers.{layer}.linear_attn.in_proj_"
    heads = mixer.key_heads
    ratio = mixer.value_heads // heads
    values = ratio * mixer.value_dim
    q, k, v, z = grouped_rows(heads, [mixer.key_dim] * 2 + [values] * 2)
    b, a = grouped_rows(heads, [ratio] * 2)
    return {
        f"{stem}qkvz": ((f"{stem}qkv", np.concatenate([q, k, v])), (f"{stem}z", z)),
        f"{stem}ba": ((f"{stem}b", b), (f"{stem}a", a)),
    }


ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm", "enorm", "hnorm")
# It takes hidden states behind the last norm, as in vLLM's `qwen3_next_mtp.py`; more drafts were right so than with
# those before it (raullenchai/Rapid-MLX#3371, kekzl/imp#1800). waybarrios/vllm-mlx#660 has it the other way.
HEAD = HeadNames(
    (
        *(("mtp.layers.0.", "model.layers.0."), ("mtp.norm.", "model.norm."), ("mtp.fc.", "fc.")),
        *(("mtp.pre_fc_norm_embedding.", "enorm."), ("mtp.pre_fc_norm_hidden.", "hnorm.")),
        *NEXT_LAYER.renames,  # of a GGUF
    )
)
FAMILIES = {
    "qwen2_moe": Family(_qwen2_moe),
    "qwen3_moe": Family(_qwen3_moe, head=HEAD),
    "qwen3_vl_moe": Family(_qwen3_vl_moe),
    "qwen3_next": Family(_qwen3_next, ZERO_CENTRED, fused_rows=_interleaved_rows, head=HEAD),
    "qwen3_5_moe": Family(_qwen3_5_moe, ZERO_CENTRED, head=HEAD),
}


def _gguf_qwen2(read: Metadata) -> JsonDict:
    """llama.cpp never normalises the routing weights of this architecture, as no published model does."""
    config = {**read.sizes(), **read.attention(), **read.experts(), "norm_topk_prob": False}
    width = read.count("expert_shared_feed_forward_length", None) or read.count("feed_forward_length")
    bias = "blk.0.attn_q.bias" in read.tensors
    return {**config, "shared_expert_intermediate_size": width, "qkv_bias": bias}


def _gguf_moe(read: Metadata) -> JsonDict:
    """llama.cpp always normalises the routing weights of this architecture, as all published models do."""
    return {"norm_topk_prob": True, **read.sizes(), **read.attention(), **read.experts()}


def _gguf_layers(read: Metadata) -> JsonDict:
    """The kind of each layer, where a list says it."""
    recurrent = read.each_layer("attention.recurrent_layers", bool, [])
    return {"layer_types": [LINEAR if flag else FULL for flag in recurrent]} if recurrent else {}


def _gguf_hybrid(read: Metadata) -> JsonDict:
    """Gated attention, linear attention, and experts with a shared one."""
    value_heads = read.count("ssm.time_step_rank")
    return {
        **read.sizes(),
        **read.attention(),
        **read.experts(),
        "shared_expert_intermediate_size": read.count("expert_shared_feed_forward_length"),
        "partial_rotary_factor": read.share_rotated(),
        "full_attention_interval": read.count("full_attention_interval", 4),
        **_gguf_layers(read),
        "linear_num_key_heads": read.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": read.count("ssm.state_size"),
        "linear_value_head_dim": read.quotient("ssm.inner_size", value_heads),
        "linear_conv_kernel_dim": read.count("ssm.conv_kernel"),
    }


def _plain_change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """llama.cpp leaves out axes of length 1, and stores -exp(A_log). It also adds the 1 to zero-centred norms, which
    the shape of the convolution tells, as in MLX's conversions."""
    if name == "linear_attn.conv1d.weight":
        return Change((*shape, 1))
    if name == "linear_attn.A_log":
        return Change(values=lambda values: np.log(-values))
    return Change((1, *shape)) if name == "mlp.shared_expert_gate.weight" and len(shape) == 1 else None


def tiled_change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """Value heads are stored in another order: those of all first groups, then of all second ones, and so on."""
    plain = _plain_change(config, name, shape)
    if not name.startswith("linear_attn.") or name == "linear_attn.norm.weight":
        return plain
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    is_one = name.endswith((".A_log", ".dt_bias", ".in_proj_a.weight", ".in_proj_b.weight"))
    is_input, is_all = (
        name.endswith(".out_proj.weight"),
        is_one or name.endswith((".in_proj_z.weight", ".out_proj.weight")),
    )
    width = 1 if is_one else config["linear_value_head_dim"]
    first = 0 if is_all else 2 * keys * config["linear_key_head_dim"]
    if shape[-1 if is_input else 0] != first + values * width or keys < 1 or values % keys:
        return plain
    heads = np.arange(values).reshape(-1, keys).T.reshape(-1)  # ours are grouped by key head
    each = (heads[:, None] * width + np.arange(width)).reshape(-1)
    if is_input:
        return Change(columns=each)
    return replace(plain or Change(), rows=np.concatenate([np.arange(first), first + each]))


def gguf_qwen3_5(read: Metadata) -> JsonDict:
    return _turned_by_axes(_gguf_hybrid(read), read.sections((11, 11, 10)))


def _gguf_vl(read: Metadata) -> JsonDict:
    return _turned_by_axes(_gguf_moe(read), read.sections((24, 20, 20)))


def _turned_by_axes(config: JsonDict, sections: list[int]) -> JsonDict:
    rope = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    scaling = config["rope_scaling"] or {"type": "default"}
    return {**config, "rope_parameters": {**rope, "mrope_section": sections, **scaling}}


LINEAR_NAMES = (
    *(("attn_qkv.", "linear_attn.in_proj_qkv."), ("attn_gate.", "linear_attn.in_proj_z.")),
    *(("ssm_in.", "linear_attn.in_proj_qkvz."), ("ssm_ba.", "linear_attn.in_proj_ba.")),
    *(("ssm_alpha.", "linear_attn.in_proj_a."), ("ssm_beta.", "linear_attn.in_proj_b.")),
    *(
        ("ssm_conv1d.", "linear_attn.conv1d."),
        ("ssm_norm.", "linear_attn.norm."),
        ("ssm_out.", "linear_attn.out_proj."),
    ),
    *(("ssm_a", "linear_attn.A_log"), ("ssm_dt.bias", "linear_attn.dt_bias")),
)
OF_IMAGES = {"n_deepstack_layers": "they add values of images, which are not read of a GGUF"}
HYBRID_NAMES = (*ATTENTION, *OTHER_NORM, *EXPERTS, *SHARED_EXPERT, *LINEAR_NAMES)
GGUF = {
    "qwen3moe": GgufFamily(("qwen3_moe",), _gguf_moe, (*ATTENTION, *NORM, *EXPERTS)),
    "qwen3vlmoe": GgufFamily(("qwen3_vl_moe",), _gguf_vl, (*ATTENTION, *NORM, *EXPERTS), unread=OF_IMAGES),
    "qwen3next": GgufFamily(("qwen3_next",), _gguf_hybrid, HYBRID_NAMES, _plain_change),
    "qwen35moe": GgufFamily(("qwen3_5_moe",), gguf_qwen3_5, HYBRID_NAMES, tiled_change),
    "qwen2moe": GgufFamily(
        ("qwen2_moe",), _gguf_qwen2, (*ATTENTION, *NORM, *EXPERTS, *SHARED_EXPERT), _plain_change, WINDOWLESS
    ),
}
