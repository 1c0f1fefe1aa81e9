"""Aleph Alpha's Kolibri 1: rotation only in windows, norms around both parts of a layer, and experts that are chosen by
logits plus a bias.
"""

from ..files import JsonDict
from ..kinds import Residual, SharedExpert
from .fields import Family, Fields, common, experts, layer_count, layers, one_full_in, rotating_in_windows


def _kolibri1(read: Fields) -> JsonDict:
    shared, count = SharedExpert(read.count("shared_expert_intermediate_size")), layer_count(read)
    normalise = read.optional("norm_topk_prob", bool, False)
    moe = experts(read, shared, score="sigmoid", correction_bias=True, biases_logits=True, normalise=normalise)
    mixers = rotating_in_windows(read, one_full_in(5, count))
    parts = layers(read, mixers, moe, range(count), Residual(output_norms=True))
    return {**common(read, windows=True), "layers": parts}


RENAMES = (
    *((".post_attn_norm.", ".mixer_output.norm."), (".post_ffn_norm.", ".mlp.output.norm.")),
    (".moe.router.expert_bias", ".mlp.expert_bias"),
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),  # where MLX conversions have it (mlx-lm, pull request 1945)
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    # as transformers 5 has them in memory
    *((".post_self_attn_layernorm.", ".mixer_output.norm."), (".post_mlp_layernorm.", ".mlp.output.norm.")),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
FAMILIES = {"kolibri1": Family(_kolibri1, renames=RENAMES)}
