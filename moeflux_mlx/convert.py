"""`python -m moeflux_mlx.convert`: makes a packed model directory from a checkpoint."""

import argparse
import sys
from collections.abc import Sequence

from .cli.conversion import run
from .cli.run import execute, program
from .packing.convert import DEFAULT_Q_BITS, Q_BITS, convert
from .quant import DEFAULT

__all__ = ["convert", "main", "parser"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program("convert"),
        description="Convert a Mixture-of-Experts checkpoint into a packed model directory. "
        "An interrupted conversion is resumed by running the same command again.",
    )
    add = made.add_argument
    add("--hf-path", required=True, metavar="DIR_OR_REPO", help="checkpoint directory, or repo id org/name")
    add("--mlx-path", required=True, metavar="OUT", help="directory to write")
    add(
        "--q-bits",
        type=int,
        choices=Q_BITS,
        default=DEFAULT_Q_BITS,
        help="of resident layers; experts have 4 (%(default)s)",
    )
    add("--q-group-size", type=int, choices=(DEFAULT.group_size,), default=DEFAULT.group_size, help="(%(default)s)")
    add("--requantize", action="store_true", help="quantise again what is stored in another way (lossy)")
    add("--verify", action="store_true", help="read everything again and compare it with a fresh conversion")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv), writes=False)


if __name__ == "__main__":
    sys.exit(main())
