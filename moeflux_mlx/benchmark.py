"""`python -m moeflux_mlx.benchmark`: how fast a model runs on this machine."""

import argparse
import sys
from collections.abc import Sequence

from .cli.benchmarking import LENGTHS, run
from .cli.options import add_model_options
from .cli.ranks import add_rank_options, together
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "benchmark",
        "Measure prompt and decode rates with random tokens of a few lengths. Also show the machine, the hits and "
        "bytes of streamed experts, and the used and planned memory. Nothing is read that earlier sessions used, and "
        "nothing is noted for later ones.",
    )
    add = made.add_argument_group("measurement").add_argument
    add(
        "--prompt-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help=f"lengths of prompts; default: those of {LENGTHS} that fit the model".replace(",", ""),
    )
    add("--max-tokens", "-m", type=int, default=64, metavar="N", help="tokens after each prompt (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds, whose medians the table shows (%(default)s)")
    add(
        "--parallel",
        type=int,
        nargs="+",
        metavar="N",
        help="also measure how fast this many sequences decode together, in turns, with prompts of the first length",
    )
    add("--against", choices=["mlx-lm"], help="also run the checkpoint in mlx-lm, in turns; it must fit in memory")
    add("--json", action="store_true", help="also print the results as a last line of JSON")
    add_model_options(made)
    add_rank_options(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(together(run), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
