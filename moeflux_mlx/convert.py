"""`python -m moeflux_mlx.convert`: makes a packed model directory from a checkpoint."""

import argparse
import sys
from collections.abc import Sequence

from .cli.conversion import run
from .cli.run import Parser, execute
from .packing.convert import convert
from .quant import AFFINE_BITS, AFFINE_GROUPS, COMPUTED_MODES, DEFAULT

__all__ = ["convert", "main", "parser"]


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "convert",
        "Convert a Mixture-of-Experts checkpoint into a packed model directory. "
        "An interrupted conversion is resumed by running the same command again.",
    )
    add = made.add_argument
    add("--hf-path", required=True, metavar="DIR_OR_REPO", help="checkpoint directory, or repo id org/name")
    add("--mlx-path", required=True, metavar="OUT", help="directory to write")
    add("--q-bits", type=int, choices=AFFINE_BITS, help=f"of weights that come as floats ({DEFAULT.bits})")
    add("--q-group-size", type=int, choices=AFFINE_GROUPS, help=f"({DEFAULT.group_size}; mxfp4 has 32)")
    add("--q-mode", choices=COMPUTED_MODES, default=DEFAULT.mode, help="(%(default)s)")
    add("--expert-bits", type=int, choices=AFFINE_BITS, help="of routed experts, if not as --q-bits")
    add("--down-bits", type=int, choices=AFFINE_BITS, help="of their down projections, if not as --expert-bits")
    add(
        "--requantize",
        action="store_true",
        help="quantise again what cannot be kept, and experts that are not in --expert-bits, --down-bits (lossy)",
    )
    add("--verify", action="store_true", help="read everything again and compare it with a fresh conversion")
    add("--delete-source", action="store_true", help="delete each file of the directory when it is packed; asks first")
    add("--yes", action="store_true", help="delete without asking")
    add("--ranks", type=int, metavar="N", help="with --rank: write only what that rank of several machines needs")
    add("--rank", type=int, metavar="I", help="which of them, from 0 on")
    add("--also", nargs="+", default=[], metavar="DIR", help="on other drives: has experts too, by turns with OUT")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv), writes=False)


if __name__ == "__main__":
    sys.exit(main())
