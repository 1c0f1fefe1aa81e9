#!/usr/bin/env python3
"""Draws the plots of docs/performance.md and docs/quality.md from figures.json, which holds published figures and
their commands.

python scripts/pictures/plots.py [docs/pictures]
"""

import argparse
import html
import json
import math
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 70, 20, 66, 62
COLOURS = ("#1f6feb", "#d1570b", "#2f8132", "#8250df")
TICKS = 5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE.parents[1] / "docs" / "pictures")
    folder = parser.parse_args(argv).folder
    for name, figure in json.loads((HERE / "figures.json").read_text()).items():
        parts = curves(figure) if "lines" in figure else bars(figure)
        (folder / f"plot-{name}.svg").write_text(framed(figure, parts))


def framed(figure: dict, parts: list[str]) -> str:
    """Returns the whole picture: title, legend, names of the axes, source, and what `parts` draws between them."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    head.append(words(WIDTH / 2, 22, figure["title"], "middle", 15))
    for i, name in enumerate(figure.get("lines") or figure["bars"]):
        x = LEFT + i * (WIDTH - LEFT - RIGHT) / 4
        head.append(f'<rect x="{x:.1f}" y="38" width="11" height="11" fill="{COLOURS[i]}"/>')
        head.append(words(x + 16, 48, name, "start"))
    across = words(0, 0, figure["y"], "middle")
    foot = [f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{across}</g>']
    foot.append(words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 28, figure["x"], "middle"))
    foot.append(words(WIDTH / 2, HEIGHT - 8, figure["source"], "middle", 11))
    return "\n".join([*head, *parts, *foot, "</svg>\n"])


def curves(figure: dict) -> list[str]:
    """Draws lines over two logarithmic axes."""
    points = [point for line in figure["lines"].values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    right, up = scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT), scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [words(right(x), HEIGHT - BOTTOM + 16, f"{x:,}", "middle") for x in xs]
    for power in range(round(math.log10(high / low)) + 1):
        parts += rule(up(low * 10**power), f"{low * 10**power:g}")
    unit, below = figure.get("unit", ""), figure.get("below", {})  # a line's figures stand so far below it; null: none
    for colour, (name, line) in zip(COLOURS, figure["lines"].items(), strict=False):
        placed = " ".join(f"{right(x):.1f},{up(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{placed}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line if below.get(name, 0) is not None else ():
            anchor = "end" if x == xs[-1] else "middle"
            label = f"{y:,.0f}" if y >= 100 else f"{y:.2g}"
            parts.append(words(right(x), up(y) + below.get(name, -7), label + unit, anchor))
    return parts


def bars(figure: dict) -> list[str]:
    """Draws groups of bars from zero, each with its figure."""
    series, groups = list(figure["bars"].values()), figure["groups"]
    top = figure.get("top") or round_up(max(max(values) for values in series) * 1.08)
    parts = []
    for i in range(TICKS + 1):
        parts += rule(height_of(top * i / TICKS, top), f"{top * i / TICKS:g}")
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = min(room / (len(series) + 1), 60)
    for g, group in enumerate(groups):
        middle = LEFT + room * (g + 0.5)
        parts.append(words(middle, HEIGHT - BOTTOM + 16, group, "middle"))
        for s, values in enumerate(series):
            x, y = middle + wide * (s - len(series) / 2), height_of(values[g], top)
            size = f'width="{wide - 4:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
            parts.append(f'<rect x="{x + 2:.1f}" y="{y:.1f}" {size} fill="{COLOURS[s]}"/>')
            parts.append(words(x + wide / 2, y - 4, f"{values[g]:g}", "middle"))
    return parts


def height_of(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Returns where a value is between two places, by its logarithm."""
    return lambda value: first + math.log(value / low) / math.log(high / low) * (last - first)


def round_up(value: float) -> float:
    """Returns the next 1, 1.5, 2, 3, 4, 5 or 7.5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 1.5, 2, 3, 4, 5, 7.5, 10) if step * power >= value)


def rule(y: float, label: str) -> list[str]:
    return [f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>', words(LEFT - 6, y + 4, label, "end")]


def words(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222"'
    return f"<text {place}>{html.escape(text)}</text>"


if __name__ == "__main__":
    main()
