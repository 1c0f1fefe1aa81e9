"""A streamed step reads the bytes that `moeflux plan` states, at the sizes of real models with a few layers. The files
are sparse, so experts of many gigabytes take no disk space.
"""

import dataclasses
import json
from contextlib import closing

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.routing import Routing
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.files import directory
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.ops import backend
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs

LAYERS = 2  # layers with experts
MXFP4 = (Quant(4, 32, "mxfp4"),) * 3
# The experts of a token in a layer, and the bytes of one in memory: whole blocks of 4 KiB.
SIZES = {
    "gpt-oss-120b": (4, 13_238_272),
    "minimax-m2-230b-a10b": (8, 7_962_624),
    "glm-4.5-air": (8, 9_732_096),
    "kimi-k2.6": (8, 24_772_608),
}


def few_layers(name):
    args = ModelArgs.from_dict(json.loads((directory("configs") / f"{name}.json").read_text("utf-8")))
    last = args.moe_layers[LAYERS - 1]
    return dataclasses.replace(args, layers=args.layers[: last + 1])


@pytest.mark.parametrize("name", SIZES)
def test_a_step_reads_what_is_planned(tmp_path, name):
    args = few_layers(name)
    layout = ExpertLayout.from_args(args, dict.fromkeys(args.moe_layers, MXFP4) if "gpt" in name else None)
    top_k, each = args.num_experts_per_tok, next(iter(layout.records.values())).held_bytes
    assert (top_k, each) == SIZES[name] and layout.token_bytes(args) == LAYERS * top_k * each
    packed = PackedExperts(layout, [tmp_path])
    for layer, path in packed.paths.items():
        with path.open("wb") as file:
            file.truncate(layout.layer_bytes(layer))
    pool = LAYERS * top_k * each
    with closing(StreamedExperts(packed, cache_bytes=pool, least_slots=top_k)) as source:
        experts = RoutedExperts(source)

        def step(ids):
            """Returns the bytes that a token reads if its router chooses `ids` in every layer."""
            before = source.stats.bytes_read
            for layer in layout.moe_layers:
                ids_of, x = np.array([ids], np.int32), np.zeros((1, args.hidden_size), np.float32)
                weights = np.full((1, top_k), 1 / top_k, np.float32)
                with source.turn(1):
                    if backend.computes_natively(mx.float32, args.widths):
                        experts(Routing(layer, ids_of, weights), x, x, None)
                    else:
                        mx.eval(
                            experts(Routing(layer, mx.array(ids_of), mx.array(weights)), *map(mx.array, (x, x)), None)
                        )
            return source.stats.bytes_read - before

        half, some, others = top_k // 2, range(top_k), range(top_k, 2 * top_k)
        assert step(some) == layout.token_bytes(args)
        assert step(some) == 0  # all of them are in the pool
        assert step(others) == layout.token_bytes(args)
        assert step([*others[:half], *range(2 * top_k, 2 * top_k + half)]) == layout.token_bytes(args) // 2
