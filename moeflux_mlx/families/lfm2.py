"""LFM2 with experts: gated short convolutions, and now and then attention; a sigmoid router with a correction bias."""

from typing import Any

from ..errors import ConfigError
from ..kinds import Mixer
from ..mixers.conv.spec import ShortConv
from .fields import FULL, Family, Fields, experts, grouped_query, layer_count, layer_kinds, layers, sizes

CONV = "conv"  # the other kind of layers in `layer_types`
# Where a config.json has none (transformers, `Lfm2MoeConfig`).
THETA, EPS, TAPS, DENSE = 1e6, 1e-5, 3, 2


def _lfm2_moe(read: Fields) -> dict[str, Any]:
    read.must_equal("conv_bias", False)
    count = layer_count(read)
    kinds = layer_kinds(read, "layer_types", (CONV, FULL))
    if kinds is None:
        raise ConfigError("config field 'layer_types' is missing")
    theta = read.number("rope_theta", THETA, least=2.0, most=1e30)
    parts: dict[str, Mixer] = {
        CONV: ShortConv(read.count("hidden_size"), read.count("conv_L_cache", TAPS, least=2)),
        FULL: grouped_query(Fields({**read.config, "rope_theta": theta})),
    }
    moe = experts(
        read,
        score="sigmoid",
        correction_bias=read.optional("use_expert_bias", bool, True),
        normalise=read.optional("norm_topk_prob", bool, True),
        scale=read.number("routed_scaling_factor", 1.0, least=1e-6, most=1e6),
        eps=1e-6,  # transformers, `Lfm2MoeSparseMoeBlock`
    )
    sparse = range(read.count("num_dense_layers", DENSE, least=0, most=count), count)
    return {
        **sizes(read),
        "rms_norm_eps": read.number("norm_eps", EPS, least=1e-30, most=1.0),
        "is_tied": read.optional("tie_embedding|tie_word_embeddings", bool, True),
        "layers": layers(read, [parts[kind] for kind in kinds], moe, sparse),
    }


RENAMES = (
    ("^model.embedding_norm.", "model.norm."),
    *((".operator_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm.")),
    *((".self_attn.out_proj.", ".self_attn.o_proj."), (".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm.")),
    *((".feed_forward.", ".mlp."), (".mlp.expert_bias", ".mlp.e_score_correction_bias")),
    *((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
)
FAMILIES = {"lfm2_moe": Family(_lfm2_moe, renames=RENAMES)}
