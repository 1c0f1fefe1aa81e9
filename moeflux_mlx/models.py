"""`python -m moeflux_mlx.models`: which of the known models suit this machine."""

import argparse
import sys
from collections.abc import Sequence

from .cli.known_models import COMFORTABLE, run
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "models",
        "List the known models: how much disk and memory each one needs here, its expected tokens/s, and the commands "
        f"to run it. The largest model above {COMFORTABLE:g} tokens/s comes first. Downloads nothing.",
    )
    add = made.add_argument
    add("--ram-gb", type=float, metavar="GB", help="memory in units of 1e9 bytes; default: this machine's")
    add("--disk-gb-per-s", type=float, metavar="GB", help="read speed of the disk; default: 5")
    add("--measure-disk", metavar="DIR", help="measure the disk by reading experts of the model in this directory")
    add(
        "--products-gb-per-s",
        type=float,
        metavar="GB",
        help="speed at which the products of one token read weights; default: measured here, in about a second",
    )
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="plan memory for this many tokens; default: 8192, or as many as fit",
    )
    add("--json", action="store_true", help="print one JSON object instead, in bytes and seconds")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
