#!/usr/bin/env python3
"""Measures streaming: generation under a memory limit for each way of reading ahead, and what loading takes.

    scripts/bench/bench_stream.py decode --model DIR --limit-gb 1.3
    scripts/bench/bench_stream.py forms --variant qwen3-30b-a3b --layers 8 [--modes affine q3_k iq2_xs iq3_xxs]
    scripts/bench/bench_stream.py places --model DIR --checkpoint DIR [--share 0.25] [--drive-mbps 500]
    scripts/bench/bench_stream.py load --model DIR
    scripts/bench/bench_stream.py host --model DIR

`decode` needs root and a version 1 memory control group: each run generates in a process of its own inside the limit,
the ways in turn. It reports tokens per second, hit rate, the share of the disk bound (bytes per token over the drive's
speed measured just before, against the time a token took), what computing alone costs (the same run with every expert
in memory), and peak rss + shmem beside the plan's figure. `forms` makes a random model for each form of experts, and
compares them in alternating rounds of one process, each pool holding the same share of the experts. `places` compares
the speed of a packed model with that of the checkpoint of the same weights, read in place, in alternating rounds of one
process (make_random_model.py writes both). `load` reads all experts of a model into memory and, in turn, the same files
with bare parallel reads, into memory that is used again and into memory that is new. `host` decodes with every expert
in the pool and nothing to read, and says what each part of the pool's work takes of a layer, and on a GPU what a
token takes beyond one whose experts are resident, and what it takes if the host waits for each router's choice. With
`--hits`, one of the experts that a layer will use is dropped before a token, of all but this share of the layers, and
the disk serves it. Reported are medians; the last line is JSON.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import make_random_model
import mlx.core as mx
import numpy as np
from measuring import decoded, in_turns, medians, model_option, print_figures, print_table, ratios, run_command, shown
from streamed import GROUPS, held_drive, leave, throttle

from moeflux_mlx.cli.planning import measure_disk
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.sampling import make_sampler
from moeflux_mlx.experts.memory import page_aligned
from moeflux_mlx.experts.resident import ResidentExperts
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops import backend
from moeflux_mlx.packing.located import Located
from moeflux_mlx.quant import MODES
from moeflux_mlx.spec import ModelArgs

WAYS = {"none": "off", "lookahead": "auto"}
THREADS = (2, 4, 8)
WAVE = 16  # experts in one request


def main() -> None:
    run_command(parser())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = made.add_subparsers(required=True)
    add_streaming(commands)
    add_places(commands)
    add_processes(commands)
    return made


def add_streaming(commands: Any) -> None:
    decode = commands.add_parser("decode")
    model_option(decode, bench_decode)
    decode.add_argument("--limit-gb", type=float, required=True)
    decode.add_argument("--rounds", type=int, default=7)
    decode.add_argument("--prompt-tokens", type=int, default=440)
    decode.add_argument("--max-tokens", type=int, default=64)
    decode.add_argument("--context", type=int, default=512)
    decode.add_argument("--temp", type=float, default=5.0, help="of sampling: text that repeats would repeat experts")
    decode.add_argument("--damping", type=float, default=1.0, help="multiplies what each layer adds; less: more alike")
    decode.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    decode.add_argument("--drive-mbps", type=float, help="slows the drive down to this (blkio control group)")
    forms = commands.add_parser("forms")
    forms.add_argument("--variant", default="qwen3-30b-a3b")
    forms.add_argument("--layers", type=int, default=8)
    forms.add_argument("--experts", type=int, help="keep only this many (default: all)")
    forms.add_argument("--tiny", action="store_true", help="tiny widths, where other forms may take a form's place")
    forms.add_argument("--modes", nargs="+", choices=MODES, default=["affine", "q3_k", "iq2_xs", "iq3_xxs"])
    add_rounds(forms)
    forms.add_argument("--folder", type=Path, help="of the models, about 3 GB each with 8 layers (default: temporary)")
    forms.set_defaults(run=bench_forms)


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `compared`."""
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that the pool holds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temp", type=float, default=5.0)
    parser.add_argument("--prefetch", choices=("auto", "off"), default="auto")


def add_places(commands: Any) -> None:
    places = commands.add_parser("places")
    model_option(places, bench_places)
    places.add_argument("--checkpoint", type=Path, required=True)
    add_rounds(places)
    places.add_argument("--drive-mbps", type=float, help="slows the drive down to this (blkio control group)")
    load = commands.add_parser("load")
    model_option(load, bench_load)
    load.add_argument("--rounds", type=int, default=5)
    host = commands.add_parser("host")
    model_option(host, bench_host)
    host.add_argument("--rounds", type=int, default=9)
    host.add_argument("--max-tokens", type=int, default=32)
    host.add_argument("--prefetch", choices=("auto", "off"), default="auto")
    host.add_argument("--hits", type=float, nargs="+", default=[], help="also with so many layers without a miss")


def add_processes(commands: Any) -> None:
    """Adds the commands that this script runs in other processes."""
    drive = commands.add_parser("drive", help="the drive's speed for `decode`; prints JSON")
    model_option(drive, run_drive)
    worker = commands.add_parser("worker", help="one run of `decode`; prints JSON")
    model_option(worker, run_worker)
    worker.add_argument("--prefetch", required=True)
    for name in ("prompt-tokens", "max-tokens", "context"):
        worker.add_argument(f"--{name}", type=int, required=True)
    for name in ("temp", "damping"):
        worker.add_argument(f"--{name}", type=float, required=True)
    worker.add_argument("--expert-io", required=True)


# Generation under a limit.


# The columns of the tables: what they show of a run.
COLUMNS = {
    "tok/s": lambda run: f"{1 / run['seconds_per_token']:.2f}",
    "hits": lambda run: f"{run['hit_rate']:.1%}",
    "found": lambda run: f"{run['found_ahead']:.1%}",
    "late": lambda run: f"{run['late']:.1%}",
    "MB/token": lambda run: f"{run['bytes_per_token'] / 1e6:.1f}",
    "waited": lambda run: f"{run['waited']:.1%}",
    "bound": lambda run: f"{run['bound_share']:.2f}",
    "drive GB/s": lambda run: f"{run['drive'] / 1e9:.2f}",
    "peak GB": lambda run: f"{run['peak'] / 1e9:.3f}",
    "plan GB": lambda run: f"{run['planned'] / 1e9:.3f}",
    "off by": lambda run: f"{run['peak'] / run['planned'] - 1:+.1%}",
}


def print_runs(compute: dict, rows: dict[str, dict]) -> None:
    """Prints the medians of each way."""
    print(f"computing alone: {1000 * compute['seconds_per_token']:.1f} ms a token (everything in memory)")
    print_table([{"": label} | {name: text(row) for name, text in COLUMNS.items()} for label, row in rows.items()])


def measured(options: argparse.Namespace, way: str, _: int) -> dict:
    """Runs one streamed generation within the limits. Just before, measures the drive's speed without one of memory."""
    speed = inside(["drive", "--model", options.model], limits(options, memory=False))["speed"]
    run = run_once(options, WAYS[way], "pread", limits(options))
    share = run["bytes_per_token"] / speed / run["seconds_per_token"]
    return run | {"drive": speed, "bound_share": share}


def bench_decode(options: argparse.Namespace) -> dict:
    compute = run_once(options, "off", "mmap", {})
    runs = {way: partial(measured, options, way) for way in options.ways}
    return report_decode(compute, in_turns(runs, options.rounds))


def report_decode(compute: dict, runs: dict[str, list]) -> dict:
    table = {way: medians(results) for way, results in runs.items()}
    print_runs(compute, table)
    if "none" in runs:
        for way, results in runs.items():
            seconds = ([run["seconds_per_token"] for run in every] for every in (runs["none"], results))
            _, ratio, _ = ratios(*seconds)
            table[way]["against_none"] = ratio
            print(f"{way}: {ratio:.3f} times the speed of none (median of rounds)")
    return {"bench": "decode", "compute_seconds_per_token": compute["seconds_per_token"], "ways": table}


def bench_places(options: argparse.Namespace) -> dict:
    """Measures the tokens per second of the packed model and of its checkpoint, one after the other in each round."""
    packed = open_weights(Located(options.model)).experts.layout.total_bytes
    paths = {"packed": options.model, "in place": options.checkpoint}
    with held_drive(options):
        table, faster = compared(options, {name: (path, packed) for name, path in paths.items()})
    return {"bench": "places", **table, "ratio": faster["in place"]}


def bench_forms(options: argparse.Namespace) -> dict:
    """Measures the tokens per second of models that differ in the form of their experts."""
    kept = [f"--experts={options.experts}"] * bool(options.experts) + ["--tiny"] * options.tiny
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        models = {}
        for mode in options.modes:
            path = Path(folder) / mode
            shape = [f"--variant={options.variant}", f"--layers={options.layers}", *kept]
            make_random_model.main([*shape, f"--expert-mode={mode}", str(path)])
            models[mode] = path, open_weights(Located(path)).experts.layout.total_bytes
        table, faster = compared(options, models)
    return {"bench": "forms", "variant": options.variant, "layers": options.layers, "forms": table, "ratios": faster}


def compared(options: argparse.Namespace, models: dict[str, tuple[Path, int]]) -> tuple[dict, dict]:
    """Measures the tokens per second of models, one after the other in each round, and closes them.

    Args:
        models: the path of each, and the bytes of which its pool holds a share.

    Returns:
        The medians of each, and quartiles of the ratio of its speed to the first one's.
    """
    engines = {
        name: open_engine(
            path,
            expert_io="pread",
            expert_cache_bytes=int(options.share * nbytes),
            prefetch=options.prefetch,
            warm_start="off",
            context=512,
        )
        for name, (path, nbytes) in models.items()
    }
    cases = {name: partial(decode_once, engine.model, options) for name, engine in engines.items()}
    runs = in_turns(cases, options.rounds)
    for engine in engines.values():
        engine.model.experts.close()
    table, faster, (first, *others) = {name: medians(results) for name, results in runs.items()}, {}, models
    print_figures(table)
    for name in others:
        faster[name] = ratios(*([run["tok/s"] for run in runs[one]] for one in (name, first)))
        print(f"{name} / {first}: {shown(faster[name], 3)}")
    return table, faster


def decode_once(model: Model, options: argparse.Namespace, seed: int) -> dict:
    """Generates once from an empty pool; the prompt is not counted."""
    model.experts.invalidate()
    seconds, stats = decoded(model, options, seed)
    return {
        "tok/s": options.max_tokens / seconds,
        "waited": stats.wait_seconds / seconds,
        "hits": stats.hit_rate,
        "MB/token": stats.bytes_read / options.max_tokens / 1e6,
        "GB/s": stats.gb_per_second,
    }


def timed(work) -> tuple[float, float]:
    """Returns (GB/s, CPU seconds per GB) of `work`, which returns the bytes."""
    wall, cpu = time.perf_counter(), time.process_time()
    gigabytes = work() / 1e9
    return gigabytes / (time.perf_counter() - wall), (time.process_time() - cpu) / gigabytes


def bench_load(options: argparse.Namespace) -> dict:
    """Measures the GB/s of reading all experts into memory that is kept, and of bare reads of as many bytes of the same
    files.

    Bare reads fill either the same memory again and again, which gives the drive's rate, or memory that is new to the
    process. New memory must be cleared by the system first, so this is the rate that a loader can reach at most. A
    first loading does not count, so that a virtual machine already has its memory.
    """
    files = open_weights(Located(options.model)).experts
    wanted = sum(one.size * files.layout.count(layer) for layer, one in files.layout.records.items())
    check = getattr(files, "check_scales", None)
    bare: dict[str, dict[int, list]] = {kind: {count: [] for count in THREADS} for kind in ("reused", "fresh")}
    loaded = []
    ResidentExperts(files, check=check).close()
    for _ in range(options.rounds):
        for (kind, runs), count in itertools.product(bare.items(), THREADS):
            runs[count].append(timed(lambda kind=kind, count=count: sequential_reads(files.sizes, wanted, count, kind)))
        loaded.append(timed(lambda: ResidentExperts(files, check=check) and wanted))
    rows = {f"{kind}, {count} threads": runs for kind in bare for count, runs in bare[kind].items()}
    speeds = {name: statistics.median(r[0] for r in runs) for name, runs in (rows | {"loading": loaded}).items()}
    for name, runs in (rows | {"loading": loaded}).items():
        print(f"{name:18} {speeds[name]:7.2f} GB/s {statistics.median(r[1] for r in runs):7.3f} CPU s/GB")
    faster = {}
    for kind in bare:
        best = max((name for name in rows if name.startswith(kind)), key=speeds.__getitem__)
        faster[kind] = ratios((one[0] for one in loaded), (other[0] for other in rows[best]))
        print(f"loading / bare reads into {best}: {shown(faster[kind])}")
    return {"bench": "load", "GB/s": speeds, "ratios": faster}


def sequential_reads(sizes: dict[Path, int], wanted: int, threads: int, kind: str) -> int:
    """Reads the files past the page cache in blocks of 4 MiB, until `wanted` bytes have arrived."""
    block = 4 << 20
    blocks = [(path, start) for path, size in sizes.items() for start in range(0, size, block)][: -(-wanted // block)]
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in sizes}
    places = page_aligned(threads if kind == "reused" else len(blocks), block // 4)
    memory, came = memoryview(places).cast("B"), [0] * threads

    def work(index: int) -> None:
        for i in range(index, len(blocks), threads):
            path, start = blocks[i]
            at = (i % len(places)) * block
            came[index] += os.preadv(files[path], [memory[at : at + block]], start)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    for file in files.values():
        os.close(file)
    return sum(came)


PARTS = (
    "request",
    "finish",
    "locate",
    "hint",
    "unpin",
    "table",
    "accept",
)  # the functions of a source that a layer calls


def bench_host(options: argparse.Namespace) -> dict:
    """Measures the microseconds that the host takes per layer."""
    plain = {"dtype": None, "context": 512, "prefetch": options.prefetch, "warm_start": "off"}
    pool = {"expert_cache_bytes": 1 << 60, "set": {"host_bytes": 0} if options.hits else {}}
    streamed = open_engine(options.model, expert_io="pread", **pool, **plain)
    layers, source = len(streamed.model.args.moe_layers), streamed.experts
    warm(source)
    ways = {"streamed": partial(token_seconds, streamed, options.max_tokens)}
    if backend.has_kernels():
        resident = open_engine(options.model, expert_io="resident", **plain)
        ways["waiting"] = partial(waiting_seconds, streamed, options.max_tokens)
        ways["resident"] = partial(token_seconds, resident, options.max_tokens)
    source.reset_stats()
    runs = in_turns(ways, options.rounds)
    parts = parts_of(streamed, options.max_tokens)
    missing = {share: with_misses(streamed, options, share) for share in options.hits}
    row = {name: 1e6 * statistics.median(times) / layers for name, times in runs.items()}
    row |= {
        "bench": "host",
        "pool": sum(parts.values()),
        "parts": parts,
        "misses": source.stats.misses,
        "layers": layers,
        "hits": missing,
    }
    if "resident" in runs:
        pairs = zip(runs["streamed"], runs["resident"], strict=True)
        row["beyond"] = 1e6 * statistics.median(one - other for one, other in pairs) / layers
    print(", ".join(f"{name} {value:.1f}" for name, value in row.items() if isinstance(value, float)), "us a layer")
    print(", ".join(f"{name} {value:.1f}" for name, value in parts.items()), "us of them")
    return row


class Used:
    """Notes the experts that each layer of a token uses, as a `RequestObserver`."""

    def __init__(self) -> None:
        self.experts: dict[int, list[int]] = {}

    def requested(self, layer: int, ids: np.ndarray, keys: list, ready: list) -> None:
        self.experts[layer] = [expert for _, expert in keys]


def with_misses(engine: Engine, options: argparse.Namespace, share: float) -> dict[str, Any]:
    """Milliseconds a layer if this share of the layers has all experts in memory: the host waits, or layers are queued;
    and how often a wait takes the time of queued layers.
    """
    source, model, ways = engine.experts, engine.model, {"waiting": None, "queued": engine.model.optimistic}
    used = [experts for experts, _ in dropping_tokens(engine, options.max_tokens, [], random.Random(0), share)]

    def layer_ms(name: str, number: int) -> float:
        model.optimistic = ways[name]
        rng = random.Random(number)
        times = [seconds for _, seconds in dropping_tokens(engine, options.max_tokens, used, rng, share)]
        return 1e3 * statistics.mean(times[options.max_tokens // 3 :]) / len(source.layout.moe_layers)

    runs = in_turns({name: partial(layer_ms, name) for name in ways}, options.rounds)
    model.optimistic = ways["queued"]
    row: dict[str, Any] = {name: statistics.median(took) for name, took in runs.items()}
    row["speed"] = ratios(runs["waiting"], runs["queued"])
    print(f"{share:.0%} of layers without a miss:", row)
    return row


def dropping_tokens(engine: Engine, count: int, used: list, rng: random.Random, share: float) -> Any:
    """Computes tokens, and yields the experts and the seconds of each. Before a token some of those that it will use
    are dropped, as `used` says.
    """
    source, cache, observer = engine.experts, engine.model.make_cache(), Used()
    warm(source)
    source.observer = observer
    for i in range(count):
        for layer, experts in used[i].items() if used else ():
            pool, key = source.pools.of[layer], (layer, rng.choice(experts))
            if rng.random() > share:
                source.drain()
                pool.finish_copies()
                pool.drop(key)
        start = time.perf_counter()
        mx.eval(engine.model(mx.array([[i * 37 % 251]]), cache))
        yield dict(observer.experts), time.perf_counter() - start
    source.observer = None


def warm(source: StreamedExperts) -> None:
    """Reads every expert, as many as the pool holds."""
    for layer in source.layout.moe_layers:
        for first in range(0, source.layout.num_experts, WAVE):
            ids = np.arange(first, min(first + WAVE, source.layout.num_experts))
            with source.turn(1), source.request(layer, ids) as lease:
                lease.wait()


def token_seconds(engine: Engine, tokens: int, _: int = 0) -> float:
    """Returns the seconds of a token whose logits are waited for."""
    model, times = engine.model, []
    cache = model.make_cache()
    for i in range(tokens):
        start = time.perf_counter()
        mx.eval(model(mx.array([[i * 37 % 251]]), cache))
        times.append(time.perf_counter() - start)
    return statistics.median(times[tokens // 4 :])


def waiting_seconds(engine: Engine, tokens: int, _: int) -> float:
    """As `token_seconds`, without layers that are queued ahead of their choice."""
    ahead, engine.model.optimistic = engine.model.optimistic, None
    try:
        return token_seconds(engine, tokens)
    finally:
        engine.model.optimistic = ahead


def parts_of(engine: Engine, tokens: int) -> dict[str, float]:
    """Returns the microseconds of processor time of each part of the source per layer, and those of the lookahead.

    Each is the median over the calls, because other programs would distort a mean.
    """
    source, ahead = engine.experts, engine.model.layers[-1].mlp.experts.lookahead
    spent: dict[str, list[float]] = {name: [] for name in (*PARTS, "lookahead")}

    def timed(name: str, call: Callable) -> Callable:
        def run(*given: object) -> object:
            start = time.thread_time()
            try:
                return call(*given)
            finally:
                spent[name].append(time.thread_time() - start)

        return run

    for name in PARTS:
        setattr(source, name, timed(name, getattr(source, name)))
    ahead.requested = timed("lookahead", ahead.requested)
    token_seconds(engine, tokens)
    for name in PARTS:
        delattr(source, name)
    del ahead.requested
    calls = tokens * len(engine.model.args.moe_layers)
    each = {name: 1e6 * statistics.median(seconds or [0.0]) * len(seconds) / calls for name, seconds in spent.items()}
    return {**each, "lookahead": each["lookahead"] - each["hint"]}


def run_drive(options: argparse.Namespace) -> dict:
    """Measures the bytes per second of bare parallel reads of whole experts."""
    return {"speed": measure_disk(PackedExperts.open(options.model, ModelArgs.from_file(options.model)))}


def run_once(options: argparse.Namespace, prefetch: str, expert_io: str, limits: dict[str, str]) -> dict:
    """Runs one generation in a process of its own."""
    arguments = ["worker", "--model", options.model, "--prefetch", prefetch, "--expert-io", expert_io]
    for name in ("prompt_tokens", "max_tokens", "context", "temp", "damping"):
        arguments += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return inside(arguments, limits)


def limits(options: argparse.Namespace, memory: bool = True) -> dict[str, str]:
    """Returns the files of version 1 control groups and what to write to them."""
    files = {"memory/memory.limit_in_bytes": str(int(options.limit_gb * 1e9))} if memory else {}
    if options.drive_mbps:
        files |= throttle([options.model], options.drive_mbps)
    return files


def inside(arguments: list, limits: dict[str, str]) -> dict:
    """Runs this script with other arguments in its own control groups. If memory is limited, also returns its peak."""
    name, enter, groups = f"moeflux-bench-{os.getpid()}", "", []
    for file, value in limits.items():
        controller, _, setting = file.partition("/")
        groups.append(GROUPS / controller / name)
        groups[-1].mkdir()
        for line in value.splitlines():  # the kernel accepts one device per write
            (groups[-1] / setting).write_text(line)
        enter += f"echo $$ > {groups[-1]}/cgroup.procs; "
    command = ["sh", "-c", f'{enter} exec "$@"', "sh", sys.executable, __file__, *map(str, arguments)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            peak = watch(process, GROUPS / "memory" / name)
            assert process.stdout is not None
            return {**json.loads(process.stdout.read().splitlines()[-1]), **peak}
    finally:
        for group in groups:
            leave(group)


def watch(process: subprocess.Popen, group: Path) -> dict:
    """Returns the peak of rss + shmem of a memory control group, if there is one, sampled every 10 ms."""
    peak = 0
    while process.poll() is None:
        if group.exists():
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            peak = max(peak, int(stat["total_rss"]) + int(stat["total_shmem"]))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"error: the run ended with {process.returncode}")
    return {"peak": peak}


def run_worker(options: argparse.Namespace) -> dict:
    ways = {name: getattr(options, name) for name in ("expert_io", "prefetch", "context")}
    engine = open_engine(options.model, warm_start="off", **ways)
    model = engine.model
    if options.damping != 1:
        damp(model, options.damping)
    mx.random.seed(0)
    sampler = make_sampler(temp=options.temp)
    prompt = np.random.default_rng(0).integers(0, 256, options.prompt_tokens).tolist()
    times: list[float] = []
    for _ in generate_step(prompt, model, max_tokens=options.max_tokens + 1, sampler=sampler):
        if not times:
            model.experts.drain()
            model.experts.reset_stats()
        times.append(time.perf_counter())
    model.experts.drain()
    stats, tokens = model.experts.stats, len(times) - 1
    seconds = times[-1] - times[0]
    return {
        "seconds_per_token": seconds / tokens,
        "bytes_per_token": stats.bytes_read / tokens,
        "hit_rate": stats.hit_rate,
        "found_ahead": stats.prefetch_hits / max(stats.hits + stats.misses, 1),
        "late": stats.late / max(stats.hits + stats.misses, 1),
        "waited": stats.wait_seconds / seconds,
        "planned": engine.plan.total,
    }


def damp(model, factor: float) -> None:
    """Makes each layer add less to the residual stream, as in trained models, so that layers see similar states."""
    routed = model.layers[model.args.moe_layers[0]].mlp.experts

    class Damped:
        def __getattr__(self, name):
            return getattr(routed, name)

        def __call__(self, routing, x, h_mid, *rest, compute=routed):
            return h_mid + factor * (compute(routing, x, h_mid, *rest) - h_mid)

        def from_table(self, *given):
            return partial(self, compute=routed.from_table(*given))

    embedding = model.model.embed_tokens
    for part in (embedding, *(last_of(model.layers[index]) for index in model.args.moe_layers)):
        part.scales *= model.args.hidden_size**0.5 if part is embedding else factor
        part.biases *= model.args.hidden_size**0.5 if part is embedding else factor
    for index in model.args.moe_layers:
        model.layers[index].mlp.experts = Damped()


def last_of(layer):
    """The matrix whose product a layer's mixer adds to the residual stream."""
    return layer.self_attn.o_proj if "self_attn" in layer else layer.linear_attn.out_proj


if __name__ == "__main__":
    main()
