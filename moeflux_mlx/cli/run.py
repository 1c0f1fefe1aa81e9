"""Runs a command: prints its errors and warnings as one line each on stderr, and returns its exit code."""

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from ..errors import MoefluxError, MoefluxWarning, RequestError, did_you_mean
from ..foreign import remedy_of_option
from ..ops.limits import within_limits
from ..planning.settings import allow_open_files, set_variables
from .terminal import INTERRUPTED, give_up_stdout, note, raise_again

UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)  # errors of writing to stdout


class Parser(argparse.ArgumentParser):
    """The options of a command, which are given whole; a wrong one ends in one line, with the option that was probably
    meant, or with what replaces it here if it is another program's.
    """

    def __init__(self, command: str, description: str):
        super().__init__(prog=program(command), description=description, allow_abbrev=False)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """As of argparse, which takes the foreign `-hf` for `-h` and `f`."""
        words = list(sys.argv[1:] if args is None else args)
        given = [word.split("=")[0] for word in words[: words.index("--") if "--" in words else None]]
        own = self._option_string_actions
        foreign = {word: remedy_of_option(word, own) for word in given if word.startswith("-") and word not in own}
        if lines := [f"{word}: {remedy}" for word, remedy in foreign.items() if remedy]:
            self.error("; ".join(lines))
        return super().parse_args(words)

    def error(self, message: str) -> NoReturn:
        unknown, meant = [word.split("=")[0] for word in message.split() if word.startswith("-")], ""
        if message.startswith("unrecognized arguments"):
            if unknown:
                meant = did_you_mean(unknown[0], self._option_string_actions)
            elif "--model" in self._option_string_actions:
                meant = "; a model is given with --model"
        elif message.startswith("argument "):  # "argument --max-tokens/-m: invalid int value"
            short = [word.rstrip(":") for word in message.split()[1].split("/") if not word.startswith("--")]
            theirs = {word: remedy_of_option(word, self._option_string_actions) for word in short}
            meant = "".join(f"; for {word} of llama.cpp {remedy}" for word, remedy in theirs.items() if remedy)
        self.exit(2, f"error: {message}{meant}; {self.prog} --help lists the options\n")


def program(command: str) -> str:
    """The command as it was called, for its usage."""
    is_script = Path(sys.argv[0]).name == "moeflux"
    return f"moeflux {command}" if is_script else f"python -m moeflux_mlx.{command}"


def main_of(
    run: Callable[[argparse.Namespace], int], parser: Callable[[], argparse.ArgumentParser], writes: bool = True
) -> Callable[..., int]:
    """The `main` of a command: it runs with the words that it is called with, or else with the process's own."""
    return lambda argv=None: execute(run, parser().parse_args(argv), writes)


def execute(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, writes: bool = True) -> int:
    """Runs a command, which `writes` to stdout or does not; returns its exit code.

    Our own errors and warnings become one line each on stderr.
    """
    allow_open_files()
    raise_again()
    with warnings.catch_warnings():
        warnings.simplefilter("always", MoefluxWarning)
        warnings.showwarning = _show_warning
        try:
            prepare_streams(writes)
            set_variables()
            with within_limits():
                code = run(options)
            if writes:
                sys.stdout.flush()
            return code
        except MoefluxError as error:
            note(f"error: {error}")
        except BrokenPipeError:  # the reader of the text has gone
            give_up_stdout()
        except OSError as error:
            is_output = error.errno in UNWRITABLE and error.filename is None
            if is_output:
                give_up_stdout()
            note(f"error: the output cannot be written: {error.strerror}" if is_output else f"error: {error}")
        except KeyboardInterrupt:
            return INTERRUPTED
    return 1


def prepare_streams(writes: bool) -> None:
    """Prepares the standard streams: characters that the terminal cannot show become question marks, and closed streams
    are replaced.

    Raises:
        RequestError: stdout is closed, and the command `writes` to it.
    """
    is_closed = sys.stdout is None
    for descriptor in (0, 1, 2):  # a file that is opened in the place of a stream is taken for it: MLX reads none at 0
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or _nowhere(mode) for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    if is_closed and writes:
        raise RequestError("stdout is closed, so there is nowhere to write to")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _nowhere(mode: str) -> TextIO:
    """The null device, at the lowest descriptor that is free; it stays open."""
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Prints a warning as one line, without the place in the code."""
    note(f"warning: {message}" if issubclass(category, MoefluxWarning) else f"{category.__name__}: {message}")
