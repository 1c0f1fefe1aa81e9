#!/usr/bin/env python3
"""Whole-model decode and prefill on a GPU, ours beside mlx-lm's, same shapes, 4-bit random weights, one run.

    scripts/bench/bench_decode.py [--variant qwen3.6-35b-a3b] [--layers N] [--skip-mlx-lm] [--tiles FILE]

Every expert is resident. Weights are drawn on the GPU, so nothing is read from disk. Prints a table and ends with
one JSON line: tokens per second, milliseconds that Python takes to build one token's graph, milliseconds of the
rest, and operations of that graph that launch work.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from make_random_model import shrunk

from moeflux_mlx.cli.run import configure_mlx
from moeflux_mlx.engine.kernel_cache import compiling
from moeflux_mlx.engine.random_weights import Shapes, random_records, randomise
from moeflux_mlx.engine.tiles import choose
from moeflux_mlx.experts.mapped import MappedExperts
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.files import directory, read_json
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.tensors import needed, stored_as
from moeflux_mlx.ops.tiles import CODE, Tiles
from moeflux_mlx.spec import ModelArgs, variants

PROMPT, TOKENS, WARMUP = 512, 96, 16
QUIET = ("Broadcast", "ExpandDims", "Squeeze", "Reshape", "Slice", "Split", "Transpose", "View", "Flatten", "Unflatten")


class RandomExperts(MappedExperts):
    """Experts that never were on a disk, all in GPU memory."""

    def __init__(self, layout: ExpertLayout):
        super().__init__(PackedExperts(layout, {}))
        self.layers = {layer: self._random(layout, layer) for layer in layout.moe_layers}

    def _random(self, layout: ExpertLayout, layer: int) -> mx.array:
        """[num_experts, words]: random codes, scales and biases of a trained model's size."""
        blob = random_records(layout.records[layer], layout.num_experts).blob
        mx.eval(blob)
        return blob


def ours(args: ModelArgs, tiles: Tiles = CODE) -> Model:
    layout = ExpertLayout.from_args(args)
    quants = {path: stored_as(args, path, shape[-1]) for path, shape in needed(args)[0].items()}
    shapes = Shapes(args, layout, quants, mx.bfloat16)
    with compiling(shapes, tiles):
        model = Model(args, RoutedExperts(RandomExperts(layout)), tiles=tiles)
        randomise(model, "", shapes)
        mx.eval(model.parameters())
    return model


def theirs(config: dict) -> object:
    """mlx-lm's model of the same configuration, quantised as its converter does, layer by layer."""
    import importlib

    import mlx.nn as nn

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    predicate = getattr(model, "quant_predicate", None) or (lambda path, m: True)
    nn.quantize(model, 64, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and predicate(path, m))
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def prefill_seconds(model: object, tokens: mx.array) -> tuple[float, list]:
    cache = model.make_cache()
    start = time.perf_counter()
    mx.eval(model(tokens, cache=cache)[:, -1])
    return time.perf_counter() - start, cache


def decode(model: object, cache: list) -> dict[str, float]:
    """Rates of a greedy loop that builds the next token's graph while the GPU computes this one."""
    build, steps = [], []
    token = mx.array([[7]])

    def step(token: mx.array) -> mx.array:
        start = time.perf_counter()
        out = mx.argmax(model(token, cache=cache)[:, -1], axis=-1)[None]
        mx.async_eval(out)
        build.append(time.perf_counter() - start)
        return out

    token = step(token)
    for _ in range(WARMUP + TOKENS):
        start = time.perf_counter()
        following = step(token)
        token.item()
        token = following
        steps.append(time.perf_counter() - start)
    alone = synchronous(model, cache)
    median = statistics.median(steps[WARMUP:])
    return {
        "tokens_per_second": 1 / median,
        "build_and_encode_ms": 1e3 * statistics.median(build[WARMUP:]),
        "token_ms": 1e3 * median,
        "token_ms_without_overlap": alone,
    }


def synchronous(model: object, cache: list) -> float:
    times = []
    for i in range(24):
        start = time.perf_counter()
        mx.eval(mx.argmax(model(mx.array([[i]]), cache=cache)[:, -1]))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def launches(model: object, cache: list) -> dict[str, int]:
    """Operations of one token's graph, by name, that are not views."""
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), model(mx.array([[3]]), cache=cache)[:, -1])
        names = re.findall(r'label ?= ?"(\w+)", shape=rectangle', dot.read_text())
    counts: dict[str, int] = {}
    for name in names:
        if name not in QUIET:
            counts[name] = counts.get(name, 0) + 1
    return counts


def measure(name: str, model: object) -> dict[str, object]:
    tokens = mx.random.randint(0, 10000, (1, PROMPT))
    prefill_seconds(model, tokens)
    seconds, cache = prefill_seconds(model, tokens)
    result: dict[str, object] = {"prefill_tokens_per_second": PROMPT / seconds, **decode(model, cache)}
    counts = launches(model, cache)
    result["launches"] = sum(counts.values())
    print(f"{name:10s}", {k: round(v, 2) for k, v in result.items()}, flush=True)
    print(f"{'':10s}", dict(sorted(counts.items(), key=lambda item: -item[1])), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", default="qwen3.6-35b-a3b", choices=variants())
    parser.add_argument("--layers", type=int)
    parser.add_argument("--skip-mlx-lm", action="store_true")
    parser.add_argument("--tiles", default="code", help="auto, code or a file that moeflux tune wrote (%(default)s)")
    options = parser.parse_args()
    configure_mlx()  # as every command does; mlx-lm runs under the same settings
    config = shrunk(read_json(directory("configs") / f"{options.variant}.json"), options.layers, None)
    args = ModelArgs.from_dict(config)
    assert args.moe_layers, "more layers, please: the first ones have no experts"
    results = {"variant": options.variant, "layers": args.num_hidden_layers, "prompt": PROMPT}
    if not options.skip_mlx_lm:
        results["mlx_lm"] = measure("mlx-lm", theirs(config))
        mx.clear_cache()
    results["ours"] = measure("ours", ours(args, choose(options.tiles)))
    if not options.skip_mlx_lm:
        results["ratio"] = results["ours"]["tokens_per_second"] / results["mlx_lm"]["tokens_per_second"]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
