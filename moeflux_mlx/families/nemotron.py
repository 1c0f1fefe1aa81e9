"""Nemotron-H: Mamba-2 and attention without rotations, each alone or with experts of two matrices behind it.

The published layers have a mixer or experts; a layer of ours is a mixer with the experts that follow it, if any do.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Activation, Experts, LayerSpec, Mixer, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from ..mixers.mamba.spec import Mamba2
from .fields import MOST_LAYERS, Family, Fields, experts, out_of_range, scale, sizes
from .gguf import Change, GgufFamily, Metadata, neighbours_apart

MAMBA, ATTENTION, EXPERTS = "M", "*", "E"
BLOCK_TYPES = {
    **{"linear_attention": MAMBA, "mamba": MAMBA},
    **{"full_attention": ATTENTION, "attention": ATTENTION},
    "moe": EXPERTS,
}
RELU = Activation("relu")


def _nemotron_h(read: Fields) -> JsonDict:
    read.must_have(
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
        use_conv_bias=True,
        tie_word_embeddings=False,
        sliding_window=None,
        n_shared_experts=1,
        mamba_hidden_act="silu",
        mlp_hidden_act="relu2",
        residual_in_fp32=False,
    )
    parts: dict[str, Mixer] = {MAMBA: _mamba(read), ATTENTION: _attention(read)}
    eps = read.number("layer_norm_epsilon", 1e-5, least=1e-30, most=1.0)
    return {**sizes(read), "rms_norm_eps": eps, "layers": _layers(_pattern(read), parts, _experts(read))}


def _pattern(read: Fields) -> Sequence[str]:
    """A letter for each published layer."""
    types = read.optional("layers_block_type|layer_types", list, None)
    pattern = read.config.get("hybrid_override_pattern")
    if types is not None:
        pattern = [BLOCK_TYPES.get(kind) if isinstance(kind, str) else None for kind in types]
    if not isinstance(pattern, str | list) or any(kind not in (MAMBA, ATTENTION, EXPERTS) for kind in pattern):
        name, value = ("hybrid_override_pattern", pattern) if types is None else ("layers_block_type", types)
        raise out_of_range(name, value, "layers of Mamba, attention and experts, the kinds that are implemented")
    count = read.count("num_hidden_layers", len(pattern), most=MOST_LAYERS)
    if len(pattern) != count or count > MOST_LAYERS:
        raise ConfigError(f"there are kinds of {len(pattern)} layers for num_hidden_layers {count}")
    return pattern


def _layers(pattern: Sequence[str], parts: Mapping[str, Mixer], moe: Experts) -> tuple[LayerSpec, ...]:
    layers: list[LayerSpec] = []
    for i, kind in enumerate(pattern):
        if kind != EXPERTS:
            layers.append(LayerSpec(parts[kind], None))
        elif layers and layers[-1].feed_forward is None:
            layers[-1] = LayerSpec(layers[-1].mixer, moe)
        else:
            raise ConfigError(f"layer {i} has experts, and no mixer stands before it, which is not implemented")
    return tuple(layers)


def _mamba(read: Fields) -> Mamba2:
    return Mamba2(
        heads=read.count("mamba_num_heads"),
        head_dim=read.count("mamba_head_dim"),
        state_dim=read.count("ssm_state_size"),
        groups=read.count("n_groups"),
        taps=read.count("conv_kernel", least=2),
        **step_limits(read),
    )


def step_limits(read: Fields) -> dict[str, float]:
    """`time_step_limit`, whose second number is usually infinite. JSON has no such number: some writers of it have
    "Infinity" all the same, others {"__float__": "Infinity"}."""
    name, infinite = "time_step_limit", (math.inf, "Infinity", {"__float__": "Infinity"})
    limits = read.optional(name, list, [0.0, math.inf])
    if len(limits) != 2:
        raise out_of_range(name, limits, "two numbers")
    least = Fields({name: limits[0]}).number(name, 0.0, least=0.0, most=1e6)
    if limits[1] in infinite:
        return {"least_step": least}
    return {"least_step": least, "most_step": Fields({name: limits[1]}).number(name, least=least, most=1e6)}


def _attention(read: Fields) -> GroupedQuery:
    heads = read.count("num_attention_heads")
    width = read.count("head_dim", None) or read.count("hidden_size") // heads
    return GroupedQuery(heads, read.count("num_key_value_heads"), width, rotation=None, norm=None)


def _experts(read: Fields) -> Experts:
    shared = SharedExpert(read.count("moe_shared_expert_intermediate_size"), activation=RELU, matrices=2)
    rule = {
        "groups": read.count("n_group", 1),
        "kept_groups": read.count("topk_group", 1),
        "normalise": read.optional("norm_topk_prob", bool, True),
        "scale": scale(read, "routed_scaling_factor"),
    }
    of_three = experts(read, shared, score="sigmoid", correction_bias=True, **rule)
    latent = read.count("moe_latent_size", None)
    return Experts(of_three.router, of_three.width, shared, RELU, matrices=2, latent=latent)


def _numbered(layers: Sequence[LayerSpec]) -> list[tuple[str, str]]:
    """Beginnings of the names in each published layer, and ours."""
    names, number = list[tuple[str, str]](), 0
    for i, layer in enumerate(layers):
        parts = [(layer.mixer.module_name, "input_layernorm")]
        parts += [("mlp", "post_attention_layernorm")] if layer.feed_forward else []
        for part, norm in parts:
            theirs, ours = f"^backbone.layers.{number}.", f"model.layers.{i}."
            names += [(f"{theirs}mixer.", f"{ours}{part}."), (f"{theirs}norm.", f"{ours}{norm}.")]
            number += 1
    return names


RENAMES = (
    *(("^backbone.embeddings.", "model.embed_tokens."), ("^backbone.norm_f.", "model.norm.")),
    *((".switch_mlp.fc1.", ".switch_mlp.up_proj."), (".switch_mlp.fc2.", ".switch_mlp.down_proj.")),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
FAMILIES = {"nemotron_h": Family(_nemotron_h, renames=RENAMES, numbered=_numbered)}


def _gguf(read: Metadata) -> JsonDict:
    """A block has key heads, experts of some width, or neither, and then Mamba. Its router's scores are sigmoids, by
    llama.cpp and the published models."""
    kv_heads, widths = read.heads_or_none(), read.each_layer("feed_forward_length", int)
    pattern = [ATTENTION if kv else EXPERTS if width else MAMBA for kv, width in zip(kv_heads, widths, strict=True)]
    eps = read.number("attention.layer_norm_rms_epsilon", None) or read.number("attention.layer_norm_epsilon")
    heads = read.count("attention.head_count")
    read.must_equal("rope.scaling.finetuned", False)
    read.must_be_unscaled()
    return {
        "hybrid_override_pattern": "".join(pattern),
        **read.lengths(),
        "layer_norm_epsilon": eps,
        **read.router(),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": read.count("expert_shared_feed_forward_length"),
        "n_shared_experts": read.count("expert_shared_count"),
        "moe_latent_size": read.count("moe_latent_size", None),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads),
        "head_dim": read.head_width(heads),
        "mamba_num_heads": read.count("ssm.time_step_rank"),
        "mamba_head_dim": read.quotient("ssm.inner_size", read.count("ssm.time_step_rank")),
        "ssm_state_size": read.count("ssm.state_size"),
        "n_groups": read.count("ssm.group_count"),
        "conv_kernel": read.count("ssm.conv_kernel"),
    }


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """llama.cpp orders rows of queries and keys as if they rotated, stores -exp(A_log), and vectors with axes of length
    1 or of groups."""
    if name.endswith((".q_proj.weight", ".k_proj.weight")):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return neighbours_apart(heads, shape[0])
    if name.endswith("conv1d.weight"):
        return Change((*shape, 1))
    if name.endswith(".A_log"):
        return Change((math.prod(shape),), values=lambda values: np.log(-values))
    return Change((math.prod(shape),)) if name.endswith((".D", "mixer.norm.weight")) else None


NAMES = (
    *(
        (f"attn_{theirs}.", f"mixer.{ours}_proj.")
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
    ),
    *((f"ffn_{one}_exps.", f"mixer.switch_mlp.{one}_proj.") for one in ("up", "down")),
    *((f"ffn_{one}_shexp.", f"mixer.shared_experts.{one}_proj.") for one in ("up", "down")),
    *(("ffn_latent_down.", "mixer.fc1_latent_proj."), ("ffn_latent_up.", "mixer.fc2_latent_proj.")),
    *(("ffn_gate_inp.", "mixer.gate."), ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias")),
    *(("ssm_in.", "mixer.in_proj."), ("ssm_out.", "mixer.out_proj."), ("ssm_conv1d.", "mixer.conv1d.")),
    *(("ssm_norm.", "mixer.norm."), ("ssm_dt.bias", "mixer.dt_bias"), ("ssm_a", "mixer.A_log"), ("ssm_d", "mixer.D")),
    ("attn_norm.", "norm."),
)
UNREAD = dict.fromkeys(("rope.dimension_count", "rope.freq_base"), "no values of heads rotate")
GGUF = {"nemotron_h_moe": GgufFamily(("nemotron_h",), _gguf, NAMES, _change, UNREAD, stem="backbone.layers.")}
