"""Cohere's models with experts: attention and experts take the same norm of the stream, and only windows rotate."""

from collections.abc import Sequence
from dataclasses import replace

from ..files import JsonDict
from ..kinds import Experts, Residual, SharedExpert
from ..mixers.grouped.spec import GroupedQuery
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    experts,
    grouped_query,
    layer_count,
    layer_kinds,
    layers,
    one_full_in,
    out_of_range,
    sizes,
)
from .gguf import ATTENTION, DENSE, EXPERTS, SHARED_EXPERT, SIGMOID, GgufFamily, Metadata

# Of transformers' class, where the published file leaves a field out.
USUAL = {"head_dim": 128, "rope_theta": 1e4, "sliding_window": 4096, "first_k_dense_replace": 0}
SCORES = ("softmax", "sigmoid")
AVERAGE, SUM = "average", "sum"


def _cohere2_moe(read: Fields) -> JsonDict:
    kv_heads = read.count("num_key_value_heads", None) or read.count("num_attention_heads")
    read = Fields({**USUAL, **read.config, "num_key_value_heads": kv_heads})
    read.must_have(
        hidden_act="silu", attention_bias=False, layer_norm_bias=False, use_parallel_block=True, use_qk_norm=False
    )
    eps = read.number("rms_norm_eps", None, least=1e-30, most=1.0)
    residual = Residual(parallel=True, centred=eps is None)
    sparse = after_dense_layers(read)
    dense = len(sparse) < layer_count(read)
    width = {"intermediate_size": read.count("prefix_dense_intermediate_size")} if dense else {}
    return {
        **sizes(read),
        "rms_norm_eps": eps or read.number("layer_norm_eps", 1e-5, least=1e-30, most=1.0),
        "is_tied": read.optional("tie_word_embeddings", bool, True),
        "logit_scale": read.number("logit_scale", 0.0625, least=1e-6, most=1e6),
        "layers": layers(Fields({**read.config, **width}), _mixers(read, sparse), _experts(read), sparse, residual),
    }


def _experts(read: Fields) -> Experts:
    score, join = read.optional("expert_selection_fn", str, "softmax"), AVERAGE
    if score not in SCORES:
        raise out_of_range("expert_selection_fn", score, "'softmax' or 'sigmoid'")
    count, shared = read.count("num_shared_experts", 0, least=0), None
    if count:
        join = read.optional("shared_expert_combination_strategy", str, AVERAGE)
        if join not in (AVERAGE, SUM):
            raise out_of_range("shared_expert_combination_strategy", join, "'average' or 'sum'")
        shared = SharedExpert(count * read.count("intermediate_size"), averaged=join == AVERAGE)
    return experts(
        read,
        shared,
        "intermediate_size",
        score=score,
        biases_logits=score == "sigmoid",
        normalise=score == "softmax" or read.optional("norm_topk_prob", bool, True),
        scale=0.5 if shared is not None and shared.averaged else 1.0,
        eps=0.0,
    )


def _mixers(read: Fields, sparse: Sequence[int]) -> list[GroupedQuery]:
    """Layers with a window rotate queries and keys; so do the first, dense ones if all of them see all positions."""
    count = layer_count(read)
    dense = read.count("first_k_dense_replace", 0, least=0, most=count)
    before, every = read.count("prefix_dense_sliding_window_pattern", 1), read.count("sliding_window_pattern", 4)
    usual = [*one_full_in(before, dense), *one_full_in(every, count - dense)]
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING)) or usual
    turned = grouped_query(read, norm=None)
    assert turned.rotation is not None
    turned = replace(turned, rotation=replace(turned.rotation, interleaved=True))
    still = replace(turned, rotation=None)
    parts = {FULL: (still, turned if before == 1 else still)}
    if SLIDING in kinds:
        parts[SLIDING] = (replace(turned, window=read.count("sliding_window")),) * 2
    return [parts[kind][i not in sparse] for i, kind in enumerate(kinds)]


RENAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
FAMILIES = {"cohere2_moe": Family(_cohere2_moe, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    """With an epsilon of norms without a mean all norms have none. llama.cpp rotates the first, dense layers, and
    averages shared and routed experts."""
    read.must_be_unscaled()
    read.must_equal("expert_gating_func", SIGMOID)
    dense = read.count("leading_dense_block_count")
    return {
        **read.lengths(),
        **read.attention(),
        **read.choice(),
        "expert_selection_fn": "sigmoid",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", None),
        "layer_norm_eps": read.number("attention.layer_norm_epsilon", None),
        "intermediate_size": read.count("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": read.count("feed_forward_length") if dense else None,
        "first_k_dense_replace": dense,
        "num_shared_experts": read.count("expert_shared_count", 0),
        "norm_topk_prob": read.flag("expert_weights_norm", False),
        "layer_types": [SLIDING if slides else FULL for slides in read.windows(4, full_first=True)],
        "sliding_window": read.count("attention.sliding_window"),
        "logit_scale": read.number("logit_scale"),
    }


UNREAD = {"attention.layer_norm_epsilon": "the epsilon of norms without a mean stands beside it"}
GGUF = {
    "cohere2moe": GgufFamily(("cohere2_moe",), _gguf, (*ATTENTION, *DENSE, *EXPERTS, *SHARED_EXPERT), unread=UNREAD)
}
