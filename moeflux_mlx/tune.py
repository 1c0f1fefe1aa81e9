"""`python -m moeflux_mlx.tune`: the fastest tiles of the kernels on this GPU, and the best size of a pool."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import add_variant
from .cli.run import Parser, execute
from .cli.tuning import run


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "tune",
        "Find the fastest tiles of each kernel on this GPU at a model's shapes, and store them for all later runs; the "
        "last bits of outputs may change. If --model is a directory and does not fit in memory, also find the best "
        "size of its expert pool. Takes one to three minutes.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory, or Hugging Face repo id (only shapes are read); default: demo")
    add_variant(which.add_argument)
    made.add_argument(
        "--file", metavar="FILE", help="file of tiles, for --tiles; default: in the user's cache directory"
    )
    made.add_argument(
        "--minutes", type=float, default=3.0, help="start no new measurement after this time (%(default)s)"
    )
    action = made.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="show the contents of the file and measure nothing")
    action.add_argument("--reset", action="store_true", help="remove the file, so that the built-in tiles are used")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
