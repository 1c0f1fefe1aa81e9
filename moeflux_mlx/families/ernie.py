"""ERNIE 4.5 with experts: a softmax router with a correction bias, and a rotation of neighbouring pairs."""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import SharedExpert
from .fields import Family, Fields, experts, grouped_query, layer_count, layers, sizes
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, GgufFamily, Metadata


def _ernie4_5_moe(read: Fields) -> JsonDict:
    read.must_have(hidden_act="silu", use_bias=False, moe_gate_act="softmax")
    read.must_equal("moe_norm_min", 1e-12)  # the least sum of weights, far below any softmax's best
    shared = read.count("moe_intermediate_size") * read.count("moe_num_shared_experts", 2, least=0)
    names = {"num_experts": read.count("moe_num_experts"), "num_experts_per_tok": read.count("moe_k")}
    moe = experts(Fields({**read.config, **names}), SharedExpert(shared) if shared else None, correction_bias=True)
    attention = grouped_query(read, norm=None)
    if attention.rotation is not None:
        attention = replace(attention, rotation=replace(attention.rotation, interleaved=True))
    return {
        **sizes(read, eps=1e-5),
        "is_tied": read.optional("tie_word_embeddings", bool, True),
        "layers": layers(read, [attention] * layer_count(read), moe, _sparse(read)),
    }


def _sparse(read: Fields) -> list[int]:
    """The layers with experts."""
    count, every = layer_count(read), read.count("moe_layer_interval", 1)
    first, last = read.count("moe_layer_start_index", 1, least=0), read.count("moe_layer_end_index", -1, least=-1)
    return [i for i in range(first, (count if last < 0 else min(last + 1, count))) if (i + 1) % every == 0]


RENAMES = (
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),  # where transformers 5 has it in memory
    (".mlp.moe_statics.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
FAMILIES = {"ernie4_5_moe": Family(_ernie4_5_moe, renames=RENAMES)}


def _gguf(read: Metadata) -> JsonDict:
    return {
        **read.sizes(),
        **read.attention(),
        "intermediate_size": read.count("feed_forward_length"),
        "moe_num_experts": read.count("expert_count"),
        "moe_k": read.count("expert_used_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "moe_num_shared_experts": read.count("expert_shared_count", 0),
        "moe_layer_start_index": read.count("leading_dense_block_count", 0),
        "moe_layer_interval": read.count("interleave_moe_layer_step", 1),
    }


GGUF = {"ernie4_5-moe": GgufFamily(("ernie4_5_moe",), _gguf, (*ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))}
