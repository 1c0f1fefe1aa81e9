"""A chart of lines as SVG text: axes with round numbers, a legend, nothing that needs a font or a script."""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 48, 52  # margins
COLOURS = ("#1f6feb", "#d1570b", "#2f8132", "#8250df")
TICKS = 5


def line_chart(title: str, x_label: str, y_label: str, x: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """The chart of `lines` over `x`, all finite; the vertical axis begins at 0."""
    highest = max([1e-12, *(value for line in lines.values() for value in line)])
    step = round_step(highest / TICKS)
    top, low, high = step * math.ceil(highest / step), min(x), max(x)

    def place(at: float, value: float) -> tuple[float, float]:
        share = (at - low) / ((high - low) or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(WIDTH / 2, 20, title, "middle", 15)]
    for i in range(round(top / step) + 1):
        _, y = place(low, i * step)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ccc"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{i * step:.4g}", "end"))
    for i in range(TICKS + 1):
        at = low + (high - low) * i / TICKS
        parts.append(_text(place(at, 0)[0], HEIGHT - BOTTOM + 16, f"{at:.0f}", "middle"))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(place, x, line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(LEFT + 110 * i, 40, name, "start", fill=colour))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"))
    parts.append(f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>')
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>\n<rect width="100%" height="100%" fill="white"/>\n'
    return head + "\n".join(parts) + "\n</svg>\n"


def round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _text(x: float, y: float, words: str, anchor: str, size: int = 12, fill: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
    return f"<text {place}>{html.escape(words)}</text>"
