"""The keys of a GGUF's architecture that a family need not read. Every other one is read or refused: a key that nobody
reads would silently leave out a scale, a window, a cap or a rotation.
"""

from collections.abc import Container, Mapping

from ..files import JsonValue

# What llama.cpp does not need of any architecture that is read here, and why.
UNREAD: Mapping[str, str] = {
    "feed_forward_length": "the shapes of tensors say it",
    "expert_feed_forward_length": "the shapes of tensors say it",
    "expert_shared_feed_forward_length": "the shapes of tensors say it",
    "expert_shared_count": "the shapes of tensors say it",
    "vocab_size": "the rows of the embedding say it",
    "attention.layer_norm_epsilon": "only norms with a mean have it, and there are none",
    "rope.dimension_sections": "all axes have one position in text",
    "rope.scaling.finetuned": "llama.cpp only prints it, except for granitehybrid, which reads it",
    "tensor_data_layout": "the names and shapes of tensors say it",
}
WINDOWLESS = {"attention.sliding_window": "llama.cpp reads none, and all published models see all positions"}
ENCODERS = ("vision.", "audio.")  # what these keys describe is not read
# Values with which a key says what holds without it.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.shared_kv_layers", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "n_deepstack_layers"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "embedding_length_per_layer_input"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    "expert_gating_func": (0, 1),  # none stated, or softmax, as of all routers whose families do not read it
    "attention.causal": (True,),
    "hidden_activation": ("silu",),
}


def is_needed(key: str, entries: Mapping[str, JsonValue], unread: Container[str]) -> bool:
    """Whether a key that nobody has read says something about the model that must be computed or refused.

    Args:
        key: without the architecture.
        entries: all keys of the architecture, likewise.
        unread: keys that this architecture has besides, but need not be read.
    """
    if key in UNREAD or key in unread or key.startswith(ENCODERS):
        return False
    value = entries[key]
    if key.endswith("_swa") and value == entries.get(
        key.removesuffix("_swa")
    ):  # layers with a window are as the others
        return False
    usual = NEUTRAL.get(key, ())
    return not all(one in usual for one in (value if isinstance(value, list) else [value]))
