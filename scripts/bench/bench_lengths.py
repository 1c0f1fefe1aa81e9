#!/usr/bin/env python3
"""Times decode and prompts over the length of the text before them, with random weights and resident experts, in turns
with mlx-lm's model of the same shapes.

    scripts/bench/bench_lengths.py [--variant qwen3.6-35b-a3b] [--layers N] [--lengths 512 4096 32768 131072]
        [--prompts 32 64 128 256 1024] [--kv-bits 16 8] [--against mlx-lm] [--bandwidth 4800] [--rounds 9] [--again 1]
        [--seconds S]

In each round every model computes a whole prompt of random tokens, then decodes and answers each short prompt in copies
of that text, `--again` times after one that does not count. Prints a table with tokens per second (median and
quartiles) and the peak of memory of the whole prompt, ours also over what is planned for it. "decode / bound" is the
time of a token over that in which 0.8 of the bandwidth reads the weights that a token uses and its keys and values.
Ends with one JSON line.
"""

import argparse
import copy
import importlib
import json
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from bench_decode import WARMUP, Runner, add_variant, ours, planned, planned_arrays, theirs, variant_config
from measuring import print_table, quartiles, random_prompt, rounds_within, shown, turns

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.mixers.registry import each_cache
from moeflux_mlx.model.tensors import variant_bytes
from moeflux_mlx.planning.machine import default_dtype, machine_figures
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs

USUAL = 0.8  # of a memory's bandwidth, which good kernels reach
WARM = 4096  # tokens of the longest prompt that does not count


def runners_of(config: dict, options: argparse.Namespace) -> dict[str, Runner]:
    """Returns our model with keys and values of each number of bits, and the other one."""
    args, figures, runners = ModelArgs.from_dict(config), machine_figures(), {}
    most = max(options.lengths) + max(options.prompts) + options.tokens
    args = replace(args, max_position_embeddings=max(args.max_position_embeddings, most))  # as those of longer texts
    for bits in options.kv_bits:
        kept = args.with_kv_bits(8 if bits == 8 else None)
        sizes = planned(kept, figures, most).sizes
        runners[f"ours {bits}"] = Runner.of(partial(ours, kept, sizes=sizes), generate_step)
    if options.against != "none":
        step = importlib.import_module("mlx_lm.generate").generate_step
        runners[options.against] = Runner.of(lambda: theirs(config), step)
    return runners


def empty_text(runner: Runner) -> list:
    if hasattr(runner.model, "make_cache"):
        return runner.model.make_cache()
    return importlib.import_module("mlx_lm.models.cache").make_prompt_cache(runner.model)


def own_copy(runner: Runner, text: list) -> list:
    """Returns a copy of a text with one more token, so that it shares no array which the next one fills."""
    copied = [layer.copy() if hasattr(layer, "copy") else copy.deepcopy(layer) for layer in text]
    runner.run([1], 1, copied)
    return copied


def one_round(runner: Runner, tokens: list[int], length: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns tokens per second of a prompt of `length` tokens, of decoding and of short prompts behind it, and the
    peak of memory, as often as `options` say.
    """
    text = empty_text(runner)
    rows, whole = [], runner.run(tokens[:length], 1, text)
    for _ in range(1 + options.again):
        run = runner.run(tokens[:1], options.tokens, own_copy(runner, text))
        row = {**whole, "decode": run["decode"]}
        for more in options.prompts:
            row[f"+{more}"] = runner.run(tokens[-more:], 1, own_copy(runner, text))["prompt"]
        rows.append(row)
    return rows[1:]


def bound_seconds(args: ModelArgs, length: int, bandwidth: float) -> float:
    """Returns the least seconds of a token behind `length` others, by bytes."""
    dtype, records = default_dtype(), ExpertLayout.from_args(args).records.values()
    weights = variant_bytes(args, dtype, of_token=True)
    experts = args.num_experts_per_tok * sum(record.held_bytes for record in records)
    state = sum(count * cache.step_bytes(length, dtype.size) for cache, count in each_cache(args.mixer_counts))
    return (weights + experts + state) / (USUAL * bandwidth)


def measure(runners: dict[str, Runner], length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the quartiles of each model. One round before the others does not count; its prompt is no longer than
    `WARM`.
    """
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for i in rounds_within(options.rounds, options.seconds):
        whole = length if i >= 0 else min(length, WARM)
        tokens = random_prompt(next(iter(runners.values())).model, whole + max(options.prompts), seed=i + 1)
        for name in turns(list(runners), i):
            runs = one_round(runners[name], tokens, whole, options)
            rounds[name] += runs if i >= 0 else []
            print(f"{length} tokens, {name}: {runs[-1]}" + ("" if i >= 0 else " (warm-up)"), flush=True)
    rows = []
    for name, runs in rounds.items():
        row: dict[str, Any] = {"length": length, "model": name}
        row |= {key: quartiles(run[key] for run in runs) for key in runs[0]}
        if name.startswith("ours"):
            model = runners[name].model
            least = bound_seconds(model.args, length, 1e9 * options.bandwidth)
            row["decode / bound"] = [1 / (rate * least) for rate in reversed(row["decode"])]
            nbytes = planned_arrays(model.args, machine_figures(), length + 1, model.sizes)
            row["peak / planned"] = max(run["peak"] for run in runs) / nbytes
        rows.append(row)
    return rows


def texts(row: dict[str, Any]) -> dict[str, str]:
    """Returns a row of the table."""
    peak, bound, share = row["peak"][-1] / 1e9, row.get("decode / bound"), row.get("peak / planned")
    rates = {key: shown(row[key], 1) for key in row if key in ("prompt", "decode") or key.startswith("+")}
    ends = {"peak GB": f"{peak:.3f}", "peak / planned": f"{share:.3f}" if share else "-"}
    ends["decode / bound"] = shown(bound) if bound else "-"
    return {"length": str(row["length"]), "model": row["model"], **rates, **ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_variant(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 32768, 131072], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 64, 128, 256, 1024], help="(%(default)s)")
    parser.add_argument("--kv-bits", type=int, nargs="+", default=[16, 8], choices=(16, 8), help="(%(default)s)")
    parser.add_argument("--against", choices=["mlx-lm", "none"], default="mlx-lm", help="(%(default)s)")
    parser.add_argument("--bandwidth", type=float, default=4800, help="of the memory, GB/s (%(default)s, an H200)")
    parser.add_argument("--tokens", type=int, default=64, help=f"decoded, more than {WARMUP + 1} (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--again", type=int, default=1, help="in a round, behind its prompt (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a length has no more rounds")
    options = parser.parse_args()
    configure_mlx()
    config = variant_config(options)
    runners, rows = runners_of(config, options), []
    for length in options.lengths:
        rows += measure(runners, length, options)
        print_table([texts(row) for row in rows])
    case = {"variant": options.variant, "layers": len(runners[f"ours {options.kv_bits[0]}"].model.layers)}
    print(json.dumps(case | {"device": mx.device_info().get("device_name"), "rows": rows}))


if __name__ == "__main__":
    main()
