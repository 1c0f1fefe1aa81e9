#!/usr/bin/env python3
"""Measures what host memory gains for experts that are streamed to a GPU: decode with it and without, and the bus.

    python scripts/bench/make_random_model.py --variant qwen3.5-397b-a17b --layers 4 DIR
    scripts/bench/bench_host_tier.py --model DIR [--share 0.25] [--rounds 9]

Two sources of the same model hold `--share` of the experts on the GPU; one of them has all experts in host memory too.
They decode in alternating rounds of one process, so that each round has the same random text. A round begins with what
the one before left. The bus is measured in the same rounds: the records that host memory has are copied to the device
as they are for a request, several at a time, with nothing else to do. `bus` of decode is the bytes copied in a round
over its seconds, relative to that rate. Reported are medians and quartiles; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from bench_stream import damp, warm
from measuring import decoded, in_turns, medians, print_figures, ratios, shown

from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops import backend
from moeflux_mlx.packing.located import Located

AT_ONCE = 10  # records that are copied at a time: a token's of one layer


def main() -> None:
    options = parser().parse_args()
    if backend.name() != "cuda":
        print("records are copied to CUDA devices only: here both sources are alike")
    engines = {name: opened(options, name == "host") for name in ("disk", "host")}
    fill(engines["host"].experts)
    cases = {name: partial(decode_once, engine, options) for name, engine in engines.items()}
    runs = in_turns({"bus": lambda _: bus_rate(engines["host"].experts), **cases}, options.rounds)
    report(runs, runs.pop("bus"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--share", type=float, default=0.25, help="of the experts that the GPU holds (%(default)s)")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--max-tokens", type=int, default=32)
    made.add_argument("--temp", type=float, default=5.0, help="of sampling: text that repeats would repeat experts")
    made.add_argument("--prefetch", default="auto")
    made.add_argument(
        "--damping", type=float, default=1.0, help="as bench_stream.py's; less: routing is foretold better"
    )
    return made


def opened(options: argparse.Namespace, on_host: bool) -> Engine:
    total = open_weights(Located(options.model)).experts.layout.total_bytes
    engine = open_engine(
        options.model,
        dtype=mx.bfloat16,
        expert_io="pread",
        expert_cache_bytes=int(options.share * total),
        set={} if on_host else {"host_bytes": 0},
        prefetch=options.prefetch,
        warm_start="off",
        context=512,
    )
    if options.damping != 1:
        damp(engine.model, options.damping)
    return engine


def fill(source: StreamedExperts) -> None:
    """Lets every expert be used once, so that host memory has all."""
    warm(source)
    source.drain()


def decode_once(engine: Engine, options: argparse.Namespace, seed: int) -> dict:
    seconds, stats = decoded(engine.model, options, seed)
    asked = stats.hits + stats.misses
    return {
        "tok/s": options.max_tokens / seconds,
        "on the GPU": (stats.hits - stats.host_hits) / asked,
        "on the host": stats.host_hits / asked,
        "read MB/token": stats.bytes_read / options.max_tokens / 1e6,
        "copied MB/token": stats.host_bytes / options.max_tokens / 1e6,
        "copied GB/s": stats.host_bytes / seconds / 1e9,
    }


def bus_rate(source: StreamedExperts, copies: int = 100) -> float:
    """GB/s at which records of host memory reach the device, with nothing else to do."""
    (pool,) = source.pools
    pool.finish_copies()
    staging = pool.staging
    if staging is None:
        return float("nan")
    rows = np.random.default_rng(0).permutation(staging.host.owned)[:copies].tolist()
    start = time.perf_counter()
    for first in range(0, len(rows), AT_ONCE):
        mx.eval([staging._copy(row) for row in rows[first : first + AT_ONCE]])
    return len(rows) * pool.nbytes / (time.perf_counter() - start) / 1e9


def report(runs: dict[str, list[dict]], bus: list[float]) -> None:
    table = {name: medians(rows) for name, rows in runs.items()}
    print_figures(table)
    faster = ratios(*([row["tok/s"] for row in runs[name]] for name in ("host", "disk")))
    share = ratios((row["copied GB/s"] for row in runs["host"]), bus)
    print(f"bus {statistics.median(bus):.2f} GB/s; host / disk: {shown(faster)}; bus, of its rate: {shown(share)}")
    print(json.dumps({"bench": "host tier", **table, "bus": statistics.median(bus), "faster": faster, "share": share}))


if __name__ == "__main__":
    main()
