"""Gemma 4's text models with experts: norms around every part, a dense MLP beside the experts, two widths of heads.

Models without experts, whose layers have their own inputs and share keys and values, are refused.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Activation, Experts, LayerSpec, Residual, Router, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from .fields import FULL, SLIDING, Family, Fields, layer_count, layer_kinds, rotation, sizes
from .gguf import ATTENTION, DENSE, EXPERTS, GgufFamily, Metadata, share_of

GELU = Activation("gelu")
# Where a config.json has none (transformers, `Gemma4TextConfig`).
QUARTER = 0.25
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": QUARTER, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
# Fields that decide what a model is made of: their defaults in transformers, and the one value that is implemented.
ONLY: dict[str, tuple[Any, Any]] = {
    "enable_moe_block": (False, True),
    "hidden_size_per_layer_input": (256, 0),
    "num_kv_shared_layers": (0, 0),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "attention_bias": (False, False),
}


def _gemma4(read: Fields) -> JsonDict:
    for name, (default, wanted) in ONLY.items():
        value = read.config.get(name)
        Fields({name: default if value is None else value}).must_equal(name, wanted)
    if read.config.get("use_bidirectional_attention") not in (None, "vision"):  # it concerns only images
        raise ConfigError("config field 'use_bidirectional_attention' must be null or 'vision'; text is read causally")
    moe = Experts(
        Router(read.count("num_experts"), read.count("top_k_experts"), own_norm=True, expert_scales=True),
        read.count("moe_intermediate_size"),
        SharedExpert(read.count("intermediate_size"), activation=GELU, normed=True),
        GELU,
    )
    residual, kinds = Residual(output_norms=True, layer_scale=True), _kinds(read)
    mixers = [_attention(_of_layer(read, i, kind), kind) for i, kind in enumerate(kinds)]
    return {
        **sizes(read),
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "is_tied": read.optional("tie_word_embeddings", bool, True),
        "logit_softcap": read.number("final_logit_softcapping", None, least=1e-3, most=1e6),
        "layers": tuple(LayerSpec(mixer, moe, residual) for mixer in mixers),
    }


def _kinds(read: Fields) -> list[str]:
    """The kind of attention of each layer; the last layer always sees everything."""
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING))
    kinds = kinds or [SLIDING if (i + 1) % 6 else FULL for i in range(layer_count(read))]
    return [*kinds[:-1], FULL]


def _of_layer(read: Fields, layer: int, kind: str) -> Fields:
    """The fields as they are for one layer: transformers 5.23 writes what differs by layer, the publisher what differs
    in layers without a window."""
    by_layer = read.optional("per_layer_config", Mapping, None)
    if by_layer is not None:
        own = Fields(by_layer).optional(str(layer), Mapping, {})
        unknown = [name for name in own if name not in ("head_dim", "num_key_value_heads")]
        if unknown:
            raise ConfigError(f"config field 'per_layer_config' has {reprlib.repr(unknown)}, which is not implemented")
        return Fields({**read.config, **own})
    if kind == SLIDING:
        return read
    own = {"head_dim": read.count("global_head_dim", 512)}
    if read.optional("attention_k_eq_v", bool, False):
        own["num_key_value_heads"] = read.count("num_global_key_value_heads", read.count("num_key_value_heads", 4))
    return Fields({**read.config, **own})


def _attention(read: Fields, kind: str) -> GroupedQuery:
    """Keys and values of layers without a window may be one and the same product."""
    width, rope = read.count("head_dim", 256), read.optional("rope_parameters", Mapping, ROPE)
    return GroupedQuery(
        heads=read.count("num_attention_heads"),
        kv_heads=read.count("num_key_value_heads", 4),
        head_dim=width,
        rotation=rotation(Fields({"rope_parameters": rope.get(kind)}), width),
        window=read.count("sliding_window", 512) if kind == SLIDING else None,
        scale=1.0,
        value_is_key=kind == FULL and read.optional("attention_k_eq_v", bool, False),
        value_norm=True,
    )


RENAMES = (
    (".post_attention_layernorm.", ".mixer_output.norm."),
    (".pre_feedforward_layernorm.", ".mlp.shared_input_norm."),
    (".pre_feedforward_layernorm_2.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp.output.norm."),
    (".post_feedforward_layernorm_1.", ".mlp.shared_output_norm."),
    (".post_feedforward_layernorm_2.", ".mlp.routed_output_norm."),
    (".layer_scalar", ".mlp.output.layer_scalar"),
    *((f".mlp.{part}_proj.", f".mlp.shared_expert.{part}_proj.") for part in ("gate", "up", "down")),
    (".experts.switch_glu.", ".mlp.switch_mlp."),  # of mlx-lm
    (".mlp.experts.", ".experts."),  # of GGUF files
    (".experts.", ".mlp.experts."),
    (".router.proj.", ".mlp.gate."),
    (".router.scale", ".mlp.gate_norm.weight"),
    (".router.per_expert_scale", ".mlp.expert_scales"),
)
FAMILIES = {"gemma4": Family(_gemma4, renames=RENAMES)}


STILL = 1e20  # a frequency divided by more rotates nothing


def _turned_share(slowed: Sequence[float], width: int) -> float:
    """The share of a wide head that rotates: of the others llama.cpp stores a large divisor of the frequency.

    Raises:
        ConfigError: some pairs turn more slowly, or others than the first ones rotate.
    """
    turned = sum(divisor == 1 for divisor in slowed)
    if slowed and (len(slowed) != width // 2 or turned != len(slowed) - sum(one > STILL for one in slowed[turned:])):
        raise ConfigError("GGUF tensor rope_freqs.weight is not one of 1 for the first pairs and 1e30 for the others")
    return share_of(2 * turned, width) if slowed else QUARTER


def _gguf(read: Metadata) -> JsonDict:
    """A file without `rope_freqs.weight` is of a published model, of which the first quarter of a wide head rotates."""
    windows, narrow = read.each_layer("attention.sliding_window_pattern", bool), read.count("attention.key_length_swa")
    kinds = [SLIDING if slides else FULL for slides in windows]
    kv_heads, kv_heads_swa = read.of_each_kind("attention.head_count_kv", windows)
    read.must_equal("rope.dimension_count_swa", narrow)
    read.must_equal("attention.value_length_swa", narrow)
    read.must_be_unscaled()
    wide = read.head_width(1)
    read.must_equal("rope.dimension_count", wide)
    theta = read.number("rope.freq_base_swa", 1e4)
    return {
        **read.sizes(),
        "enable_moe_block": True,
        "num_experts": read.count("expert_count"),
        "top_k_experts": read.count("expert_used_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "intermediate_size": read.of_layers("feed_forward_length", read.layers),
        "hidden_size_per_layer_input": read.count("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": read.count("attention.shared_kv_layers", 0),
        "layer_types": kinds,
        "num_attention_heads": read.of_layers("attention.head_count", read.layers),
        "num_key_value_heads": kv_heads_swa,
        "num_global_key_value_heads": kv_heads,
        "head_dim": narrow,
        "global_head_dim": wide,
        "attention_k_eq_v": FULL in kinds and f"blk.{kinds.index(FULL)}.attn_v.weight" not in read.tensors,
        "sliding_window": read.count("attention.sliding_window"),
        "final_logit_softcapping": read.number("final_logit_softcapping", None),
        "rope_parameters": {
            FULL: {
                **ROPE[FULL],
                "rope_theta": read.number("rope.freq_base"),
                "partial_rotary_factor": _turned_share(read.slowed, wide),
            },
            SLIDING: {**ROPE[SLIDING], "rope_theta": theta},
        },
    }


NAMES = (
    *(("post_attention_norm.", "post_attention_layernorm."), ("layer_output_scale.weight", "layer_scalar")),
    *(("ffn_norm.", "pre_feedforward_layernorm."), ("pre_ffw_norm_2.", "pre_feedforward_layernorm_2.")),
    *((f"post_ffw_norm{end}.", f"post_feedforward_layernorm{end}.") for end in ("", "_1", "_2")),
    *(("ffn_gate_inp.scale", "router.scale"), ("ffn_down_exps.scale", "router.per_expert_scale")),
)
GGUF = {"gemma4": GgufFamily(("gemma4",), _gguf, (*NAMES, *ATTENTION, *DENSE, *EXPERTS))}
