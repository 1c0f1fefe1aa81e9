#!/usr/bin/env python3
"""Takes memory from a running model and returns it, and checks that the tokens stay the same.

    scripts/bench/bench_pressure.py --model DIR                        # Linux, as root: a memory control group
    sudo scripts/bench/bench_pressure.py --model DIR --pool-gb 8       # macOS: its own `memory_pressure -S`

An answer and a prompt are computed without pressure, then while memory is short. On Linux the group's limit falls by
steps to `--least-gb` and rises again; version 1 refuses a limit below what is used, and version 2's `memory.high` slows
the group down until it holds less. On macOS the system says for some seconds that it is at its critical level.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from moeflux_mlx.engine.engine import Engine, open_engine
from moeflux_mlx.engine.generation import generate_step
from moeflux_mlx.engine.machine import CGROUPS, used_memory

STEP = 0.95  # the limit falls by this share of itself every second; a pool keeps more than that free
MOST_SECONDS = 45.0  # how long a squeeze may last: a prompt's temporaries may need more than the minimum
PATIENCE = 660.0 if sys.platform == "darwin" else 10.0  # seconds within which the pool must have its size again
NAMES = ("memory/", "memory.limit_in_bytes"), ("", "memory.high")  # the limit files of version 1 and version 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of a packed model")
    parser.add_argument("--pool-gb", type=float, help="memory for experts; default: what is left")
    parser.add_argument("--limit-gb", type=float, default=4.0, help="of the group, at first (%(default)g)")
    parser.add_argument("--least-gb", type=float, default=1.0, help="of the group, when squeezed (%(default)g)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (%(default)d)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt (%(default)d)")
    options = parser.parse_args()
    squeezing = on_macos() if sys.platform == "darwin" else in_group(options)
    with squeezing as squeeze:
        pool = None if options.pool_gb is None else int(options.pool_gb * 1e9)
        engine = open_engine(options.model, expert_io="pread", expert_cache_bytes=pool, warm_start="off")
        rows = [one_case(engine, squeeze, name, compute) for name, compute in cases(engine, options)]
    print(json.dumps(rows))
    raise SystemExit(0 if all(row["same"] and row["back_s"] <= PATIENCE for row in rows) else 1)


def cases(engine: Engine, options: argparse.Namespace) -> list[tuple[str, Callable[[], list[int]]]]:
    ids = np.random.default_rng(0).integers(0, engine.model.args.vocab_size, options.prompt).tolist()

    def answer(prompt: list[int], tokens: int) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), engine.model, max_tokens=tokens)]

    return [("decode", lambda: answer(ids[:16], options.tokens)), ("prompt", lambda: answer(ids, 1))]


def one_case(engine: Engine, squeeze: Callable[[bool], None], name: str, compute: Callable[[], list[int]]) -> dict:
    """Computes again and again while memory is taken, and until the pool has its size again."""
    calm, experts = compute(), engine.experts
    before, same, rounds = experts.pool_bytes, True, 0
    row = {"case": name, "pool_gb": before / 1e9}
    taking = threading.Thread(target=take_and_give, args=(engine, squeeze, before, row), daemon=True)
    taking.start()
    while taking.is_alive():
        same, rounds = same and compute() == calm, rounds + 1
    row |= {"same": same, "rounds": rounds}
    print(
        "  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )
    return row


def take_and_give(engine: Engine, squeeze: Callable[[bool], None], before: int, row: dict) -> None:
    """Notes the smallest size of the pool, what the process held then, and how long the pool took to grow back."""
    squeeze(True)
    time.sleep(1)
    row |= {"least_gb": engine.experts.pool_bytes / 1e9, "held_gb": used_memory() / 1e9}
    squeeze(False)
    released = time.perf_counter()
    while engine.experts.pool_bytes < 0.9 * before and time.perf_counter() - released < 2 * PATIENCE:
        time.sleep(0.05)
    row["back_s"] = time.perf_counter() - released


@contextlib.contextmanager
def in_group(options: argparse.Namespace) -> Iterator[Callable[[bool], None]]:
    """Puts this process into a control group of its own, whose limit can be lowered and raised."""
    place, name = next(one for one in NAMES if (CGROUPS / one[0] / "cgroup.procs").exists())
    root = CGROUPS / place
    group = root / f"moeflux-pressure-{os.getpid()}"
    group.mkdir()
    (group / name).write_text(str(int(options.limit_gb * 1e9)))
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def squeeze(tight: bool) -> None:
        wanted = int((options.least_gb if tight else options.limit_gb) * 1e9)
        end = time.monotonic() + MOST_SECONDS
        while (limit := int((group / name).read_text())) != wanted // 4096 * 4096 and time.monotonic() < end:
            lower = max(int(limit * STEP), wanted) if tight else wanted
            with contextlib.suppress(OSError):  # more is in use: the memory has not been returned yet
                (group / name).write_text(str(lower))
            if tight:
                time.sleep(1)

    try:
        yield squeeze
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextlib.contextmanager
def on_macos() -> Iterator[Callable[[bool], None]]:
    """Uses macOS's own simulation of its critical level."""
    command = shutil.which("memory_pressure")
    if command is None or os.geteuid() != 0:
        raise SystemExit("error: memory_pressure simulates pressure for root only; run this with sudo")

    def squeeze(tight: bool) -> None:
        if tight:
            subprocess.run([command, "-S", "-l", "critical", "-s", "5"], check=True, stdout=subprocess.DEVNULL)

    yield squeeze


if __name__ == "__main__":
    main()
