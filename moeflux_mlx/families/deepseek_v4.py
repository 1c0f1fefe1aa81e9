"""DeepSeek-V4: a window and compressed entries, several streams, experts by a table in the first layers."""

from collections.abc import Mapping
from dataclasses import replace

from ..files import JsonDict
from ..kinds import Activation, Experts, HyperConnections, Indexer, LayerSpec, Residual, Rotation
from ..mixers.compressed.spec import Compressed, Compressor
from .fields import Family, Fields, common, grouped_experts, layer_count, layer_kinds, rotation
from .gguf import DENSE, EXPERTS, NORM, SHARED_EXPERT, SQRT_SOFTPLUS, STREAMS, GgufFamily, Metadata

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # of the published `compress_ratios`
RATIOS = {SPARSE: 4, HEAVY: 128}
HASHED, ROUTED = "hash_moe", "moe"


def _deepseek_v4(read: Fields) -> JsonDict:
    read.must_have(
        attention_bias=False,
        mlp_bias=False,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        num_key_value_heads=1,
    )
    residual = Residual(
        connections=HyperConnections(
            streams=read.count("hc_mult", 4, most=64),
            iterations=read.count("hc_sinkhorn_iters", 20, most=1000),
            eps=read.number("hc_eps", 1e-6, least=1e-30, most=1.0),
        )
    )
    mixers = {kind: _attention(read, kind) for kind in (SLIDING, SPARSE, HEAVY)}
    experts = {kind: _experts(read, kind == HASHED) for kind in (HASHED, ROUTED)}
    parts = zip(_layer_types(read), _mlp_types(read), strict=True)
    return {
        **common(read),
        "layers": tuple(LayerSpec(mixers[mixer], experts[mlp], residual) for mixer, mlp in parts),
    }


def _attention(read: Fields, kind: str) -> Compressed:
    width = read.count("head_dim")
    rates = Fields(read.optional("compress_rates", Mapping, {}))
    names = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    ratio = 0 if kind == SLIDING else rates.count(kind, None) or read.count(names[kind], RATIOS[kind], most=1 << 20)
    indexer = Indexer(heads=read.count("index_n_heads"), dim=read.count("index_head_dim"), top=read.count("index_topk"))
    compressor = Compressor(ratio, kind == SPARSE, indexer if kind == SPARSE else None) if ratio else None
    return Compressed(
        heads=read.count("num_attention_heads"),
        head_dim=width,
        q_latent=read.count("q_lora_rank"),
        rotation=rotation_of(read, width, kind != SLIDING),
        window=read.count("sliding_window"),
        groups=read.count("o_groups"),
        group_latent=read.count("o_lora_rank"),
        compressor=compressor,
    )


def rotation_of(read: Fields, width: int, is_compressed: bool) -> Rotation:
    """Plain in layers without entries; in the others of another period, scaled by YaRN without its magnitude.

    transformers 5 writes `rope_parameters` for both, "main" and "compress"; the publisher has `rope_theta`,
    `compress_rope_theta` and one `rope_scaling`.
    """
    new = read.optional("rope_parameters", Mapping, {})
    kind = "compress" if is_compressed else "main"
    if isinstance(new.get(kind), Mapping):
        own = {**read.config, "rope_parameters": new[kind]}
    else:
        theta = read.config.get("compress_rope_theta" if is_compressed else "rope_theta")
        scaling = read.config.get("rope_scaling") or read.config.get("rope_parameters")
        own = {**read.config, "rope_theta": theta, "rope_parameters": None}
        own["rope_scaling"] = scaling if is_compressed else None
    dims = read.count("qk_rope_head_dim", None)
    share = read.number("partial_rotary_factor", 0.125, least=1e-6, most=1.0)
    turned = rotation(Fields(own), dims or int(width * share), share=None, interleaved=True)
    yarn = turned.yarn and replace(turned.yarn, attention_factor=turned.yarn.attention_factor or 1.0)
    return replace(turned, yarn=yarn)


def _layer_types(read: Fields) -> list[str]:
    kinds = layer_kinds(read, "layer_types", (SLIDING, SPARSE, HEAVY))
    if kinds is not None:
        return kinds
    count, ratios = layer_count(read), read.optional("compress_ratios", list, None)
    if ratios is None:
        return [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    only = Fields({**read.config, "compress_ratios": ratios[:count]})  # layers that draft come last
    return [OF_RATIO[ratio] for ratio in layer_kinds(only, "compress_ratios", tuple(OF_RATIO)) or ()]


def _mlp_types(read: Fields) -> list[str]:
    kinds, count = layer_kinds(read, "mlp_layer_types", (HASHED, ROUTED)), layer_count(read)
    hashed = read.count("num_hash_layers", min(3, count), least=0, most=count)
    return kinds or [HASHED if i < hashed else ROUTED for i in range(count)]


def _experts(read: Fields, is_hashed: bool) -> Experts:
    moe = limited_experts(read, not is_hashed)
    return replace(moe, router=replace(moe.router, table=read.count("vocab_size") if is_hashed else None))


def limited_experts(read: Fields, correction_bias: bool = True) -> Experts:
    """The experts of all layers, whose gates and ups are clipped."""
    activation = Activation("clip then silu", read.number("swiglu_limit", 10.0, least=1e-6, most=1e6))
    moe = grouped_experts(read, score="sqrtsoftplus", correction_bias=correction_bias)
    shared = moe.shared and replace(moe.shared, activation=activation)
    return replace(moe, shared=shared, activation=activation)


RENAMES = (
    *(("^layers.", "model.layers."), ("^embed.", "model.embed_tokens."), ("^head.", "lm_head.")),
    *(("^norm.", "model.norm."), ("^hc_head_", "model.hc_head."), (".hc_head.hc_", ".hc_head.")),
    *((".attn.", ".self_attn."), (".ffn.", ".mlp."), (".attn_norm.", ".input_layernorm.")),
    *((".ffn_norm.", ".post_attention_layernorm."), (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc.")),
    *((".self_attn.norm.", ".self_attn.kv_norm."), (".w1.", ".gate_proj."), (".w2.", ".down_proj.")),
    *((".w3.", ".up_proj."), (".shared_experts.", ".shared_expert."), (".gate.bias", ".e_score_correction_bias")),
    *((".gate.e_score_correction_bias", ".e_score_correction_bias"), (".gate.tid2eid", ".tid2eid")),
)
FAMILIES = {"deepseek_v4": Family(_deepseek_v4, renames=RENAMES, grouped=(".wo_a",))}


def _gguf(read: Metadata) -> JsonDict:
    width, streams = read.head_width(1), read.count("hyper_connection.count")
    read.must_equal("attention.head_count_kv", 1)
    read.must_equal("embedding_length_out", streams * read.count("embedding_length"))
    return {
        **read.sizes(),
        **read.noaux(SQRT_SOFTPLUS),
        "num_attention_heads": read.count("attention.head_count"),
        "head_dim": width,
        "q_lora_rank": read.count("attention.q_lora_rank"),
        "qk_rope_head_dim": read.count("rope.dimension_count"),
        "rope_theta": read.theta(),
        "compress_rope_theta": read.number("attention.compress_rope_freq_base"),
        "rope_scaling": read.rope_scaling(),
        "sliding_window": read.count("attention.sliding_window"),
        "o_groups": read.count("attention.output_group_count"),
        "o_lora_rank": read.count("attention.output_lora_rank"),
        "compress_ratios": read.each_layer("attention.compress_ratios", int),
        "index_n_heads": read.count("attention.indexer.head_count"),
        "index_head_dim": read.count("attention.indexer.key_length"),
        "index_topk": read.count("attention.indexer.top_k"),
        "num_hash_layers": read.count("hash_layer_count"),
        "swiglu_limit": read.limit("swiglu_clamp_exp", "swiglu_clamp_shexp"),
        "hc_mult": streams,
        "hc_sinkhorn_iters": read.count("hyper_connection.sinkhorn_iterations"),
        "hc_eps": read.number("hyper_connection.epsilon"),
    }


GGUF_NAMES = (
    *((f"attn_{theirs}.", f"self_attn.{ours}.") for theirs, ours in (("q_a", "wq_a"), ("q_b", "wq_b"), ("kv", "wkv"))),
    *(("attn_q_a_norm.", "self_attn.q_norm."), ("attn_kv_a_norm.", "self_attn.kv_norm.")),
    *(("attn_output_a.", "self_attn.wo_a."), ("attn_output_b.", "self_attn.wo_b.")),
    *(("attn_sinks.weight", "self_attn.attn_sink"), ("ffn_gate_tid2eid.weight", "mlp.tid2eid")),
    *(("indexer.proj.", "self_attn.indexer.weights_proj."), ("indexer.attn_q_b.", "self_attn.indexer.wq_b.")),
    *(
        (f"{theirs}_compressor_{part}", f"self_attn.{ours}compressor.{name}")
        for theirs, ours in (("attn", ""), ("indexer", "indexer."))
        for part, name in (("ape.weight", "ape"), ("norm.", "norm."), ("gate.", "wgate."), ("kv.", "wkv."))
    ),
    ("attn_norm.", "input_layernorm."),
)
GGUF = {
    "deepseek4": GgufFamily(("deepseek_v4",), _gguf, (*GGUF_NAMES, *STREAMS, *NORM, *DENSE, *EXPERTS, *SHARED_EXPERT))
}
