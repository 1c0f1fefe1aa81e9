"""LFM2 with experts: gated short convolutions, and now and then attention; a sigmoid router with a correction bias."""

from ..errors import ConfigError
from ..files import JsonDict
from ..kinds import Mixer
from ..mixers.conv.spec import ShortConv
from .fields import FULL, Family, Fields, experts, grouped_query, layer_count, layer_kinds, layers, sizes
from .gguf import ATTENTION, DENSE, EXPERTS, NORM, SHARED_EXPERT, SIGMOID, Change, GgufFamily, Metadata

CONV = "conv"  # the other kind of layers in `layer_types`
# Where a config.json has none (transformers, `Lfm2MoeConfig`).
THETA, EPS, TAPS, DENSE_LAYERS = 1e6, 1e-5, 3, 2


def _lfm2_moe(read: Fields) -> JsonDict:
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
    sparse = range(read.count("num_dense_layers", DENSE_LAYERS, least=0, most=count), count)
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


def _gguf(read: Metadata) -> JsonDict:
    """A layer has as many key heads as attention has, or none. llama.cpp always normalises the routing weights of this
    architecture and knows no factor of them, as in all published models."""
    read.must_equal("expert_gating_func", SIGMOID)
    kv_heads, dense = read.heads_or_none(), read.count("leading_dense_block_count", 0)
    heads = read.of_layers("attention.head_count", read.layers)
    width = read.head_width(heads)
    return {
        **read.sizes(),
        **read.experts(),
        "norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else CONV for count in kv_heads],
        "num_attention_heads": heads,
        "head_dim": width,
        "rope_scaling": read.rope_scaling(),
        **read.rotated(width),
        "num_key_value_heads": max(kv_heads),
        "rope_theta": read.number("rope.freq_base"),
        "intermediate_size": read.count("feed_forward_length"),
        "num_dense_layers": dense,
        "conv_L_cache": read.count("shortconv.l_cache"),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in read.tensors,
    }


def _change(config: JsonDict, name: str, shape: tuple[int, ...]) -> Change | None:
    """llama.cpp has no axis of length 1 in weights of convolutions."""
    return Change((*shape, 1)) if name == "conv.conv.weight" else None


NAMES = tuple((f"shortconv.{part}.", f"conv.{part}.") for part in ("conv", "in_proj", "out_proj"))
GGUF = {
    "lfm2moe": GgufFamily(("lfm2_moe",), _gguf, (*NAMES, *ATTENTION, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT), _change)
}
