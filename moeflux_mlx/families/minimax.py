"""MiniMax-M2 to M2.7."""

from typing import Any

from .fields import Family, Fields, common, experts, grouped_query, layer_count, layer_kinds, layers


def _minimax_m2(read: Fields) -> dict[str, Any]:
    count = layer_count(read)
    for name, wanted in (
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("shared_intermediate_size", 0),
    ):
        read.must_equal(name, wanted)
    layer_kinds(read, "attn_type_list", (1,))  # the linear attention of MiniMax-01 is 0
    moe = experts(read, width="intermediate_size", score="sigmoid", correction_bias=True)
    attention = grouped_query(read, share=_turned_share(read), norm="flat")
    return {**common(read), "layers": layers(read, [attention] * count, moe, range(count))}


def _turned_share(read: Fields) -> float:
    """Of a head: earlier releases of transformers say how many values are turned."""
    width = read.count("head_dim")
    return read.count("rotary_dim", width, most=width) / width


RENAMES = (
    (".block_sparse_moe.", ".mlp."),
    *((f".{theirs}.", f".{ours}_proj.") for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))),
)
FAMILIES = {"minimax_m2": Family(_minimax_m2, renames=RENAMES)}
