"""`python -m moeflux_mlx.doctor`: what this machine is, whether it computes rightly, and what it can run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli.diagnosis import run
from .cli.run import Parser, execute


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
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
