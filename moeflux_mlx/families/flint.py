"""Flint: rotation only in windows, sinks in all layers, and sigmoids without a correction bias."""

from ..files import JsonDict
from ..kinds import SharedExpert
from .fields import (
    FULL,
    SLIDING,
    Family,
    Fields,
    common,
    experts,
    layer_count,
    layers,
    rotating_in_windows,
    sparse_layers,
)


def _flint(read: Fields) -> JsonDict:
    shared = SharedExpert(read.count("shared_expert_intermediate_size"))
    moe = experts(read, shared, score="sigmoid", normalise=read.optional("norm_topk_prob", bool, True))
    dense = read.optional("mlp_only_layers", list, [0, 1])
    sparse = sparse_layers(Fields({**read.config, "mlp_only_layers": dense}))
    mixers = rotating_in_windows(read, _kinds(layer_count(read)), sinks=True)
    return {**common(read, windows=True), "layers": layers(read, mixers, moe, sparse)}


def _kinds(count: int) -> list[str]:
    """The first two layers, every fourth and the last see all positions."""
    return [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]


FAMILIES = {"flint": Family(_flint, renames=((".self_attn.softmax_offset", ".self_attn.sinks"),))}
