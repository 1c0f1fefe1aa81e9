#!/usr/bin/env python3
"""Records `scripts/demo` in a separate terminal as an SVG that shows the text at its original speed.

    python scripts/pictures/record_demo.py [docs/pictures/demo.svg]

Words, order and times are those of the run; only the time until the first word is drawn as one second at most. A viewer
that shows no animation shows the whole text. Runs on Linux and macOS, in the environment that Python belongs to.
"""

import argparse
import html
import os
import pty
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Tell me a story about Tomas, who is afraid of geese."
COLUMNS, ADVANCE, LINE, TOP, LEFT = 92, 8.43, 20, 62, 20
LONGEST_WAIT = 1.0  # seconds until the first word, drawn
STYLE = """text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}
.d{fill:#8b949e}.p{fill:#7ee787}
tspan{animation:s .01s both}@keyframes s{from{fill-opacity:0}to{fill-opacity:1}}
@media(prefers-reduced-motion:reduce){tspan{animation:none}}"""

Timed = tuple[float, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "docs" / "pictures" / "demo.svg")
    out = parser.parse_args().out
    letters = record([sys.executable, "-m", "moeflux_mlx.generate", "--prompt", PROMPT])
    out.write_text(drawing(f'scripts/demo --prompt "{PROMPT}"', sooner(letters)))
    print(f"{out}: {out.stat().st_size} bytes, the run took {letters[-1][0]:.1f} s")


def record(command: list[str]) -> list[Timed]:
    """Returns what the command writes to a terminal, and when."""
    start, pieces = time.monotonic(), []
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(command[0], command)
    while data := read(terminal):
        pieces.append((time.monotonic() - start, data.decode(errors="replace")))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        sys.exit("error: the command failed: " + "".join(text for _, text in pieces))
    return lasting(pieces)


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports with this error that the other end has been closed
        return b""


def lasting(pieces: list[Timed]) -> list[Timed]:
    """Returns the text that remains on a terminal, letter by letter: a line of progress that is erased disappears."""
    letters = [(at, letter) for at, text in pieces for letter in text]
    wiped = re.finditer(r"[^\n]*\r\x1b\[K|\r(?=\n)", "".join(letter for _, letter in letters))
    for match in reversed(list(wiped)):
        del letters[match.start() : match.end()]
    return letters


def sooner(letters: list[Timed]) -> list[Timed]:
    early = max(letters[0][0] - LONGEST_WAIT, 0)
    return [(at - early, letter) for at, letter in letters]


def wrapped(letters: list[Timed]) -> list[list[Timed]]:
    """Yields lines of at most `COLUMNS` letters, cut at spaces."""
    times = [at for at, _ in letters]
    whole = "".join(letter for _, letter in letters)
    lines, at = [], 0
    for paragraph in whole.splitlines(keepends=True):
        for match in re.finditer(rf".{{1,{COLUMNS}}}(?:\s+|$)", paragraph.rstrip("\n")):
            lines.append(runs(match.group(), times[at + match.start() :]))
        at += len(paragraph)
    return lines


def runs(line: str, times: list[float]) -> list[Timed]:
    """Yields the pieces of the line that came at the same time."""
    made: list[Timed] = []
    for letter, at in zip(line, times, strict=False):
        if made and made[-1][0] == at:
            made[-1] = (at, made[-1][1] + letter)
        else:
            made.append((at, letter))
    return made


def drawing(command: str, letters: list[Timed]) -> str:
    parts, height = terminal(command, wrapped(letters))
    width = LEFT * 2 + COLUMNS * ADVANCE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
    return "\n".join([head, f"<title>{html.escape(command)}</title>", *parts, "</svg>\n"])


def terminal(command: str, lines: list[list[Timed]]) -> tuple[list[str], int]:
    """Returns the parts of a picture that show a terminal, and the height that they take."""
    parts = [f"<style>{STYLE}</style>", '<rect width="100%" height="100%" rx="10" fill="#0d1117"/>']
    for x, colour in ((22, "#ff5f57"), (42, "#febc2e"), (62, "#28c840")):
        parts.append(f'<circle cx="{x}" cy="20" r="6" fill="{colour}"/>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}"><tspan class="p">$ </tspan>{html.escape(command)}</text>')
    for i, line in enumerate(lines):
        spans = "".join(span(at, text) for at, text in line)
        kind = ' class="d"' if is_note("".join(text for _, text in line)) else ""
        parts.append(f'<text x="{LEFT}" y="{TOP + LINE * (i + 1) - 6}"{kind}>{spans}</text>')
    return parts, TOP + LINE * (len(lines) + 1)


def span(at: float, text: str) -> str:
    return f'<tspan style="animation-delay:{at:.2f}s">{html.escape(text, quote=False)}</tspan>'


def is_note(line: str) -> bool:
    """Returns whether the line is one that the command writes to stderr."""
    return line.startswith(("expert I/O:", "prompt:", "generation:", "peak memory:"))


if __name__ == "__main__":
    main()
