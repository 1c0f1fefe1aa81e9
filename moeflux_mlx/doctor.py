"""`python -m moeflux_mlx.doctor`: describes this machine, checks its values, and lists what it can run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli import diagnosis, launches, reporting
from .cli.launches import BACKENDS
from .cli.options import add_variant
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "doctor",
        "Describe this machine, check that its kernels compute correctly, measure the disk, and list the models that "
        "fit. Takes a few seconds and needs no model; the exit code is 1 if a check fails.",
    )
    disk = made.add_mutually_exclusive_group()
    disk.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="measure the disk of this directory, with a temporary file of 512 MB; "
        "default: the Hugging Face cache, or its parent",
    )
    disk.add_argument("--no-disk", action="store_true", help="do not measure the disk")
    disk.add_argument(
        "--launches",
        action="store_true",
        help="show only which kernels a model runs for one, a few and many tokens, and why others do not run",
    )
    made.add_argument(
        "--report",
        nargs="?",
        const=reporting.FILE,
        metavar="FILE",
        help="also compile as many kernels of the known models as 120 s allow and run the demo model, and save "
        "everything in a file to send, without names, paths or keys (%(const)s)",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        help="with --launches: directory or Hugging Face repo id (no weights are read); default: demo",
    )
    add_variant(which.add_argument, "with --launches: ")
    made.add_argument("--backend", choices=BACKENDS, help="with --launches: the backend; default: this machine's")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(argv)
    if options.report is not None:
        return execute(reporting.run, options)
    return execute(launches.run if options.launches else diagnosis.run, options)


if __name__ == "__main__":
    sys.exit(main())
