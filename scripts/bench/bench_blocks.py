#!/usr/bin/env python3
"""Rearranges blocks of every GGUF type that experts may have, in place as after a read, on one core.

Each matrix is 2 MB, and there are more of them than a cache holds. A round times the native form and a copy of the same
matrices, one after the other; reported are medians of GB of blocks a second of CPU time, and of the rounds' ratios to
the copy. The numpy form, which runs where there is no compiler, is timed once, on one matrix. The last line is JSON.
"""

import argparse
import json
import statistics
import time

import numpy as np

from moeflux_mlx.packing.gguf_forms import FORMS, rearrange

MATRIX_BYTES = 2 << 20


def places_of(kind, blocks):
    """Returns where the parts of a matrix begin."""
    sizes = [part.nbytes for part in FORMS[kind].unpack(np.zeros((1, FORMS[kind].nbytes), np.uint8))]
    return [0, *(blocks * np.cumsum(sizes[:-1])).tolist()]


def rate(call, size):
    start = time.process_time()
    call()
    return size / (time.process_time() - start) / 1e9


def measure(kind, rounds, rng, count):
    blocks = MATRIX_BYTES // FORMS[kind].nbytes
    size, places = blocks * FORMS[kind].nbytes, places_of(kind, blocks)
    matrices = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]
    target = np.empty(size, np.uint8)

    def native():
        for matrix in matrices:
            rearrange(kind, matrix, places)

    def copy():
        for matrix in matrices:
            np.copyto(target, matrix)

    native(), copy()
    pairs = [(rate(native, size * count), rate(copy, size * count)) for _ in range(rounds)]
    by_numpy = rate(lambda: FORMS[kind].unpack(matrices[0].reshape(blocks, -1)), size)
    return {
        "GB/s": statistics.median(a for a, _ in pairs),
        "of copy": statistics.median(a / b for a, b in pairs),
        "numpy": by_numpy,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="repetitions (default 9)")
    parser.add_argument("--matrices", type=int, default=40, help="that are rearranged in turn (default 40)")
    options, rng, report = parser.parse_args(), np.random.default_rng(0), {}
    for kind in FORMS:
        report[kind] = measure(kind, options.rounds, rng, options.matrices)
        print(
            "{:8} {GB/s:6.2f} GB/s, {of copy:5.2f} of a copy; numpy {numpy:5.2f}".format(kind, **report[kind]),
            flush=True,
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
