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
from bench_kernels import random_words
from mlx.utils import tree_flatten

from moeflux_mlx.cli.run import configure_mlx
from moeflux_mlx.engine.tiles import choose
from moeflux_mlx.experts.mapped import MappedExperts
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.files import directory, read_json
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.layers import Weight
from moeflux_mlx.model.tensors import KEPT_FLOAT32, ROUTER_BITS, ROUTERS
from moeflux_mlx.model.weights import arrange
from moeflux_mlx.ops.tiles import CODE, Tiles
from moeflux_mlx.quant import DEFAULT, Quant
from moeflux_mlx.spec import ModelArgs, variants

PROMPT, TOKENS, WARMUP = 512, 96, 16
STEPS = {"scales": 1.0, "biases": -7.5}  # of codes; what a product adds is 0
QUIET = ("Broadcast", "ExpandDims", "Squeeze", "Reshape", "Slice", "Split", "Transpose", "View", "Flatten", "Unflatten")


class RandomExperts(MappedExperts):
    """Experts that never were on a disk, all in GPU memory."""

    def __init__(self, layout: ExpertLayout):
        super().__init__(PackedExperts(layout, {}))
        self.layers = {layer: random_blob(layout) for layer in layout.moe_layers}


def random_blob(layout: ExpertLayout) -> mx.array:
    """[num_experts, words]: random codes, scales and biases of a trained model's size."""
    record = layout.record
    blob = random_words(layout.num_experts, record.stride // 4)
    for c in record.fields:
        if c.dtype == "BF16":
            value = record.hidden_size**-0.5 / 4.6 * STEPS.get(c.part, 0.0)
            words = mx.full((layout.num_experts, c.size // 2), value, mx.bfloat16).view(mx.uint32)
            blob[:, c.offset // 4 : c.end // 4] = words
    mx.eval(blob)
    return blob


def random_resident(model: Model, args: ModelArgs) -> None:
    matrices = {path: module for path, module in model.named_modules() if isinstance(module, Weight)}
    for path, module in matrices.items():
        router = path.endswith(ROUTERS)
        quantise(module, ROUTER_BITS if router else DEFAULT.bits, mx.float32 if router else mx.bfloat16)
    for name, parameter in tree_flatten(model.parameters()):
        owner, _, leaf = name.rpartition(".")
        if owner not in matrices:
            dtype = mx.float32 if leaf in KEPT_FLOAT32 else mx.bfloat16
            target = model
            for part in owner.split("."):
                target = target[int(part)] if isinstance(target, list) else getattr(target, part)
            setattr(target, leaf, (mx.random.normal(parameter.shape) * 0.1 + (leaf == "weight")).astype(dtype))
    arrange(model)
    mx.eval(model.parameters())


def quantise(module: Weight, bits: int, dtype: mx.Dtype) -> None:
    *rows, cols = module.shape
    module.quant = Quant(bits, DEFAULT.group_size)
    shape = (*rows, cols * bits // 32)
    module.weight = random_words(*shape)
    step = cols**-0.5 / (4.6 * 2 ** (bits - 4))
    module.scales = mx.full((*rows, cols // 64), step, dtype)
    module.biases = mx.full((*rows, cols // 64), -step * (2**bits - 1) / 2, dtype)
    mx.eval(module.weight, module.scales, module.biases)


def ours(args: ModelArgs, tiles: Tiles = CODE) -> Model:
    model = Model(args, RoutedExperts(RandomExperts(ExpertLayout.from_args(args))), tiles=tiles)
    random_resident(model, args)
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
    config = read_json(directory("configs") / f"{options.variant}.json")
    body = config.get("text_config", config)
    if options.layers:
        body["num_hidden_layers"] = options.layers
        if "layer_types" in body:
            body["layer_types"] = body["layer_types"][: options.layers]
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
