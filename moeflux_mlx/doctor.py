"""`python -m moeflux_mlx.doctor`: what this machine is, whether it computes rightly, and what it can run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli import launches
from .cli.diagnosis import run
from .cli.launches import BACKENDS
from .cli.run import Parser, execute
from .spec import variants


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "doctor",
        "Show what this machine is, check that it computes rightly, measure the disk, and list what fits. "
        "Takes some seconds and needs no model; the exit code is 1 if anything is wrong.",
    )
    made.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="measure the disk that holds this directory, with a file of 512 MB that is removed again; "
        "default: the Hugging Face cache, or what holds it",
    )
    made.add_argument("--no-disk", action="store_true", help="do not measure the disk")
    made.add_argument(
        "--launches",
        action="store_true",
        help="show instead which kernels a model runs for one token, a few and many, and why not others",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        help="with --launches: directory or Hugging Face repo id, of which no weights are read; default: demo",
    )
    which.add_argument("--variant", choices=variants(), help="with --launches: a named model; no files are needed")
    made.add_argument("--backend", choices=BACKENDS, help="with --launches: another than this machine computes on")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(argv)
    return execute(launches.run if options.launches else run, options)


if __name__ == "__main__":
    sys.exit(main())
