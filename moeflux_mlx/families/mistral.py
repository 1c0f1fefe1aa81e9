"""Mistral Small 4: DeepSeek's latent attention, with a temperature of its queries, beside a softmax router. Mistral
Large 4: the same over chosen positions, with learned temperatures and frequencies, in layers that share latents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..files import JsonDict
from ..kinds import Indexer, LayerSpec, QueryScale
from ..mixers.latent.spec import Latent
from .deepseek import (
    GGUF_NAMES,
    OF_LATENT_HEAD,
    RENAMES,
    SHARED,
    gguf_config,
    indexer_types,
    latent_attention,
)
from .fields import (
    Family,
    Fields,
    after_dense_layers,
    common,
    grouped_experts,
    layer_count,
    layer_kinds,
    layers,
    out_of_range,
)
from .gguf import SOFTMAX, GgufFamily, Metadata

# Of transformers' class, where the published file leaves a field of Mistral Large 4 out.
USUAL = {
    **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "rms_norm_eps": 1e-5},
    **{"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 1},
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "final_logit_softcapping": 30.0},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, "original_max_position_embeddings": 512},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
    },
}


def _mistral4(read: Fields) -> JsonDict:
    mixers = [latent_attention(read, _query_scale(read))] * layer_count(read)
    return {**common(read), "layers": layers(read, mixers, grouped_experts(read), after_dense_layers(read))}


def _query_scale(read: Fields) -> QueryScale:
    rope = Fields(read.required("rope_parameters", Mapping))
    beta = rope.number("llama_4_scaling_beta", least=0.0, most=1e3)
    return QueryScale(beta, rope.count("original_max_position_embeddings"))


def _mistral_large4(read: Fields) -> JsonDict:
    read = read.with_usual(USUAL)
    read.must_have(q_lora_rank=None, norm_topk_prob=True)
    Fields(read.required("rope_parameters", Mapping)).must_equal("mscale_all_dim", 0)
    return {
        **common(read, eps=1e-5),
        "logit_softcap": read.number("final_logit_softcapping", least=1e-3, most=1e6),
        "layers": layers(read, _sharing(read), grouped_experts(read), after_dense_layers(read)),
    }


def _sharing(read: Fields) -> list[Latent]:
    """The mixers, of which some have latents for later layers too."""
    count, turns = layer_count(read), _turns(read)
    sources: Sequence[Any] = layer_kinds(read, "kv_source_layers", range(count)) or range(count)
    lenders = {source for layer, source in enumerate(sources) if source != layer}
    attention, made = _attention(read), list[Latent]()
    still = replace(attention, nope=attention.head_dim, rotation=None)
    for layer, (kind, source) in enumerate(zip(indexer_types(read), sources, strict=True)):
        last = max((i for i in lenders if i < layer and turns[i] == turns[layer]), default=layer)
        if source not in (layer, last) or sources[source] != source:
            raise out_of_range("kv_source_layers", sources, f"{layer} or {last} for layer {layer}")
        own = attention if turns[layer] else still
        assert own.indexer is not None
        indexer = replace(own.indexer, reuses=kind == SHARED)
        made.append(replace(own, indexer=indexer, shares=layer in lenders, borrows=source != layer))
    return made


def _turns(read: Fields) -> list[Any]:
    """For each layer 1, or 0 if it does not rotate."""
    count, every = layer_count(read), read.count("no_rope_layer_interval", 4)
    given = read.optional("no_rope_layers", list, None)  # may have more
    short = Fields({**read.config, "no_rope_layers": given and given[:count]})
    return layer_kinds(short, "no_rope_layers", (0, 1)) or [int((i + 1) % every != 0) for i in range(count)]


def _attention(read: Fields) -> Latent:
    turned = latent_attention(read)
    assert turned.rotation is not None
    indexer = Indexer(
        heads=read.count("index_n_heads"),
        dim=read.count("index_head_dim"),
        top=read.count("index_topk"),
        interleaved=True,
        from_input=True,
    )
    eps = read.number("rms_norm_eps", least=1e-30, most=1.0)
    return replace(turned, rotation=replace(turned.rotation, learned=True), indexer=indexer, norm_eps=eps, grows=True)


def _copies(layers: Sequence[LayerSpec]) -> dict[str, list[str]]:
    """Learned frequencies are the same in all layers, and so is the norm of latents that layers share."""
    own = [f"model.layers.{i}.self_attn." for i in range(len(layers))]
    mixers: Any = [layer.mixer for layer in layers]
    copies = {"model.rotary_emb.alpha": [own[i] + "rotary_alpha" for i, one in enumerate(mixers) if one.rotation]}
    lender: dict[bool, str] = {}
    for i, one in enumerate(mixers):
        if one.shares:
            lender[one.rotation is None] = f"{own[i]}kv_a_layernorm.weight"
            copies[lender[one.rotation is None]] = [lender[one.rotation is None]]
        elif one.borrows:
            copies[lender[one.rotation is None]].append(f"{own[i]}kv_a_layernorm.weight")
    return copies


def _numbered(layers: Sequence[LayerSpec]) -> list[tuple[str, str]]:
    """Of published names those that stand for a layer's parts without their `mlp`."""
    parts = ("gate", "experts", "shared_experts")
    return [(f"^layers.{i}.{part}.", f"layers.{i}.mlp.{part}.") for i in range(len(layers)) for part in parts]


PUBLISHED = (
    *(("^tok_embeddings.", "model.embed_tokens."), ("^norm.", "model.norm."), ("^output.", "lm_head.")),
    *(("^layers.", "model.layers."), ("^lerope.", "model.rotary_emb."), (".feed_forward.", ".mlp.")),
    *((".attention.", ".self_attn."), (".attention_norm.", ".input_layernorm.")),
    *((".ffn_norm.", ".post_attention_layernorm."), (".kv_a_norm.", ".kv_a_layernorm.")),
    *((".wq.", ".q_proj."), (".wkv_a_with_mqa.", ".kv_a_proj_with_mqa."), (".wkv_b.", ".kv_b_proj.")),
    *((".wo.", ".o_proj."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
    *((".ssmax_scaling.s", ".softmax_scaling.scale"), (".ssmax_scaling.b", ".softmax_scaling.bias")),
)
# Of the queries' temperature, in the only published model; llama.cpp's converter leaves them out.
BETA, LENGTH = 0.1, 8192


def _gguf(read: Metadata) -> JsonDict:
    """As DeepSeek-V3's, with a softmax router."""
    config = gguf_config(read, SOFTMAX)
    rope = {"rope_theta": config["rope_theta"], "original_max_position_embeddings": LENGTH}
    rope |= config["rope_scaling"] or {}
    read.must_equal("attention.temperature_length", rope["original_max_position_embeddings"])
    beta = read.number("attention.temperature_scale", BETA)
    return config | {"rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


GGUF = {"mistral4": GgufFamily(("mistral4",), _gguf, GGUF_NAMES, unread=OF_LATENT_HEAD)}
FAMILIES = {
    "mistral4": Family(_mistral4, renames=RENAMES),
    "mistral_large4": Family(_mistral_large4, renames=(*PUBLISHED, *RENAMES), numbered=_numbered, copies=_copies),
}
