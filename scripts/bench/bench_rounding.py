#!/usr/bin/env python3
"""Measures the rounding error of each stored form, by min-max and by fit, on random weights; prints a table and a line
of JSON.

    python scripts/bench/bench_rounding.py [--rows 512] [--columns 2048]

Weights are normal, and of Student's t with 6 and with 4 degrees of freedom, times 0.02, in bfloat16. The error is the
root mean square of the error over that of the weights; "bits saved" is half the binary logarithm of the squared errors'
ratio on the normal weights. Times are per weight, the best of three, with all cores.
"""

import argparse
import json
import math
import time

import mlx.core as mx
import numpy as np

from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.quant import AFFINE_BITS, AFFINE_GROUPS, MLX_MODES, Quant
from moeflux_mlx.rounding.methods import FIT, MINMAX, rounded

FORMS = [Quant(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
FORMS += [Quant(mode.bits, mode.group_size, name) for name, mode in MLX_MODES.items() if name != "affine"]


def drawn(rows: int, columns: int) -> dict[str, mx.array]:
    """Weights by distribution."""
    rng, shape = np.random.default_rng(0), (rows, columns)
    values = {"normal": rng.standard_normal(shape), "t6": rng.standard_t(6, shape), "t4": rng.standard_t(4, shape)}
    return {name: mx.array((one * 0.02).astype(np.float32)).astype(mx.bfloat16) for name, one in values.items()}


def error(values: mx.array, quant: Quant, method: str) -> float:
    """The relative error."""
    wide = values.astype(mx.float32)
    off = unpacked_float32(quant, *rounded(values, quant, method)) - wide
    return math.sqrt((mx.square(off).sum() / mx.square(wide).sum()).item())


def seconds(values: mx.array, quant: Quant, method: str) -> float:
    """The best time of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        mx.eval(rounded(values, quant, method))
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    options = parser.parse_args()
    weights, results = drawn(options.rows, options.columns), []
    mx.eval(weights)
    print(
        "| form | bits a weight | " + " | ".join(f"{name}: min-max, fit" for name in weights) + " | bits saved | ns |"
    )
    print("|---" * (len(weights) + 4) + "|")
    for quant in FORMS:
        errors = {name: [error(one, quant, method) for method in (MINMAX, FIT)] for name, one in weights.items()}
        of_groups = sum(mx.array(part).nbytes for part in rounded(weights["normal"][:1], quant)) * 8 / options.columns
        saved = math.log2(errors["normal"][0] / errors["normal"][1])
        size = weights["normal"].size / 1e9
        times = [seconds(weights["normal"], quant, method) / size for method in (MINMAX, FIT)]
        name = f"{quant.bits} bits, groups of {quant.group_size}" if quant.mode == "affine" else quant.mode
        cells = " | ".join(f"{plain:.4f}, {fit:.4f}" for plain, fit in errors.values())
        print(f"| {name} | {of_groups:.2f} | {cells} | {saved:.2f} | {times[0]:.0f}, {times[1]:.0f} |", flush=True)
        results.append({"form": name, "bits": of_groups, "errors": errors, "ns": times})
    print(json.dumps({"device": str(mx.default_device()), "rows": options.rows, "results": results}))


if __name__ == "__main__":
    main()
