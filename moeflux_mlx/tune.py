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
        "Measure several tiles of each kernel on this GPU at a model's shapes, check their values, and store the "
        "fastest for all later runs. Takes one to three minutes. If --model is a directory and the model does not fit "
        "in memory, also run it with pools of several sizes and store the best size. "
        "New tiles may change the last bits of a model's output, in all modes alike.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("--model", help="directory, or Hugging Face repo id (only shapes are read); default: demo")
    which.add_argument("--variant", choices=variants(), help="a named model's shapes; no files are needed")
    made.add_argument("--file", help="file for the tiles, for --tiles; default: in the user's cache directory")
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
