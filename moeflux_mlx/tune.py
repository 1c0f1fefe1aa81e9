"""`python -m moeflux_mlx.tune`: the fastest tiles of the kernels on this GPU, and the best size of a pool."""

import argparse
import sys
from collections.abc import Sequence

from .cli.run import Parser, execute
from .cli.tuning import run
from .spec import variants


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "tune",
        "Try other tiles of each kernel on this GPU at a model's shapes, check their values, and keep the "
        "fastest where load and the commands find them. Takes one to three minutes. A model in a directory that does "
        "not fit memory is then run with pools of several sizes, and the best size is kept too. "
        "Other tiles may change the last bits of what a model computes, in all modes alike.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "--model", help="directory, or Hugging Face repo id, of which only shapes are read; default: demo"
    )
    which.add_argument("--variant", choices=variants(), help="a named model's shapes; no files are needed")
    made.add_argument("--file", help="keep them here, for --tiles; default: in the user's directory for caches")
    made.add_argument("--minutes", type=float, default=3.0, help="begin nothing new after so many (%(default)s)")
    action = made.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="show what the file holds, and find nothing")
    action.add_argument("--reset", action="store_true", help="remove the file, so that the code's tiles are used")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
