#!/usr/bin/env python3
"""Checks the GPU's kernels on GGUF's forms, and compares the bytes per second of decode's experts with 4-bit affine.

    python scripts/bench/bench_gguf_forms.py [--forms q4_k q2_k ...] [--against floats] [--experts 512] [--rounds 11]
        [--skip-check] [--tile expert_gate_up_planes ahead 2 --against built-in]

The experts are those of a layer of 397B-A17B (hidden 4096, width 1024, 10 of 512 for each token) with random weights.
A round times a form and 4 bits in groups of 64 one after the other: chains in which each launch waits for the one
before it and uses other experts, while the GPU is kept busy until the host has encoded all. Printed are medians, and
the quartiles of the rounds' ratios of bytes a second. "layer" is gate, up, down and the sum. With `--against floats` a
form is compared with itself where codes are not multiplied as integers, with `--against built-in` a tile with the
built-in one. Two processes can differ by a sixth with the same code, so compare within one. The last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from bench_kernels import SHAPES, Launches, check_form

from moeflux_mlx.engine.random_weights import random_records
from moeflux_mlx.engine.settings import configure_mlx
from moeflux_mlx.formats.record import Record
from moeflux_mlx.ops import backend, forms
from moeflux_mlx.ops.experts import expert_down_combine, expert_gate_up
from moeflux_mlx.ops.tiles import CODE, Tile, Tiles, using
from moeflux_mlx.quant import EXPERTS, GGUF_MODES, Quant

LAUNCHES = 48


def of(mode: str) -> Quant:
    return Quant(GGUF_MODES[mode].bits, GGUF_MODES[mode].group_size, mode)


def chains(quant: Quant, experts: int) -> dict[str, Launches]:
    """Returns the chains by name, all with the records of one layer."""
    hidden, inner, top_k = SHAPES["397B-A17B"]
    record = Record.make(hidden, inner, (quant,) * 3)
    records = random_records(record, experts)
    rng = np.random.default_rng(1)
    chosen = [mx.array(rng.permutation(experts)[:top_k].astype(np.uint32)[None]) for _ in range(LAUNCHES)]
    weights, act = mx.full((1, top_k), 0.01), mx.random.normal((1, top_k, inner)).astype(mx.bfloat16)
    start = mx.random.normal((1, hidden)).astype(mx.bfloat16)
    mx.eval(records.blob, chosen, weights, act, start)

    def gate_up(x: mx.array) -> mx.array:
        for slots in chosen:
            x = expert_gate_up(x, slots, records).reshape(-1)[:hidden][None]
        return x

    def down(x: mx.array) -> mx.array:
        for slots in chosen:
            x = expert_down_combine(act, slots, records, weights, x)
        return x

    def layer(x: mx.array) -> mx.array:
        for slots in chosen:
            x = expert_down_combine(expert_gate_up(x, slots, records), slots, records, weights, x)
        return x

    fields = [sum(field.size for field in part.fields) for part in record.projections]
    sizes: dict[str, tuple[Callable[[mx.array], mx.array], int]] = {
        "layer": (layer, sum(fields)),
        "gate_up": (gate_up, fields[0] + fields[1]),
        "down": (down, fields[2]),
    }
    made = {name: Launches(build, start, top_k * size) for name, (build, size) in sizes.items()}
    for one in made.values():
        mx.eval(one.build(one.start))
    return made


class Floats(Tiles):
    """The built-in tiles, without products of integers."""

    def plan(self, operation: str, make: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        with mock.patch.object(forms, "INTEGERS", {}):
            return make(*given)


FLOATS = Floats()


class Changed(Tiles):
    """The built-in tiles with other fields, by kernel."""

    def __init__(self, fields: list[tuple[str, str, str]]):
        super().__init__()
        self.fields = fields

    def tile(self, target: str, kernel: str) -> Tile:
        own = {name: int(value) for which, name, value in self.fields if which == kernel}
        return replace(super().tile(target, kernel), **own)


def under(one: Launches, tiles: Tiles) -> Launches:
    def build(x: mx.array) -> mx.array | list[mx.array]:
        with using(tiles):
            return one.build(x)

    made = Launches(build, one.start, one.size)
    mx.eval(made.build(made.start))
    return made


def compare(
    quant: Quant, four: dict[str, Launches], experts: int, rounds: int, tiles: Tiles, others: Tiles
) -> list[dict]:
    """Prints and returns the rates of one form with `tiles` beside those of 4 bits, or if there are none, of its own
    with `others`.
    """
    built_in, rows = chains(quant, experts), []
    usual = four or {name: under(one, others) for name, one in built_in.items()}
    for name, one in ((name, under(one, tiles)) for name, one in built_in.items()):
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for chain, times in ((usual[name], rates[0]), (one, rates[1])):
                times.append(LAUNCHES * chain.size / chain.seconds())
        low, ratio, high = np.quantile([b / a for a, b in zip(*rates, strict=True)], (0.25, 0.5, 0.75)).tolist()
        base, rate = map(statistics.median, rates)
        row = {"op": name, "form": quant.mode, "us": 1e6 * one.size / rate, "TB/s": rate / 1e12, "other": base / 1e12}
        rows.append(row | {"ratio": ratio, "quartiles": [low, high]})
        print(
            f"{quant.mode:5s} {name:8s} {row['us']:7.2f} us {rate / 1e12:6.3f} TB/s, other {base / 1e12:6.3f} TB/s, "
            f"ratio {ratio:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=GGUF_MODES, default=list(GGUF_MODES))
    parser.add_argument("--against", choices=("4 bits", "floats", "built-in"), default="4 bits", help="(%(default)s)")
    parser.add_argument("--experts", type=int, default=512, help="records in memory for each form (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--skip-check", action="store_true", help="time only")
    parser.add_argument("--tile", nargs=3, action="append", default=[], metavar=("KERNEL", "FIELD", "N"), help="try it")
    args = parser.parse_args()
    configure_mlx()
    if not backend.has_kernels():
        raise SystemExit("no GPU: mx.default_device() is the CPU; run on Apple silicon or with mlx[cuda13]")
    device = mx.device_info().get("device_name", "")
    print(f"mlx {mx.__version__}, {backend.name()}, {device}")
    checks = [] if args.skip_check else [check_form((of(mode),) * 3, mx.bfloat16, "BF16") for mode in args.forms]
    four, rows = chains(EXPERTS, args.experts) if args.against == "4 bits" else {}, list[dict]()
    others = FLOATS if args.against == "floats" else CODE
    for mode in args.forms:
        rows += compare(of(mode), four, args.experts, args.rounds, Changed(args.tile), others)
        mx.clear_cache()
    print(json.dumps({"mlx": mx.__version__, "device": device, "check": checks, "forms": rows}))
    if not all(check["ok"] for check in checks):
        raise SystemExit("a check failed")


if __name__ == "__main__":
    main()
