"""Ling 3: Kimi's delta rule with full ranks, latent attention with a gate per head, and DeepSeek-V3's experts.

Ling 2.6 has the same `model_type` and another linear attention, which is not implemented.
"""

from dataclasses import replace

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Mixer
from ..mixers.delta.spec import LEAST_FLOOR, ChannelDecay, Delta
from .deepseek import GGUF_NAMES, OF_LATENT_HEAD, gguf_latent, latent_attention
from .deepseek import RENAMES as OF_DEEPSEEK
from .fields import (
    FULL,
    LINEAR,
    Family,
    Fields,
    after_dense_layers,
    as_of_kimi,
    common,
    layer_count,
    layer_kinds,
    layers,
    noaux_experts,
)
from .gguf import Change, GgufFamily, Metadata
from .glm5_next import DELTA_NAMES, delta_change


def _bailing_hybrid(read: Fields) -> JsonDict:
    if read.config.get("kda_safe_gate") is None:
        raise ConfigError("config field 'kda_safe_gate' is missing; of 'bailing_hybrid' only Ling 3 is implemented")
    read = as_of_kimi(read)
    read.must_have(
        kda_safe_gate=True,
        no_kda_lora=True,
        use_bias=False,
        use_qkv_bias=False,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        gated_attention_proj_granularity_type="head_wise",
        moe_shared_expert_intermediate_size=read.count("moe_intermediate_size"),
    )
    for name in ("n_group", "topk_group"):  # readers of such files have different defaults
        read.count(name)
    parts: dict[str, Mixer] = {LINEAR: _delta(read), FULL: replace(latent_attention(read), gate="sigmoid head")}
    every = read.count("layer_group_size", 6)
    kinds = layer_kinds(read, "layer_types", tuple(parts))
    kinds = kinds or [LINEAR if (i + 1) % every else FULL for i in range(layer_count(read))]
    mixers = [parts[kind] for kind in kinds]
    return {**common(read), "layers": layers(read, mixers, noaux_experts(read), after_dense_layers(read))}


def _delta(read: Fields) -> Delta:
    heads, width = read.count("num_attention_heads"), read.count("linear_head_dim|head_dim", 128)
    floor = read.number("kda_lower_bound", -5.0, least=LEAST_FLOOR, most=-1e-6)
    taps = read.count("short_conv_kernel_size", 4, least=2)
    return Delta(heads, heads, width, width, taps, "sigmoid", channel_decay=ChannelDecay(floor, None))


RENAMES = (
    ("^model.word_embeddings.", "model.embed_tokens."),
    *((".attention.", ".self_attn."), (".self_attn.dense.", ".self_attn.o_proj.")),
    *((".self_attn.forget_gate.", ".self_attn."), (".mlp.gate.expert_bias", ".mlp.e_score_correction_bias")),
    *OF_DEEPSEEK,
)
FAMILIES = {"bailing_hybrid": Family(_bailing_hybrid, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """Layers without key heads have the delta rule."""
    read.must_equal("kda.safe_gate", True)
    return {
        **read.sizes(),
        **read.noaux(),
        **gguf_latent(read),
        "kda_safe_gate": True,
        "layer_types": [FULL if count else LINEAR for count in read.heads_or_none()],
        "linear_head_dim": read.count("kda.head_dim"),
        "kda_lower_bound": read.number("kda.gate_lower_bound"),
        "short_conv_kernel_size": read.count("ssm.conv_kernel"),
        "rope_theta": read.theta(),
        "rope_scaling": read.rope_scaling(),
    }


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """As in Kimi Linear, but for the sign of exp(A_log)."""
    change = delta_change(config, name, shape)
    return Change(change.shape, values=np.log) if change and name.endswith(".A_log") else change


NAMES = (
    *(("ssm_f_a.", "self_attn.f_proj."), ("ssm_g_a.", "self_attn.g_proj."), ("attn_gate.", "self_attn.g_proj.")),
    *DELTA_NAMES,
    *GGUF_NAMES,
)
GGUF = {"bailingmoe3": GgufFamily(("bailing_hybrid",), _gguf, NAMES, _change, OF_LATENT_HEAD)}
