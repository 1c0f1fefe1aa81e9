#!/usr/bin/env python3
"""Measures streaming: the loader against the drive, and generation under a memory limit for each way of reading ahead.

    scripts/bench/bench_stream.py loader [--folder DIR]
    scripts/bench/bench_stream.py decode --model DIR --limit-gb 1.3 [--busy-disk]
    scripts/bench/bench_stream.py pool --model DIR --shares 0.25 0.5
    scripts/bench/bench_stream.py forms --variant qwen3-30b-a3b --layers 8 [--modes affine q3_k iq2_xs iq3_xxs]
    scripts/bench/bench_stream.py places --model DIR --checkpoint DIR [--share 0.25] [--drive-mbps 500]
    scripts/bench/bench_stream.py drives --model DIR --one DIR [--drive-mbps 150]
    scripts/bench/bench_stream.py load --model DIR
    scripts/bench/bench_stream.py host --model DIR

`loader` reads experts (7 MB, Qwen3.5-397B's) through the loader and, in turn, with bare O_DIRECT reads from as many
threads, the best of several counts being the ceiling. `decode` needs root and a version 1 memory control group: each
run generates in a process of its own inside the limit, the ways in turn. It reports tokens per second, hit rate, the
share of the disk bound (bytes per token over the drive's speed measured just before, against the time a token took),
what computing alone costs (the same run with every expert in memory), and peak rss + shmem beside the plan's figure.
`pool` does the same without a limit, the pool holding a share of the experts: for GPUs, whose peak memory it reports.
`forms` makes a random model for each form of experts, and compares them in alternating rounds of one process, each
pool holding the same share of the experts. `places` compares the speed of a packed model with that of the checkpoint
of the same weights, read in place, in alternating rounds of one process (make_random_model.py writes both). `drives`
compares a model whose experts lie on several drives (`convert --also`) with the same on one, in decode and in a
prompt that begins with an empty pool. `load` reads all experts of a model into memory and, in turn, the same files
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
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import make_random_model
import mlx.core as mx
import numpy as np

from moeflux_mlx.cli.known_models import measure_disk
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.sampling import make_sampler
from moeflux_mlx.errors import MoefluxError
from moeflux_mlx.experts.memory import page_aligned
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.experts.whole import ResidentExperts
from moeflux_mlx.formats.packed import PackedExperts, open_packed
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.opening.engine import Engine, open_engine
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops import backend
from moeflux_mlx.packing.located import Located
from moeflux_mlx.quant import MODES
from moeflux_mlx.spec import ModelArgs, variants

GROUPS = Path("/sys/fs/cgroup")
WAYS = {"none": "off", "lookahead": "auto"}
THREADS = (2, 4, 8)
WAVE = 16  # experts in one request of the loader benchmark


def main() -> None:
    options = parser().parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    try:
        report = options.run(options)
    except MoefluxError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps({"load_average": os.getloadavg()[0], **report}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = made.add_subparsers(required=True)
    add_streaming(commands)
    add_places(commands)
    add_processes(commands)
    return made


def add_streaming(commands: Any) -> None:
    loader = commands.add_parser("loader")
    loader.add_argument("--folder", type=Path, default=Path(), help="on the drive to measure; 2 GB are written there")
    loader.add_argument("--variant", default="qwen3.5-397b-a17b", choices=variants(), help="whose experts are written")
    loader.add_argument("--experts", type=int, default=128, help="of each of two layers (%(default)s)")
    loader.add_argument("--rounds", type=int, default=5)
    loader.set_defaults(run=bench_loader)
    decode = commands.add_parser("decode")
    decode.add_argument("--model", type=Path, required=True)
    decode.add_argument("--limit-gb", type=float, required=True)
    decode.add_argument("--rounds", type=int, default=7)
    decode.add_argument("--prompt-tokens", type=int, default=440)
    decode.add_argument("--max-tokens", type=int, default=64)
    decode.add_argument("--context", type=int, default=512)
    decode.add_argument("--temp", type=float, default=5.0, help="of sampling: text that repeats would repeat experts")
    decode.add_argument("--damping", type=float, default=1.0, help="multiplies what each layer adds; less: more alike")
    decode.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    decode.add_argument("--drive-mbps", type=float, help="slows the drive down to this (blkio control group)")
    decode.add_argument("--busy-disk", action="store_true", help="other threads read the same drive all the time")
    decode.set_defaults(run=bench_decode)
    pool = commands.add_parser("pool")
    pool.add_argument("--model", type=Path, required=True)
    pool.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    pool.add_argument("--rounds", type=int, default=3)
    pool.add_argument("--prompt-tokens", type=int, default=16)
    pool.add_argument("--max-tokens", type=int, default=48)
    pool.add_argument("--context", type=int, default=512)
    pool.add_argument("--temp", type=float, default=5.0)
    pool.add_argument("--damping", type=float, default=1.0)
    pool.add_argument("--ways", nargs="+", choices=WAYS, default=["none", "lookahead"])
    pool.set_defaults(run=bench_pool)
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
    places.add_argument("--model", type=Path, required=True)
    places.add_argument("--checkpoint", type=Path, required=True)
    add_rounds(places)
    places.add_argument("--drive-mbps", type=float, help="slows the drive down to this (blkio control group)")
    places.set_defaults(run=bench_places)
    drives = commands.add_parser("drives")
    drives.add_argument("--model", type=Path, required=True, help="on several drives")
    drives.add_argument("--one", type=Path, required=True, help="the same on one")
    drives.add_argument("--share", type=float, default=0.25, help="of the experts that the pool holds")
    drives.add_argument("--rounds", type=int, default=5)
    drives.add_argument("--max-tokens", type=int, default=16)
    drives.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    drives.add_argument("--temp", type=float, default=5.0)
    drives.add_argument("--drive-mbps", type=float, help="slows each drive down to this (blkio control group)")
    drives.set_defaults(run=bench_drives)
    load = commands.add_parser("load")
    load.add_argument("--model", type=Path, required=True)
    load.add_argument("--rounds", type=int, default=5)
    load.set_defaults(run=bench_load)
    host = commands.add_parser("host")
    host.add_argument("--model", type=Path, required=True)
    host.add_argument("--rounds", type=int, default=9)
    host.add_argument("--max-tokens", type=int, default=32)
    host.add_argument("--prefetch", choices=("auto", "off"), default="auto")
    host.add_argument("--hits", type=float, nargs="+", default=[], help="also with so many layers without a miss")
    host.set_defaults(run=bench_host)


def add_processes(commands: Any) -> None:
    """Adds the commands that this script runs in other processes."""
    drive = commands.add_parser("drive", help="the drive's speed for `decode`; prints JSON")
    drive.add_argument("--model", type=Path, required=True)
    drive.set_defaults(run=run_drive)
    worker = commands.add_parser("worker", help="one run of `decode`; prints JSON")
    for name in ("model", "prefetch"):
        worker.add_argument(f"--{name}", required=True)
    for name in ("prompt-tokens", "max-tokens"):
        worker.add_argument(f"--{name}", type=int, required=True)
    for name in ("context", "prefill-step-size"):
        worker.add_argument(f"--{name}", type=int, help="default: planned")
    for name in ("temp", "damping"):
        worker.add_argument(f"--{name}", type=float, required=True)
    worker.add_argument("--expert-io", default="pread")
    worker.add_argument("--share", type=float, help="of the experts that the pool holds; default: planned")
    worker.set_defaults(run=run_worker)


# The loader against the drive.


def bench_loader(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        packed = write_experts(Path(folder), options)
        raw: dict[int, list] = {count: [] for count in THREADS}
        loaded = []
        loader = StreamedExperts(packed, cache_bytes=1, least_slots=2 * WAVE)
        loader_reads(loader)  # fresh memory costs page faults at its first use, once in the life of a model
        for _ in range(options.rounds):
            for count in THREADS:
                raw[count].append(timed(lambda count=count: raw_reads(packed, shuffled(packed.layout), count)))
            loaded.append(timed(lambda: loader_reads(loader)))
        loader.close()
    ceilings = [max(raw[count][i][0] for count in THREADS) for i in range(options.rounds)]
    ratios = [speed / ceiling for (speed, _), ceiling in zip(loaded, ceilings, strict=True)]
    rows = {f"{count} threads": raw[count] for count in THREADS} | {"loader": loaded}
    print(f"{'':12} {'GB/s':>7} {'CPU s/GB':>9}")
    for name, runs in rows.items():
        print(f"{name:12} {median(r[0] for r in runs):7.2f} {median(r[1] for r in runs):9.3f}")
    print(f"loader / best of the bare reads in the same round: {median(ratios):.2f}")
    return {
        "bench": "loader",
        "expert_bytes": packed.layout.record.stride,
        "GB/s": {name: median(r[0] for r in runs) for name, runs in rows.items()},
        "CPU s/GB": {name: median(r[1] for r in runs) for name, runs in rows.items()},
        "ratio": median(ratios),
    }


def write_experts(folder: Path, options: argparse.Namespace) -> PackedExperts:
    """Writes two layers of experts. The bytes are random and written past the page
    cache.
    """
    full = ExpertLayout.from_args(ModelArgs.from_variant(options.variant))
    layout = ExpertLayout(dict.fromkeys((0, 1), full.record), options.experts, 2)
    block = os.urandom(layout.record.stride)
    packed = PackedExperts(layout, [folder])
    for path in packed.paths.values():
        with open(path, "wb") as file:
            for _ in range(layout.num_experts):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return packed


def shuffled(layout: ExpertLayout) -> list[tuple[int, int]]:
    blocks = [(layer, expert) for layer in layout.moe_layers for expert in range(layout.num_experts)]
    random.Random(0).shuffle(blocks)
    return blocks


def raw_reads(packed: PackedExperts, blocks: list[tuple[int, int]], threads: int) -> int:
    """Reads whole records past the page cache, with nothing but system calls. Returns the bytes."""
    files = {layer: os.open(path, os.O_RDONLY | os.O_DIRECT) for layer, path in packed.paths.items()}
    layout = packed.layout
    memory, sizes = (
        page_aligned(threads, layout.held_bytes // 4),
        {layer: layout.records[layer].held_bytes for layer in files},
    )

    def work(index: int) -> None:
        target = memoryview(memory[index]).cast("B")
        for layer, expert in blocks[index::threads]:
            os.preadv(files[layer], [target[: sizes[layer]]], layout.start(layer, expert))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    for file in files.values():
        os.close(file)
    return sum(sizes[layer] for layer, _ in blocks)


def loader_reads(loader: StreamedExperts) -> int:
    """Reads every expert once, in waves. Each wave is requested before the wave in front of it is waited for."""
    loader.invalidate()
    loader.reset_stats()
    blocks, waves = shuffled(loader.layout), []
    for layer in loader.layout.moe_layers:
        experts = [expert for own, expert in blocks if own == layer]
        waves += [(layer, experts[i : i + WAVE]) for i in range(0, len(experts), WAVE)]
    for (layer, experts), (after, following) in zip(waves, [*waves[1:], (0, [])], strict=True):
        batch = loader.request(layer, np.array(experts))
        loader.hint([(after, expert) for expert in following])
        batch.wait()
        batch.release()
    return loader.stats.bytes_read


def timed(work) -> tuple[float, float]:
    """Returns (GB/s, CPU seconds per GB) of `work`, which returns the bytes."""
    wall, cpu = time.perf_counter(), time.process_time()
    gigabytes = work() / 1e9
    return gigabytes / (time.perf_counter() - wall), (time.process_time() - cpu) / gigabytes


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
    "pool GB": lambda run: f"{run['pool'] / 1e9:.3f}",
    "device GB": lambda run: f"{run['device_peak'] / 1e9:.3f}",
}
SHARED = ("tok/s", "hits", "found", "late", "MB/token", "waited", "bound", "drive GB/s")


def print_table(compute: dict, rows: dict[str, dict], extra: tuple[str, ...]) -> None:
    """Prints one line for each of `rows`: its label and medians."""
    columns = SHARED + extra
    print(f"computing alone: {1000 * compute['seconds_per_token']:.1f} ms a token (everything in memory)")
    print(f"{'':14} " + " ".join(f"{name:>10}" for name in columns))
    for label, middle in rows.items():
        print(f"{label:14} " + " ".join(f"{COLUMNS[name](middle):>10}" for name in columns))


def medians(results: list[dict]) -> dict:
    return {key: median(run[key] for run in results) for key in results[0]}


def measured(options: argparse.Namespace, way: str, held: dict[str, str], drive: dict[str, str], **more) -> dict:
    """Runs one streamed generation in the control groups `held`. Just before, measures the drive's speed in the groups
    `drive`.
    """
    speed = inside(["drive", "--model", options.model], drive)["speed"]
    run = run_once(options, WAYS[way], "pread", held, **more)
    share = run["bytes_per_token"] / speed / run["seconds_per_token"]
    return run | {"drive": speed, "bound_share": share}


def bench_decode(options: argparse.Namespace) -> dict:
    compute = run_once(options, "off", "mmap", {})
    runs: dict[str, list] = {way: [] for way in options.ways}
    stop = threading.Event()
    other = [threading.Thread(target=keep_busy, args=(options.model, i, stop)) for i in range(4 * options.busy_disk)]
    for thread in other:
        thread.start()
    for i in range(options.rounds):
        for way in options.ways[i % len(options.ways) :] + options.ways[: i % len(options.ways)]:
            runs[way].append(measured(options, way, limits(options), limits(options, memory=False)))
    stop.set()
    for thread in other:
        thread.join()
    return report_decode(compute, runs)


def report_decode(compute: dict, runs: dict[str, list]) -> dict:
    table = {way: medians(results) for way, results in runs.items()}
    print_table(compute, table, ("peak GB", "plan GB", "off by"))
    if "none" in runs:
        for way, results in runs.items():
            pairs = zip(runs["none"], results, strict=True)
            ratio = median(none["seconds_per_token"] / run["seconds_per_token"] for none, run in pairs)
            table[way]["against_none"] = ratio
            print(f"{way}: {ratio:.3f} times the speed of none (median of rounds)")
    return {"bench": "decode", "compute_seconds_per_token": compute["seconds_per_token"], "ways": table}


def bench_pool(options: argparse.Namespace) -> dict:
    compute = run_once(options, "off", "mmap", {})
    runs: dict[tuple[float, str], list] = {(share, way): [] for share in options.shares for way in options.ways}
    for _ in range(options.rounds):
        for (share, way), results in runs.items():
            results.append(measured(options, way, {}, {}, share=share))
    table = {case: medians(results) for case, results in runs.items()}
    print_table(compute, {f"{share:.0%} {way}": row for (share, way), row in table.items()}, ("pool GB", "device GB"))
    rows = [{"share": share, "prefetch": way, **row} for (share, way), row in table.items()]
    return {"bench": "pool", "compute_seconds_per_token": compute["seconds_per_token"], "rows": rows}


def bench_places(options: argparse.Namespace) -> dict:
    """Measures the tokens per second of the packed model and of its checkpoint, one after the other in each round."""
    if options.drive_mbps:
        names = ("model", "checkpoint", "share", "rounds", "max_tokens", "temp", "prefetch")
        given = [text for name in names for text in (f"--{name.replace('_', '-')}", getattr(options, name))]
        return inside(["places", *given], limits(options, memory=False))
    packed = open_weights(Located(options.model)).experts.layout.total_bytes
    paths = {"packed": options.model, "in place": options.checkpoint}
    table, ratios = compared(options, {name: (path, packed) for name, path in paths.items()})
    return {"bench": "places", **table, "ratio": ratios["in place"]}


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
        table, ratios = compared(options, models)
    return {"bench": "forms", "variant": options.variant, "layers": options.layers, "forms": table, "ratios": ratios}


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
    runs: dict[str, list] = {name: [] for name in engines}
    for i in range(-1, options.rounds):  # the first round warms up
        for name in sorted(engines, reverse=bool(i % 2)):
            speed = decode_once(engines[name].model, options, seed=i + 1)
            runs[name] += [speed] if i >= 0 else []
    for engine in engines.values():
        engine.model.experts.close()
    table, ratios, (first, *others) = {name: medians(results) for name, results in runs.items()}, {}, models
    for name, row in table.items():
        print(f"{name:10} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    for name in others:
        pairs = zip(runs[first], runs[name], strict=True)
        ratios[name] = quartiles([other["tok/s"] / one["tok/s"] for one, other in pairs])
        print("{} / {}: {:.3f} ({:.3f}-{:.3f})".format(name, first, *ratios[name]))
    return table, ratios


def bench_drives(options: argparse.Namespace) -> dict:
    """Measures the tokens per second of a model on several drives and of the same model on one, alternating in each
    round.
    """
    if options.drive_mbps:
        names = ("model", "one", "share", "rounds", "max_tokens", "prompt", "temp")
        given = [text for name in names for text in (f"--{name.replace('_', '-')}", getattr(options, name))]
        return inside(["drives", *given], throttle([options.model, options.one], options.drive_mbps))
    engines = {}
    for name, path in (("one", options.one), ("several", options.model)):
        pool = int(options.share * open_weights(Located(path)).experts.layout.total_bytes)
        engines[name] = open_engine(path, expert_io="pread", expert_cache_bytes=pool, context=512, warm_start="off")
    runs: dict[str, list] = {name: [] for name in engines}
    for i in range(-1, options.rounds):  # the first round warms up
        for name in sorted(engines, reverse=bool(i % 2)):
            row = decode_once(engines[name].model, options, seed=i + 1) | prompt_once(engines[name].model, options)
            runs[name] += [row] if i >= 0 else []
    table = {name: medians(rows) for name, rows in runs.items()}
    for name, row in table.items():
        print(f"{name:10} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    ratios = {
        key: quartiles([b[key] / a[key] for a, b in zip(runs["one"], runs["several"], strict=True)])
        for key in ("tok/s", "prompt tok/s")
    }
    for key, ratio in ratios.items():
        print("several / one, {}: {:.3f} ({:.3f}-{:.3f})".format(key, *ratio))
    return {"bench": "drives", **table, "ratios": ratios}


def prompt_once(model, options: argparse.Namespace) -> dict:
    """Computes one prompt from an empty pool."""
    model.experts.invalidate()
    prompt, start = np.random.default_rng(0).integers(0, 256, options.prompt).tolist(), time.perf_counter()
    next(generate_step(prompt, model, max_tokens=1))
    return {"prompt tok/s": options.prompt / (time.perf_counter() - start)}


def decode_once(model, options: argparse.Namespace, seed: int) -> dict:
    """Generates once from an empty pool; the prompt is not counted."""
    model.experts.invalidate()
    mx.random.seed(seed)
    prompt = np.random.default_rng(seed).integers(0, 256, 4).tolist()
    start, sampler = 0.0, make_sampler(temp=options.temp)
    for i, _ in enumerate(generate_step(prompt, model, max_tokens=options.max_tokens + 1, sampler=sampler)):
        if i == 0:
            model.experts.drain()
            model.experts.reset_stats()
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    stats = model.experts.stats
    return {
        "tok/s": options.max_tokens / seconds,
        "waited": stats.wait_seconds / seconds,
        "hits": stats.hit_rate,
        "MB/token": stats.bytes_read / options.max_tokens / 1e6,
        "GB/s": stats.gb_per_second,
    }


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
    for name, runs in (rows | {"loading": loaded}).items():
        print(f"{name:18} {median(r[0] for r in runs):7.2f} GB/s {median(r[1] for r in runs):7.3f} CPU s/GB")
    speeds = {name: median(r[0] for r in runs) for name, runs in (rows | {"loading": loaded}).items()}
    ratios = {}
    for kind in bare:
        best = max((name for name in rows if name.startswith(kind)), key=speeds.__getitem__)
        pairs = zip(loaded, rows[best], strict=True)
        ratios[kind] = quartiles([one[0] / other[0] for one, other in pairs])
        print("loading / bare reads into {}: {:.2f} ({:.2f}-{:.2f})".format(best, *ratios[kind]))
    return {"bench": "load", "GB/s": speeds, "ratios": ratios}


def quartiles(values: list[float]) -> list[float]:
    """Returns the median and the quartiles around it."""
    return np.quantile(values, (0.5, 0.25, 0.75)).tolist()


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

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
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
    for way in ways.values():
        way()
    source.reset_stats()
    runs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            runs[name].append(way())
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
    runs: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(-2, options.rounds):  # the first two warm up
        for name in sorted(ways, reverse=bool(i % 2)):
            model.optimistic = ways[name]
            rng = random.Random(i)
            times = [seconds for _, seconds in dropping_tokens(engine, options.max_tokens, used, rng, share)]
            took = 1e3 * statistics.mean(times[options.max_tokens // 3 :]) / len(source.layout.moe_layers)
            runs[name] += [took] if i >= 0 else []
    model.optimistic = ways["queued"]
    row = {name: statistics.median(took) for name, took in runs.items()}
    row["speed"] = quartiles([one / other for one, other in zip(runs["waiting"], runs["queued"], strict=True)])
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


def token_seconds(engine: Engine, tokens: int) -> float:
    """Returns the seconds of a token whose logits are waited for."""
    model, times = engine.model, []
    cache = model.make_cache()
    for i in range(tokens):
        start = time.perf_counter()
        mx.eval(model(mx.array([[i * 37 % 251]]), cache))
        times.append(time.perf_counter() - start)
    return statistics.median(times[tokens // 4 :])


def waiting_seconds(engine: Engine, tokens: int) -> float:
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
    return {"speed": measure_disk(open_packed(options.model, ModelArgs.from_file(options.model)))}


def keep_busy(model: Path, seed: int, stop: threading.Event) -> None:
    """Reads one megabyte after the other from random places of the first layer file, past the page cache."""
    path = sorted((model / "packed_experts").glob("layer_*.bin"))[0]
    file, blocks = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size >> 20
    target, rng = memoryview(page_aligned(1, 1 << 18)[0]).cast("B"), random.Random(seed)
    while not stop.is_set():
        os.preadv(file, [target], rng.randrange(blocks) << 20)
    os.close(file)


def run_once(
    options: argparse.Namespace, prefetch: str, expert_io: str, limits: dict[str, str], share: float | None = None
) -> dict:
    """Runs one generation in a process of its own."""
    arguments = ["worker", "--model", options.model, "--prefetch", prefetch, "--expert-io", expert_io]
    for name in ("prompt_tokens", "max_tokens", "context", "temp", "damping"):
        arguments += [f"--{name.replace('_', '-')}", getattr(options, name)]
    arguments += [] if share is None else ["--share", share]
    return inside(arguments, limits)


def limits(options: argparse.Namespace, memory: bool = True) -> dict[str, str]:
    """Returns the files of version 1 control groups and what to write to them."""
    files = {"memory/memory.limit_in_bytes": str(int(options.limit_gb * 1e9))} if memory else {}
    if options.drive_mbps:
        files |= throttle([options.model], options.drive_mbps)
    return files


def throttle(models: list[Path], mbps: float) -> dict[str, str]:
    """Returns the same for the speed of each drive that holds experts of these models."""
    devices = {path.stat().st_dev for model in models for path in open_weights(Located(model)).experts.sizes}
    lines = [f"{os.major(device)}:{os.minor(device)} {int(mbps * 1e6)}" for device in sorted(devices)]
    return {"blkio/blkio.throttle.read_bps_device": "\n".join(lines)}


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


def leave(group: Path) -> None:
    """Removes a control group as soon as its last process has ended."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)


def watch(process: subprocess.Popen, group: Path) -> dict:
    """Returns the peaks of rss + shmem and of swap, of the memory control group or else of the process, sampled every
    10 ms.
    """
    peak = swapped = 0
    look = (lambda: held_by_group(group)) if group.exists() else (lambda: held_by_process(process.pid))
    while process.poll() is None:
        held, swap = look()
        peak, swapped = max(peak, held), max(swapped, swap)
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"error: the run ended with {process.returncode}")
    return {"peak": peak, "swapped": swapped}


def held_by_group(group: Path) -> tuple[int, int]:
    """Returns the bytes of rss + shmem, and of swap."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(stat["total_rss"]) + int(stat["total_shmem"]), int(stat.get("total_swap", 0))


def held_by_process(pid: int) -> tuple[int, int]:
    """As `held_by_group`, for a process. Returns nothing if the process has ended, or if the system does not tell
    (macOS).
    """
    status = Path(f"/proc/{pid}/status")
    lines = (line.split() for line in status.read_text().splitlines()) if status.exists() else ()
    kib = {fields[0]: int(fields[1]) for fields in lines if fields[-1:] == ["kB"]}
    return 1024 * (kib.get("RssAnon:", 0) + kib.get("RssShmem:", 0)), 1024 * kib.get("VmSwap:", 0)


def run_worker(options: argparse.Namespace) -> dict:
    step = dict.fromkeys(("span", "prefill_step_size"), options.prefill_step_size)
    experts = ExpertLayout.from_args(ModelArgs.from_file(options.model)).total_bytes
    engine = open_engine(
        options.model,
        expert_cache_bytes=int(options.share * experts) if options.share else None,
        expert_io=options.expert_io,
        prefetch=options.prefetch,
        warm_start="off",
        context=options.context,
        prefill_step_size=options.prefill_step_size,
        set={} if options.prefill_step_size is None else {"span": options.prefill_step_size},
    )
    model = engine.model
    if options.damping != 1:
        damp(model, options.damping)
    mx.random.seed(0)
    sampler = make_sampler(temp=options.temp)
    prompt = np.random.default_rng(0).integers(0, 256, options.prompt_tokens).tolist()
    times, start = [], time.perf_counter()
    before: dict = {}
    for _ in generate_step(prompt, model, max_tokens=options.max_tokens + 1, sampler=sampler, **step):
        times.append(time.perf_counter())
        if len(times) == 1:
            model.experts.drain()
            model.experts.reset_stats()
            before = {"prompt_seconds": times[0] - start}
            times[0] = time.perf_counter()
            mx.reset_peak_memory()
    model.experts.drain()
    stats, tokens = model.experts.stats, len(times) - 1
    seconds = times[-1] - times[0]
    return {
        **before,
        "seconds_per_token": seconds / tokens,
        "bytes_per_token": stats.bytes_read / tokens,
        "hit_rate": stats.hit_rate,
        "found_ahead": stats.prefetch_hits / max(stats.hits + stats.misses, 1),
        "late": stats.late / max(stats.hits + stats.misses, 1),
        "prefetched": stats.prefetched / tokens,
        "waited": stats.wait_seconds / seconds,
        "speed": stats.gb_per_second,
        "planned": engine.plan.total,
        "pool": model.experts.slots * model.experts.layout.record.stride,
        "device_peak": mx.get_peak_memory(),  # on a GPU; the CPU's pool is not in MLX's memory
        "slots": model.experts.slots,
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


def median(values) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
