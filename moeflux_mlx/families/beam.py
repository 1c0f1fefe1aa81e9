"""Reflection's Beam: rotation only in windows, queries that grow with their position elsewhere, biased gates, norms
around both parts of a layer, and a stream that is averaged over its parts.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..files import JsonDict
from ..kinds import QueryGrowth, Residual
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    after_dense_layers,
    common,
    grouped_experts,
    layer_count,
    layers,
    of_kind,
    one_full_in,
    rotating_in_windows,
)

# Of transformers' class, where the published file leaves a field out.
USUAL = {
    **{"head_dim": 128, "sliding_window": 512, "rope_theta": 1e4, "final_logit_softcapping": 30.0},
    **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 0},
}


def _beam(read: Fields) -> JsonDict:
    count = layer_count(read)
    read = Fields({**USUAL, "first_k_dense_replace": min(3, count), **read.config})
    read.must_equal("n_shared_experts", 0)
    rope = Fields(read.optional("rope_parameters", Mapping, {SLIDING: {}}))
    rope.must_equal(FULL, None)
    rope.required(SLIDING, Mapping)
    kinds = [*one_full_in(6, count)[:-1], FULL]
    mixers = rotating_in_windows(of_kind(read, SLIDING), kinds, gate="sigmoid", gate_bias=True)
    growth = QueryGrowth(0.1, 2048)
    mixers = [mixer if mixer.rotation else replace(mixer, query_scale=growth) for mixer in mixers]
    moe = grouped_experts(read, score="sigmoid", correction_bias=True)
    residual = Residual(output_norms=True, averaged=True)
    return {
        **common(read),
        "logit_softcap": read.number("final_logit_softcapping", None, least=1e-3, most=1e6),
        "layers": layers(read, mixers, moe, after_dense_layers(read), residual),
    }


RENAMES = (
    *((".self_attn.gate_proj.", ".self_attn.g_proj."), (".post_attention_layernorm.", ".mixer_output.norm.")),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp.output.norm."),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
FAMILIES = {"beam": Family(_beam, renames=RENAMES)}
