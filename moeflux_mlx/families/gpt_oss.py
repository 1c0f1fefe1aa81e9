"""gpt-oss: windows in every other layer, sinks in all, biases everywhere, and clipped experts."""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import Activation
from .fields import FULL, SLIDING, Family, Fields, common, experts, grouped_query, layer_count, layer_kinds, layers
from .gguf import ATTENTION, EXPERTS, OTHER_NORM, GgufFamily, Metadata

ALPHA = 1.702  # of the sigmoid in its experts


def _gpt_oss(read: Fields) -> JsonDict:
    read.must_have(attention_bias=True, swiglu_alpha=ALPHA)
    limit = read.number("swiglu_limit", 7.0, least=1e-3, most=1e6)
    moe = experts(read, width="intermediate_size", logit_bias=True)
    moe = replace(moe, activation=Activation("clip then swish", limit), biases=True)
    full = grouped_query(read, norm=None, bias=True, output_bias=True, sinks=True)
    parts = {FULL: full, SLIDING: replace(full, window=read.count("sliding_window"))}
    alternating = [FULL if i % 2 else SLIDING for i in range(layer_count(read))]
    kinds = layer_kinds(read, "layer_types", (FULL, SLIDING)) or alternating
    return {**common(read), "layers": layers(read, [parts[kind] for kind in kinds], moe, range(len(kinds)))}


FAMILIES = {"gpt_oss": Family(_gpt_oss, renames=((".mlp.router.", ".mlp.gate."),), interleaved_experts=True)}


def _gguf(read: Metadata) -> JsonDict:
    """llama.cpp rounds YaRN's bounds, for which the file has no key; the published model does not."""
    read.one_full_in(2)
    config = {**read.sizes(), **read.attention(), **read.experts()}
    scaling = config["rope_scaling"] and {**config["rope_scaling"], "truncate": False}
    width, window = read.count("expert_feed_forward_length"), read.count("attention.sliding_window")
    return {**config, "rope_scaling": scaling, "intermediate_size": width, "sliding_window": window}


NAMES = (*ATTENTION, *OTHER_NORM, *EXPERTS, ("attn_sinks.weight", "self_attn.sinks"))
GGUF = {"gpt-oss": GgufFamily(("gpt_oss",), _gguf, NAMES)}
