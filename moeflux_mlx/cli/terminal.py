"""Output to a terminal and input from it: lines on stderr, progress, interruption. While a command is
imported, an interrupt ends the process without a traceback (`end_at_once`).
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO
from unicodedata import combining, east_asian_width

from ..errors import RequestError

JUDGED_FROM = 2.0  # after this many seconds of work, the remaining time is estimated
LINES_APART = 30.0  # seconds between lines of progress in a file
# Characters that move a terminal's cursor or change its state; a prompt can make a model write them.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


def note(text: str) -> None:
    """Prints lines on stderr; a closed stderr is ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints lines on stdout; it does not matter if their reader has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        give_up_stdout()


def give_up_stdout() -> None:
    """Keeps the interpreter from flushing to a closed stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def agree(what: str, yes: bool) -> None:
    """Asks on a terminal whether to go on, unless the answer was given with --yes.

    Raises:
        RequestError: the answer is no, or there is no terminal.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError(f"{what}; there is no terminal to ask on: add --yes to agree")
    print(f"{what}\ngo on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RequestError("nothing was done: the answer was not y")


def peak_memory_gb() -> float:
    """The most memory that this process has held, in units of 1e9 bytes, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def mapped_memory_gb(status: Path = Path("/proc/self/status")) -> float | None:
    """The memory of this process that is pages of mapped files, in units of 1e9 bytes; None: only Linux tells."""
    try:
        found = re.search(r"^RssFile:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 / 1e9 if found else None


def unsafe_letters(out: TextIO) -> dict[int, None]:
    """The characters to remove from a model's text for `out`, as `str.translate` takes them."""
    return CONTROLS if out.isatty() else {}


class WordWrap:
    """Breaks lines between words at a terminal's edge, in text that comes in pieces; code between ``` is left alone.

    A character is shown at once. A word that becomes too long for its line is moved to the next one.
    """

    def __init__(self) -> None:
        self.line, self.start, self.is_code = "", 0, False  # `start`: of the line's last word

    def feed(self, text: str) -> str:
        """The text to write for the next piece."""
        edge = shutil.get_terminal_size().columns
        return "".join(self._letter(letter, edge) for letter in text)

    def _letter(self, letter: str, edge: int) -> str:
        if letter == "\n":
            self.is_code ^= self.line.startswith("```")
            self.line = ""
            return letter
        if not self.line or _parts_words(letter) or _parts_words(self.line[-1]):
            self.start = len(self.line)
        self.line += letter
        if self.is_code or columns(self.line) <= edge:
            return letter
        if self.start == 0:  # the terminal breaks what is longer than a line
            self.line = letter
            return letter
        before, self.line, self.start = columns(self.line[: self.start]), self.line[self.start :].lstrip(), 0
        if len(self.line) < 2:
            return f"\n{self.line}"
        # The cursor moves to the beginning of the word, and the rest is erased.
        return f"\033[{before + 1}G\033[K\n{self.line}"


def _parts_words(letter: str) -> bool:
    return letter.isspace() or columns(letter) == 2


def columns(text: str) -> int:
    """The width of text in a terminal; East Asian letters and pictures take two columns."""
    return sum(0 if combining(one) else 2 if east_asian_width(one) in "WF" else 1 for one in text)


def duration(seconds: float) -> str:
    """Whole seconds, or minutes and seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"


class ProgressLine:
    """One line on a terminal's stderr that is wiped when the work is done; elsewhere nothing, or a line now and then.

    What is done is counted in tokens, or in bytes.

    Args:
        lines: whether lines are written where stderr is no terminal: for work of many minutes.
    """

    def __init__(self, label: str, of_bytes: bool = False, lines: bool = False):
        self.label, self.of_bytes, self.shown = label, of_bytes, False
        self._next_line = 0.0 if lines else float("inf")
        self._began: tuple[float, int] | None = None  # when the first part was reported, and how much was done

    def __enter__(self) -> "ProgressLine":
        self._show(f"{self.label} ...")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        """Reports the work done; the remaining time is shown once it can be estimated."""
        now = time.perf_counter()
        self._began = self._began or (now, done)
        seconds, advanced = now - self._began[0], done - self._began[1]
        left = seconds / advanced * (total - done) if advanced else 0.0
        rest = f", {duration(left)} left" if seconds >= JUDGED_FROM and advanced else ""
        amount = f"{done / 1e9:.1f}/{total / 1e9:.1f} GB" if self.of_bytes else f"{done}/{total} tokens"
        self._show(f"{self.label} {amount}{rest}")

    def close(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self.shown = True
        elif time.perf_counter() >= self._next_line:
            self._next_line = time.perf_counter() + LINES_APART
            note(text)


class Interruption:
    """While entered, Ctrl-C sets `wanted`, and raises too if `at_once` is set or it is not the first.

    Raising alone is not enough: MLX drops errors that come up while it looks at a numpy array, so that about one
    Ctrl-C in two hundred would be lost. A process that ignores Ctrl-C (nohup) goes on ignoring it.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.wanted, self._at_once = False, at_once

    def __enter__(self) -> "Interruption":
        self._before = signal.getsignal(signal.SIGINT)
        self._takes = callable(self._before) and threading.current_thread() is threading.main_thread()
        if self._takes:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises the KeyboardInterrupt that is wanted."""
        if self.wanted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        again, self.wanted = self.wanted, True
        if again or self._at_once:
            raise KeyboardInterrupt


INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


def end_at_once() -> None:
    """From now on an interrupt ends the process at once, unless interrupts are ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Undoes `end_at_once`: from now on an interrupt raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
