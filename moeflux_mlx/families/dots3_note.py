"""The text part of dots3-note: DeepSeek-V3.2's attention in some layers, and in the others latents of a window."""

from collections.abc import Mapping
from dataclasses import replace

from ..files import JsonDict
from ..kinds import Indexer, SharedExpert
from ..mixers.latent.spec import Latent
from .deepseek import RENAMES as OF_DEEPSEEK
from .deepseek import latent_attention
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    layer_count,
    layer_kinds,
    layers,
    noaux_experts,
    of_kind,
)

INDEXED = "indexed_attention"  # which published files call "full_attention"
# Of transformers' class, where the published file leaves a field out.
USUAL = {
    **{"q_lora_rank": 1024, "routed_scaling_factor": 1.0, "rope_theta": 8e7, "first_k_dense_replace": 1},
    **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "n_shared_experts": 1},
}
OF_WINDOWS = {
    **{"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256},
    **{"qk_nope_head_dim": 192, "v_head_dim": 128, "rope_theta": 5e4},
}


def _dots3_note(read: Fields) -> JsonDict:
    read = read.with_usual(USUAL)
    fields, count = common(read, eps=1e-5), layer_count(read)
    has_flags = isinstance(read.config.get("moe_layer_freq"), list)
    read.must_have(rope_scaling=None, **({} if has_flags else {"moe_layer_freq": 1}))
    slides = read.optional("use_sliding_window", bool, True)
    usual = [SLIDING if slides and i > 1 and i % 4 != 1 else INDEXED for i in range(count)]
    kinds = layer_kinds(read, "layer_types", (FULL, INDEXED, SLIDING)) or usual
    mixers = [_attention(_of_layer(read, i, kind), kind, fields) for i, kind in enumerate(kinds)]
    width = read.count("moe_shared_expert_intermediate_size|shared_experts_intermediate_size", 1536)
    moe = replace(noaux_experts(read), shared=SharedExpert(width * read.count("n_shared_experts")))
    sparse = after_dense_layers(read, "moe_layer_freq" if has_flags else None)
    return {**fields, "layers": layers(read, mixers, moe, sparse)}


def _of_layer(read: Fields, layer: int, kind: str) -> Fields:
    """The fields as they are for one layer: the published file has those of windows under names of their own,
    transformers 5 in `per_layer_config`."""
    own = read.optional("per_layer_config", Mapping, {}).get(str(layer))
    if not isinstance(own, Mapping):
        own = {name: read.config.get(f"swa_{name}", usual) for name, usual in OF_WINDOWS.items()}
        own = own if kind == SLIDING else {}
    of = Fields({**read.config, **own})
    if kind == SLIDING and "qk_rope_head_dim" not in own:
        rotated = of.count("head_dim") - of.count("qk_nope_head_dim")
        of = Fields({**of.config, "qk_rope_head_dim": read.count("swa_qk_rope_head_dim", rotated)})
    return of_kind(of, kind)


def _attention(read: Fields, kind: str, fields: JsonDict) -> Latent:
    attention, hidden = latent_attention(read), fields["hidden_size"]
    attention = replace(
        attention,
        gate="sigmoid head",
        key_norm=True,
        norm_eps=fields["rms_norm_eps"],
        query_gain=(hidden / read.count("q_lora_rank")) ** 0.5,
        latent_gain=(hidden / attention.latent) ** 0.5,
    )
    if kind == SLIDING:
        return replace(attention, window=read.count("sliding_window|sliding_window_size", 512))
    if kind == FULL and not read.optional("use_dsa", bool, "per_layer_config" not in read.config):
        return attention
    heads, dim, top = (read.count(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
    return replace(attention, indexer=Indexer(heads=heads, dim=dim, top=top, interleaved=True))


RENAMES = ((".self_attn.k_rope_only_layernorm.", ".self_attn.k_rope_norm."), *OF_DEEPSEEK)
FAMILIES = {"dots3_note": Family(_dots3_note, renames=RENAMES)}
