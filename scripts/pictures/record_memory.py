#!/usr/bin/env python3
"""Records `moeflux benchmark` of a model that is larger than the memory it may use: the terminal, and its memory below.

    python scripts/bench/make_random_model.py --variant qwen3.6-35b-a3b OUT
    python scripts/pictures/record_memory.py OUT --what "Random weights, Qwen3.6-35B-A3B's shape" --faster 10

The command runs in a control group (version 1, inside that of this script; needs root), which allows it so much memory
and which counts what the system cannot take back (rss and shmem). Lines and memory have the times of the run, drawn
`--faster` times as fast. The limit is the system's: a process that needs more is killed.
"""

import argparse
import contextlib
import html
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from record_demo import ADVANCE, COLUMNS, LEFT, LINE, ROOT, Timed, record, terminal, wrapped

EVERY = 0.1  # seconds between two samples
HEIGHT, RISE = 196, 120  # of the curve's part of the picture, and of the curve where memory is at the limit
TITLE, TOP_SHARE = 26, 1.15  # height of the curve's title; what of the limit the axis reaches
OPTIONS = ("--prompt-tokens", "128", "--max-tokens", "32", "--rounds", "2")
COVER = "@keyframes c{{to{{transform:translateX({width:.0f}px)}}}}.c{{animation:c {seconds:.1f}s linear both}}"

Samples = list[tuple[float, int]]  # seconds, and bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=lambda name: Path(name).resolve())
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "docs" / "pictures" / "memory.svg")
    parser.add_argument("--what", required=True, help="says what the model is")
    parser.add_argument("--limit-gb", type=float, default=4.0)
    parser.add_argument("--faster", type=float, default=1.0)
    options = parser.parse_args()
    limit, size = int(options.limit_gb * 1e9), sum(file.stat().st_size for file in options.model.rglob("*.*"))
    command = ["-m", "moeflux_mlx.benchmark", "--model", str(options.model), *OPTIONS]
    with limited(limit) as group:
        letters, samples = watched(group, [sys.executable, *command])
    said = f"moeflux benchmark --model {options.model.name} {' '.join(OPTIONS)}"
    title = f"{options.what}: {size / 1e9:.1f} GB, {size / limit:.1f} times the memory that it may use"
    options.out.write_text(drawing(said, title, letters, samples, limit, options.faster))
    peak = max(held for _, held in samples)
    print(f"{options.out}: {samples[-1][0]:.0f} s, at most {peak / 1e9:.2f} of {limit / 1e9:.2f} GB")


@contextlib.contextmanager
def limited(limit: int, groups: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Gives a control group of `limit` bytes of memory, inside the group of this process."""
    own = re.search(r"^\d+:memory:/(.*)$", groups.read_text(), re.MULTILINE)
    if own is None:
        sys.exit("error: this system has no version 1 control groups of memory")
    group = Path("/sys/fs/cgroup/memory") / own[1] / f"moeflux-picture-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def watched(group: Path, command: list[str]) -> tuple[list[Timed], Samples]:
    """Runs a command in a group; returns its text, and the memory of the group while it ran."""
    samples: Samples = []
    ended = threading.Event()

    def look() -> None:
        start = time.monotonic()
        while not ended.wait(EVERY):
            samples.append((time.monotonic() - start, held(group)))

    watching = threading.Thread(target=look)
    watching.start()
    try:
        return record(["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh", *command]), samples
    finally:
        ended.set()
        watching.join()


def held(group: Path) -> int:
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(counts["rss"]) + int(counts["shmem"])


def drawing(command: str, title: str, letters: list[Timed], samples: Samples, limit: int, faster: float) -> str:
    lines = wrapped([(at / faster, letter) for at, letter in letters])
    parts, height = terminal(command, lines)
    parts += curve(title, [(at / faster, bytes_held) for at, bytes_held in samples], limit, faster, height)
    width = LEFT * 2 + COLUMNS * ADVANCE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + HEIGHT}" width="{width:.0f}">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", *parts, "</svg>\n"])


def curve(title: str, samples: Samples, limit: int, faster: float, top: int) -> list[str]:
    """Draws the samples below `top`, with a line at the limit and a cover that moves away at the speed of the text."""
    seconds, width = samples[-1][0], COLUMNS * ADVANCE
    begin, foot = top + TITLE, top + TITLE + TOP_SHARE * RISE
    points = " ".join(
        f"{LEFT + width * at / seconds:.1f},{foot - RISE * of / limit:.1f}" for at, of in thinned(samples)
    )
    size = f'width="{width + LEFT:.0f}" height="{foot - begin + 4:.0f}"'
    peak, line = max(of for _, of in samples), foot - RISE
    speed = "" if faster == 1 else f", drawn {faster:g} times as fast"
    return [
        f"<style>{COVER.format(width=width + LEFT, seconds=seconds)}</style>",
        label(LEFT, top + LINE, title),
        f'<polyline points="{points}" fill="none" stroke="#7ee787" stroke-width="2"/>',
        f'<rect class="c" x="{LEFT}" y="{begin}" {size} fill="#0d1117"/>',
        f'<path d="M{LEFT} {line:.1f}h{width:.0f}" stroke="#ff5f57" stroke-dasharray="6 4"/>',
        f'<path d="M{LEFT} {foot:.1f}h{width:.0f}" stroke="#8b949e"/>',
        label(LEFT + width, line - 5, f"limit {limit / 1e9:.2f} GB", ' class="d" text-anchor="end"'),
        label(LEFT, foot + 18, f"memory of the process: at most {peak / 1e9:.2f} GB{speed}", ' class="d"'),
        label(LEFT + width, foot + 18, f"{seconds * faster:.0f} s", ' class="d" text-anchor="end"'),
    ]


def label(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}"{kind}>{html.escape(text)}</text>'


def thinned(samples: Samples, most: int = 400) -> Samples:
    """Returns at most so many of the samples: of each stretch the one with the most memory."""
    step = -(-len(samples) // most)
    return [max(samples[i : i + step], key=lambda sample: sample[1]) for i in range(0, len(samples), step)]


if __name__ == "__main__":
    main()
