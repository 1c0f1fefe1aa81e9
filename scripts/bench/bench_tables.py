#!/usr/bin/env python3
"""Measures how long a token waits for rows of n-gram tables, on a drive with limited reads and bytes per second.

    scripts/bench/bench_tables.py [--variant qwen3.8-flash-next-125b] [--reads 20000] [--gb-per-s 2] [--latency-us 100]
        [--tokens 200] [--ahead-ms 1] [--token-ms 50] [--folder /tmp]

The table is a sparse file of the real size, in which the rows that the text uses are written. All reads go through a
gate that limits reads per second, counts a block of 4 KiB for each, and adds the latency. A token's rows are requested,
`--ahead-ms` pass, as in the layers before the one that uses them, and then they are waited for. Prints the median wait
for a packed table, one read a row, and for one in place, three, as a share of a token of `--token-ms`, and ends with
one JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeflux_mlx.experts.tables import FileTable
from moeflux_mlx.formats.tables import NARROW, FileRows, RowForm, TableFiles
from moeflux_mlx.kinds import NGrams
from moeflux_mlx.ops.ngrams import row_numbers
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs, variants

BLOCK = 4096


class Gate:
    """Lets reads pass as fast as a drive with so many reads per second."""

    def __init__(self, reads: float, bytes_per_s: float, latency: float):
        self.interval, self.latency = max(1 / reads, BLOCK / bytes_per_s), latency
        self._lock, self._free, self._preadv = threading.Lock(), 0.0, os.preadv

    def __call__(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        with self._lock:
            begin = max(time.perf_counter(), self._free)
            self._free = begin + self.interval
        got = self._preadv(descriptor, buffers, offset)
        time.sleep(max(begin + self.interval + self.latency - time.perf_counter(), 0))
        return got


def sparse_table(folder: Path, part: NGrams, form: RowForm, in_parts: bool, rows: np.ndarray) -> TableFiles:
    """Makes sparse files of the table's size; only `rows` are written."""
    rng, places = np.random.default_rng(0), []
    for i, nbytes in enumerate(form.part_bytes if in_parts else [form.row_bytes]):
        path = folder / f"part-{in_parts}-{i}"
        with open(path, "wb") as file:
            file.truncate(part.rows * nbytes)
            for row in rows.tolist():
                os.pwrite(file.fileno(), rng.integers(0, 60, nbytes, np.uint8).tobytes(), row * nbytes)
        places.append(FileRows(path, 0, nbytes))
    return TableFiles(form, [0], [places], part.rows)


def waits(reader: FileTable, numbers: np.ndarray, ahead: float) -> list[float]:
    """Returns the seconds that each token waits for its rows [1, L, heads], without the first token."""
    times = []
    for at in range(numbers.shape[1]):
        pending = reader.begin(numbers[:, at : at + 1])
        time.sleep(ahead)
        start = time.perf_counter()
        pending.take(0, 1)
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=variants(), default="qwen3.8-flash-next-125b")
    parser.add_argument("--reads", type=float, default=20_000)
    parser.add_argument("--gb-per-s", type=float, default=2)
    parser.add_argument("--latency-us", type=float, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ahead-ms", type=float, default=1)
    parser.add_argument("--token-ms", type=float, default=50)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    args = ModelArgs.from_variant(options.variant)
    if not args.ngrams:
        parser.error(f"{options.variant} has no tables")
    part = next(iter(args.ngrams.values()))
    form = RowForm(part.width, Quant(4, 32), NARROW)
    text = np.random.default_rng(1).integers(0, args.vocab_size, (1, options.tokens + part.longest))
    numbers = row_numbers(text, part)
    result: dict[str, Any] = {"variant": options.variant, "reads_per_s": options.reads, "tokens": options.tokens}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, in_parts in (("packed", False), ("in place", True)):
            files = sparse_table(Path(folder), part, form, in_parts, np.unique(numbers))
            for ahead in (0.0, options.ahead_ms / 1e3):
                reader, real = FileTable(files), os.preadv
                os.preadv = Gate(options.reads, options.gb_per_s * 1e9, options.latency_us / 1e6)  # type: ignore[assignment]
                try:
                    ms = 1e3 * statistics.median(waits(reader, numbers, ahead))
                finally:
                    os.preadv = real
                    reader.close()
                each, share = reader.bytes_read / numbers.shape[1], 100 * ms / options.token_ms
                said = f"{name:8}, asked for {1e3 * ahead:g} ms before: waits {ms:.3f} ms, {share:.1f} % of a token"
                rows = each / files.form.row_bytes
                print(f"{said}; {rows:.1f} rows and {each:.0f} bytes a token", flush=True)
                result[f"{name} {1e3 * ahead:g}"] = ms
    print(json.dumps(result))


if __name__ == "__main__":
    main()
