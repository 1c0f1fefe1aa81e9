"""`python -m moeflux_mlx.convert`: makes a packed model directory from a checkpoint."""

import argparse
import sys
from collections.abc import Sequence

from .cli.conversion import add_calibration, run
from .cli.options import add_tokenizer
from .cli.run import Parser, execute
from .packing.convert import LAYOUTS, PACKED, convert
from .packing.ggml import TYPES
from .packing.recipe import RECIPES
from .quant import AFFINE_BITS, AFFINE_GROUPS, DEFAULT, MLX_MODES
from .rounding.methods import FIT, METHODS

__all__ = ["convert", "main", "parser"]

ROUNDING = "how floats become codes: fit searches the least squared error, minmax is MLX's own way (%(default)s)"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "convert",
        "Convert a Mixture-of-Experts checkpoint into a packed model directory. "
        "An interrupted conversion is resumed by running the same command again.",
    )
    add = made.add_argument
    add(
        "--hf-path",
        required=True,
        metavar="DIR_OR_REPO",
        help="checkpoint directory, GGUF, or repo id org/name, of a GGUF org/name:Q4_K_M",
    )
    add("--mlx-path", required=True, metavar="OUT", help="directory to write")
    add("--q-bits", type=int, choices=AFFINE_BITS, help=f"bits of weights that are stored as floats ({DEFAULT.bits})")
    add(
        "--q-group-size",
        type=int,
        choices=AFFINE_GROUPS,
        help=f"weights per group ({DEFAULT.group_size}; fixed in other modes)",
    )
    add("--q-mode", choices=list(MLX_MODES), default=DEFAULT.mode, help="quantisation mode (%(default)s)")
    add(
        "--q-type",
        type=str.upper,
        choices=TYPES,
        metavar="TYPE",
        help="type of GGUF for routed experts, such as Q3_K; the rest: --recipe balanced (docs/formats.md)",
    )
    add("--expert-bits", type=int, choices=AFFINE_BITS, help="bits of routed experts; default: as --q-bits")
    add("--down-bits", type=int, choices=AFFINE_BITS, help="bits of their down projections; default: as --expert-bits")
    add(
        "--recipe",
        metavar="NAME_OR_FILE",
        help=f"bits of each part of the model: {', '.join(RECIPES)}, or a JSON file (docs/quality.md); "
        "the options above override it; default: uniform, with 8 bits beside experts that are already quantised",
    )
    add(
        "--requantize",
        action="store_true",
        help="quantise experts again (lossy) if they have other bits than asked for, or differ within a layer",
    )
    add("--rounding", choices=METHODS, default=FIT, help=ROUNDING)
    add_calibration(made)
    add("--verify", action="store_true", help="read all files again and compare them with a new conversion")
    add("--delete-source", action="store_true", help="delete each file of the directory when it is packed; asks first")
    add("--yes", action="store_true", help="delete without asking")
    add("--ranks", type=int, metavar="N", help="with --rank: write only the experts of that rank, of N machines")
    add("--rank", type=int, metavar="I", help="number of the rank, from 0")
    add(
        "--also",
        nargs="+",
        default=[],
        metavar="DIR",
        help="directories on other drives that share the experts with OUT",
    )
    add("--layout", choices=LAYOUTS, default=PACKED, help="packed, or a checkpoint for mlx-lm (%(default)s)")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    add_tokenizer(add)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv), writes=False)


if __name__ == "__main__":
    sys.exit(main())
