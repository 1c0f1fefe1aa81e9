#!/usr/bin/env python3
"""Times the experts' kernels in every width on an NVIDIA GPU with Nsight Compute, without the host and the pauses
between launches.

    python scripts/bench/bench_launches.py [--shapes 397B-A17B ...] [--forms 4 2 3 mxfp4 ...] [--launches 20]

Runs itself under `ncu`, which leaves clocks and caches alone. Each launch is one token's, with other experts than the
last few, so that no cache serves them. Prints medians and quartiles of microseconds, and bytes a second as a share of
what 4 bits reach in the same run; affine groups are of 64. Ends with a line of JSON.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from bench_kernels import MXFP4, SHAPES

from moeflux_mlx.engine.random_weights import random_records
from moeflux_mlx.engine.settings import configure_mlx
from moeflux_mlx.formats.record import LOAD_BYTES, Record, rounded
from moeflux_mlx.ops.experts import expert_down_combine, expert_gate_up
from moeflux_mlx.quant import AFFINE_BITS, Quant

FORMS = {**{str(bits): Quant(bits, 64) for bits in AFFINE_BITS}, "mxfp4": MXFP4, "mxfp8": Quant(8, 32, "mxfp8")}
FORMS["nvfp4"] = Quant(4, 16, "nvfp4", has_global_scale=True)
KERNELS = ("gate_up", "down")
COVER_BYTES = 256 << 20  # the bytes of each matrix that launches use in turn: more than the caches of any GPU
WARM = 3  # the first launches of a kernel, which do not count
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0}


def record_of(shape: str, form: str) -> Record:
    hidden, inner, _ = SHAPES[shape]
    quants = (FORMS[form],) * 3
    return Record.make(hidden, inner, quants, rounded(Record.make(hidden, inner, quants).size, LOAD_BYTES))


def bytes_of(shape: str, form: str) -> tuple[int, int]:
    """Returns the bytes of the experts that a launch of either kernel reads."""
    record, count = record_of(shape, form), SHAPES[shape][2]
    before = record.down.fields[0].offset
    return count * before, count * (record.size - before)


def launch(shape: str, form: str, launches: int) -> None:
    """Launches both kernels `launches` times, one after the other."""
    hidden, _, count = SHAPES[shape]
    groups = 1 + COVER_BYTES // bytes_of(shape, form)[1]
    records = random_records(record_of(shape, form), groups * count)
    order = np.random.default_rng(0).permutation(groups * count).reshape(groups, 1, count).astype(np.uint32)
    slots, weights = [mx.array(one) for one in order], mx.random.uniform(0, 0.1, (1, count))
    x = mx.random.normal((1, hidden)).astype(mx.bfloat16)
    mx.eval(slots, weights, x)
    for i in range(launches):
        act = expert_gate_up(x, slots[i % groups], records)
        mx.eval(act)
        mx.eval(expert_down_combine(act, slots[i % groups], records, weights, x))


def watched(command: list[str]) -> list[tuple[str, float]]:
    """Returns the name and the microseconds of each launch of an expert kernel by a command, in order."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log.csv"
        ncu = ["ncu", "--clock-control", "none", "--cache-control", "none", "--metrics", "gpu__time_duration.sum"]
        subprocess.run([*ncu, "--csv", "--log-file", str(log), "-k", "regex:expert_", *command], check=True)
        lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    return [
        (row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * MICROSECONDS[row["Metric Unit"]])
        for row in csv.DictReader(lines)
    ]


def table(times: dict[tuple[str, str, str], list[float]]) -> list[dict]:
    """Prints and returns a row for each shape, kernel and form."""
    rows, rates = [], {}
    for (shape, kernel, form), us in times.items():
        first, median, last = statistics.quantiles(us, n=4)
        size = bytes_of(shape, form)[KERNELS.index(kernel)]
        rates[shape, kernel, form] = rate = size / median / 1e3
        share = rate / rates.get((shape, kernel, "4"), float("nan"))
        rows.append({"shape": shape, "kernel": kernel, "form": form, "us": median, "GB/s": rate, "x4": share})
        print(
            f"{shape:12s} {kernel:8s} {form:6s} {median:7.2f} us ({first:.2f} to {last:.2f}) {size / 1e6:7.2f} MB "
            f"{rate:6.0f} GB/s {share:5.2f} of 4 bits'"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["397B-A17B", "35B-A3B"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--launches", type=int, default=20, help="of each kernel")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    forms = sorted(args.forms, key=lambda form: form != "4")  # the one with which the others are compared comes first
    cases = [(shape, form) for shape in args.shapes for form in forms]
    if args.watched:
        configure_mlx()
        for case in cases:
            launch(*case, args.launches)
        return
    timings = watched([sys.executable, __file__, *sys.argv[1:], "--watched"])
    order = [(shape, kernel, form) for shape, form in cases for _ in range(args.launches) for kernel in KERNELS]
    if len(timings) != len(order) or not all(key[1] in name for (name, _), key in zip(timings, order, strict=True)):
        raise SystemExit(f"ncu saw other kernels than the {len(order)} that were launched: {timings[:4]} ...")
    times: dict[tuple[str, str, str], list[float]] = {key: [] for key in dict.fromkeys(order)}
    for key, (_, us) in zip(order, timings, strict=True):
        times[key].append(us)
    print(json.dumps(table({key: us[WARM:] for key, us in times.items()})))


if __name__ == "__main__":
    main()
