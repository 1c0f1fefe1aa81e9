#!/usr/bin/env python3
"""Compares prompts and decode of whole models on a GPU with mlx-lm's or mlx-vlm's model of the same shapes, in turns.

    scripts/bench/bench_decode.py [--variant qwen3.6-35b-a3b] [--layers N] [--against mlx-lm|mlx-vlm|none]
        [--prompt 512 4096] [--tokens 64] [--rounds 9] [--seconds S] [--tiles auto]

Both models are in memory at once, with every expert. Weights are random, 4 bits in groups of 64, drawn on the GPU, so
nothing is read from disk except rows of n-gram tables, which are cut to 20,000 rows a head for both (mlx-vlm: in one
shard, its fastest form). Each round gives a new random prompt to ours, by our `generate_step`, and to the other model,
by mlx-lm's, which cuts prompts into 2,048 tokens as mlx-vlm's own does. Prints a table for each length of prompt:
tokens per second of the prompt and of decoding after it (median and quartiles; ratios are taken within a round), and
peak memory of MLX's arrays, ours also against the plan. Ends with one JSON line, which also has the number of
operations of one token's graph that launch work.
"""

import argparse
import copy
import gc
import importlib
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from make_random_model import config_of
from measuring import print_table, quartiles, random_prompt, rounds_within, spread, turns
from mlx.utils import tree_flatten, tree_unflatten

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.tables import open_readers
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.formats.tables import FileRows, RowForm, TableFiles
from moeflux_mlx.kept.measured import choose_tiles
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.span import PromptSizes
from moeflux_mlx.model.tables import Tables
from moeflux_mlx.model.tensors import variant_bytes
from moeflux_mlx.opening.kernel_cache import compiling
from moeflux_mlx.opening.load_settings import LoadSettings
from moeflux_mlx.opening.random_weights import Shapes, random_experts, random_parts, randomise
from moeflux_mlx.ops.tiles import CODE, Tiles
from moeflux_mlx.planning.budget import plan_memory
from moeflux_mlx.planning.machine import Figures, default_dtype, machine_figures
from moeflux_mlx.planning.memory_plan import MemoryPlan
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.quant import Quant, Quantization
from moeflux_mlx.spec import ModelArgs, variants

WARMUP = 16  # tokens after a prompt that do not count
TABLE = {"ngram_vocab_size_base": 20_000, "split_ngram_parts": 1}
TABLE_QUANT = Quant(4, 32)  # its rows have 160 values
# Theirs, where they are not the model_type.
MODULES = {"hunyuan_v1_moe": "hunyuan", "inkling_mm_model": "inkling", "minimax_m2": "minimax"}
QUIET = ("Broadcast", "ExpandDims", "Squeeze", "Reshape", "Slice", "Split", "Transpose", "View", "Flatten", "Unflatten")


def ours(
    args: ModelArgs,
    tiles: Tiles = CODE,
    sizes: PromptSizes = PromptSizes(),  # noqa: B008
    tables: Tables | None = None,
) -> Model:
    shapes = Shapes.of_args(args, default_dtype())
    with compiling(shapes, tiles):
        model = Model(args, RoutedExperts(random_experts(shapes.layout)), sizes=sizes, tiles=tiles, tables=tables)
        randomise(model, "", shapes)
        mx.eval(model.parameters())
    return model


def add_variant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", default="qwen3.6-35b-a3b", choices=variants())
    parser.add_argument("--layers", type=int, help="of the variant; default: all")
    parser.add_argument("--tiny", action="store_true", help="with 8 experts and tiny widths, to see whether it runs")


def variant_config(options: argparse.Namespace) -> dict:
    return config_of(options.variant, options.layers, 8 if options.tiny else None, options.tiny)


def random_tables(args: ModelArgs) -> Tables | None:
    """Returns a reader of random rows of n-grams in files; None if the model has no such tables."""
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for layer, part in args.ngrams.items():
            parts = random_parts(TABLE_QUANT, (part.rows, part.width), mx.bfloat16)
            rows = np.array(mx.concatenate([values.view(mx.uint8) for values in parts], axis=1))
            path = Path(folder) / str(layer)
            path.write_bytes(rows.tobytes())
            form = RowForm(part.width, TABLE_QUANT, "BF16")
            files[layer] = TableFiles(form, [0], [[FileRows(path, 0, rows.shape[1])]], part.rows)
        return Tables(args.ngrams, open_readers(files)) if files else None  # open files outlive their names


class Logits:
    """Gives a language model of mlx-vlm the form of mlx-lm's models: it returns only logits."""

    def __init__(self, model: Any):
        self.model, self.layers, self.make_cache = model, model.layers, model.make_cache

    def __call__(self, tokens: mx.array, cache: list) -> mx.array:
        return self.model(tokens, cache=cache).logits


def theirs(config: dict, package: str = "mlx-lm") -> Any:
    """Returns the model of mlx-lm or mlx-vlm for the same configuration.

    It is quantised as its converter would, but with 4 bits where the converter chooses a floating-point format. Its
    weights are as random as ours.
    """
    kind, config = MODULES.get(config["model_type"], config["model_type"]), copy.deepcopy(config)
    if package == "mlx-lm":
        module = importlib.import_module(f"mlx_lm.models.{kind}")
        model = module.Model(module.ModelArgs.from_dict(config))
    else:
        module = importlib.import_module(f"mlx_vlm.models.{kind}.config")
        whole = module.ModelConfig.from_dict(config | {"vision_config": {}})
        module = importlib.import_module(f"mlx_vlm.models.{kind}.language")
        model = module.LanguageModel(getattr(whole, "text_config", whole))
        model.config = getattr(model, "config", None) or whole
    nn.quantize(model, 64, 4, class_predicate=partial(quantised, model))
    randomise_theirs(model, ModelArgs.from_dict(config).num_experts)
    return model if package == "mlx-lm" else Logits(model)


def quantised(model: nn.Module, path: str, module: nn.Module) -> bool | dict:
    """Returns whether a matrix is quantised, and how, if that differs from the default."""
    predicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    wanted = hasattr(module, "to_quantized") and predicate(path, module)
    columns = module.weight.shape[-1] if wanted else 0
    if not wanted or columns % 32:
        return False
    if columns % 64:
        return {"group_size": 32, "bits": 4}
    affine = isinstance(wanted, dict) and "bits" in wanted and wanted.get("mode", "affine") == "affine"
    return wanted if affine else True


def randomise_theirs(model: nn.Module, num_experts: int) -> None:
    """Gives every parameter, one after the other, random values as large as a trained model's."""
    casts = getattr(model, "cast_predicate", None) or (lambda path: True)
    matrices = {path: module for path, module in model.named_modules() if "scales" in module}
    for module in matrices.values():
        *rows, words = module.weight.shape
        shape = (*rows, words * 32 // module.bits)
        parts = random_parts(Quant(module.bits, module.group_size), shape, mx.bfloat16)
        module.weight, module.scales, module.biases = parts
        mx.eval(parts)
    for name, value in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        if leaf == "tid2eid":
            drawn = mx.random.randint(0, num_experts, value.shape, value.dtype)
        elif path in matrices or not mx.issubdtype(value.dtype, mx.floating):
            continue
        elif value.ndim > 1:
            drawn = mx.random.normal(value.shape) * value.shape[-1] ** -0.5
        else:
            drawn = mx.random.normal(value.shape) * 0.1 + (leaf == "weight")
        if mx.issubdtype(value.dtype, mx.floating):
            drawn = drawn.astype(mx.bfloat16 if casts(name) else mx.float32)
        model.update(tree_unflatten([(name, drawn)]))
    mx.eval(model.parameters())


def launches(model: Any) -> dict[str, int]:
    """Returns the operations of one token's graph that are not views, by name, the most frequent first."""
    if hasattr(model, "make_cache"):
        cache = model.make_cache()
    else:
        cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=cache))  # one token, whose kernels are compiled
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), model(mx.array([[3]]), cache=cache)[:, -1])
        names = re.findall(r'label ?= ?"(\w+)", shape=rectangle', dot.read_text())
    counts: dict[str, int] = {}
    for name in names:
        if name not in QUIET:
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def used_memory() -> int:
    """Returns the bytes of MLX's arrays without garbage, which may be freed at any time."""
    gc.collect()
    return mx.get_active_memory()


@dataclass
class Runner:
    """A model in memory: its `generate_step`, and the bytes of memory that it uses."""

    model: Any
    generate: Callable[..., Iterable]
    nbytes: int

    @classmethod
    def of(cls, make: Callable[[], Any], generate: Callable[..., Iterable]) -> "Runner":
        before = used_memory()
        model = make()
        return cls(model, generate, used_memory() - before)

    def run(self, prompt: list[int], tokens: int, text: list | None = None) -> dict[str, float]:
        """Returns the tokens per second of a prompt and, with enough `tokens`, of decoding after it, and the peak of
        this model's memory. `text`: the caches of what stands before.
        """
        mx.synchronize()
        others = used_memory() - self.nbytes
        mx.clear_cache()
        mx.reset_peak_memory()
        times = [time.perf_counter()]
        for _ in self.generate(mx.array(prompt), self.model, max_tokens=tokens, prompt_cache=text):
            times.append(time.perf_counter())
        gaps = np.diff(times[1 + WARMUP :])
        return {
            "prompt": len(prompt) / (times[1] - times[0]),
            **({"decode": 1 / statistics.median(gaps)} if len(gaps) else {}),
            "peak": mx.get_peak_memory() - others,
        }


def planned(args: ModelArgs, figures: Figures, tokens: int, **sizes: Any) -> MemoryPlan:
    """Returns the memory plan for `tokens` tokens with every expert in memory, and quantised matrices."""
    quantised = replace(args, quantization=args.quantization or Quantization())
    demand = LoadSettings(context=tokens, expert_io="mmap", **sizes).demand(
        quantised, variant_bytes(args, default_dtype()), default_dtype()
    )
    return plan_memory(args, ExpertLayout.from_args(args), figures, demand)


def planned_arrays(args: ModelArgs, figures: Figures, tokens: int, sizes: PromptSizes) -> int:
    """Returns the bytes of MLX's arrays that `planned` expects."""
    plan = planned(args, figures, tokens, set={"span": sizes.span}, prefill_step_size=sizes.block)
    return plan.fixed - plan.runtime + plan.experts


def measure(runners: dict[str, Runner], length: int, options: argparse.Namespace) -> dict[str, list[dict]]:
    """Returns the results of every round by name. One round before them does not count."""
    runs: dict[str, list[dict]] = {name: [] for name in runners}
    for i in rounds_within(options.rounds, options.seconds):
        prompt = random_prompt(runners["ours"].model, length, seed=i + 1)
        for name in turns(list(runners), i):
            run = runners[name].run(prompt, options.tokens)
            runs[name] += [run] if i >= 0 else []
            rates = f"prompt {run['prompt']:.1f}, decode {run['decode']:.2f} tokens/s"
            print(f"{length} tokens, {name}: {rates}" + ("" if i >= 0 else " (warm-up)"), flush=True)
    return runs


def report(runs: dict[str, list[dict]], length: int, plan_bytes: int) -> dict[str, Any]:
    """Prints and returns the medians and quartiles of one length of prompt."""
    table, result = [], {"prompt": length, "rounds": len(runs["ours"]), "planned": plan_bytes}
    for name, rounds in runs.items():
        own = {key: [run[key] for run in rounds] for key in ("prompt", "decode")}
        peak = max(run["peak"] for run in rounds)
        row = {"model": name} | {f"{key} tokens/s": spread(values, 1) for key, values in own.items()}
        table.append(row | {"peak GB": f"{peak / 1e9:.3f}"})
        result[name] = {key: quartiles(values) for key, values in own.items()} | {"peak": peak}
    for name in runs.keys() - {"ours"}:
        ratios = {
            key: [mine[key] / other[key] for mine, other in zip(runs["ours"], runs[name], strict=True)]
            for key in ("prompt", "decode")
        }
        table.append({"model": f"ours / {name}"} | {f"{key} tokens/s": spread(ratios[key]) for key in ratios})
        table[-1]["peak GB"] = f"{result['ours']['peak'] / result[name]['peak']:.3f}"
        result["ratio"] = {key: quartiles(values) for key, values in ratios.items()}
    result["peak / planned"] = result["ours"]["peak"] / plan_bytes
    print(f"{length} tokens; peak / planned {result['peak / planned']:.3f}")
    print_table(table)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_variant(parser)
    parser.add_argument("--against", choices=["mlx-lm", "mlx-vlm", "none"], default="mlx-lm", help="(%(default)s)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], help="lengths (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help=f"after a prompt, more than {WARMUP + 1} (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a length has no more rounds")
    parser.add_argument("--tiles", default="code", choices=("auto", "code"), help="(%(default)s)")
    options = parser.parse_args()
    configure_mlx()  # as every command does; the other model runs under the same settings
    config = variant_config(options)
    body = config.get("text_config", config)
    body |= TABLE if TABLE.keys() <= body.keys() else {}
    args = ModelArgs.from_dict(config)
    assert args.moe_layers, "more layers, please: the first ones have no experts"
    runners = {}
    if options.against != "none":
        step = importlib.import_module("mlx_lm.generate").generate_step
        runners[options.against] = Runner.of(lambda: theirs(config, options.against), step)
    figures = machine_figures()  # of the memory that the other model leaves free
    sizes = planned(args, figures, max(options.prompt) + options.tokens).sizes
    make = partial(ours, args, choose_tiles(options.tiles), sizes, random_tables(args))
    runners = {"ours": Runner.of(make, generate_step), **runners}
    rows = []
    for length in options.prompt:
        nbytes = planned_arrays(args, figures, length + options.tokens, sizes)
        rows.append(report(measure(runners, length, options), length, nbytes))
    total = {}
    for name, runner in runners.items():
        counts = launches(runner.model)
        total[name] = sum(counts.values())
        print(f"{name}: {total[name]} operations a token, {counts}", flush=True)
    case = {"variant": options.variant, "layers": args.num_hidden_layers, "span": sizes.span, "block": sizes.block}
    print(json.dumps(case | {"launches": total, "rows": rows}))


if __name__ == "__main__":
    main()
