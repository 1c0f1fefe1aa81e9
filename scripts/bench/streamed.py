"""The options of a benchmark whose model may be streamed, the trace that it follows, and a drive that is slowed down.

A drive is slowed down by a version 1 control group, which needs root. Without one the drive keeps its own speed, and a
line says so.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.located import Located

GROUPS = Path("/sys/fs/cgroup")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--expert-io", default="auto")
    parser.add_argument("--expert-cache-gb", type=float)
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--cpu-activations", default="auto", help="of a directory (%(default)s)")
    parser.add_argument("--drive-mbps", type=float, help="slows the drive of a directory down to this")


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="whose experts the rows of a step ask for")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `load` and `load_model` that the options set."""
    bits, gigabytes = options.cpu_activations, options.expert_cache_gb
    return {
        "expert_io": options.expert_io,
        "expert_cache_bytes": gigabytes and int(gigabytes * 1e9),
        "prefetch": options.prefetch,
        "warm_start": "off",
        "set": {"cpu_activations": bits if bits == "auto" else int(bits)},
    }


def trace_of(options: argparse.Namespace, sequences: int) -> np.ndarray:
    """Returns the trace [sequences or more, tokens, layers, K]."""
    with np.load(options.trace) as file:
        trace = file["trace"].astype(np.int64)
    if trace.ndim != 4 or len(trace) < sequences:
        raise SystemExit(f"error: {options.trace} has fewer than {sequences} sequences, which this benchmark needs")
    return trace


@contextlib.contextmanager
def held_drive(options: argparse.Namespace) -> Iterator[None]:
    """Runs this process in a control group in which reads are slowed down."""
    if options.drive_mbps is None:
        yield
        return
    ((file, lines),) = throttle([Path(options.model)], options.drive_mbps).items()
    root = GROUPS / Path(file).parent
    group = root / f"moeflux-bench-{os.getpid()}"
    try:
        enter(group, Path(file).name, lines)
    except OSError as error:
        print(f"the drive is not slowed down: {error}", flush=True)
        yield
        return
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        leave(group)


def enter(group: Path, setting: str, lines: str) -> None:
    """Makes a control group with a setting and moves this process there. Raises OSError: the system refuses it."""
    group.mkdir()
    try:
        for line in lines.splitlines():  # the kernel accepts one device per write
            (group / setting).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        leave(group)
        raise


def leave(group: Path) -> None:
    """Removes a control group as soon as its last process has ended."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)


def throttle(models: list[Path], mbps: float) -> dict[str, str]:
    """Returns the files of version 1 control groups and what to write to them, for the speed of each drive that holds
    experts of these models.
    """
    devices = {path.stat().st_dev for model in models for path in open_weights(Located(model)).experts.sizes}
    lines = [f"{os.major(device)}:{os.minor(device)} {int(mbps * 1e6)}" for device in sorted(devices)]
    return {"blkio/blkio.throttle.read_bps_device": "\n".join(lines)}
