"""`python -m moeflux_mlx.models`: which of the known models suit this machine."""

import argparse
import sys
from collections.abc import Sequence

from .cli.known_models import COMFORTABLE, run
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "models",
        "List the known models: what each takes of disk and memory here, tokens a second to expect, and commands to "
        f"run them. Of those above {COMFORTABLE:g} tokens a second the largest comes first. Downloads nothing.",
    )
    add = made.add_argument
    add("--ram-gb", type=float, metavar="GB", help="memory in units of 1e9 bytes; default: this machine's")
    add("--disk-gb-per-s", type=float, metavar="GB", help="what the disk reads in a second; default: 5 is assumed")
    add("--measure-disk", metavar="DIR", help="measure the disk by reading experts of the model in this directory")
    add(
        "--products-gb-per-s",
        type=float,
        metavar="GB",
        help="weights that the products of one token go through in a second; default: measured here, in about a second",
    )
    add("--context", type=int, metavar="TOKENS", help="to plan memory for; default: 8192, or what there is room for")
    add("--json", action="store_true", help="print one JSON object instead, in bytes and seconds")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
