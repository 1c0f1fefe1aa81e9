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
        "Measure prompt and decode rates at a few lengths of random tokens, with the hits and bytes of "
        "streamed experts, memory against its plan and the machine.",
    )
    add = made.add_argument_group("measurement").add_argument
    add(
        "--prompt-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help=f"lengths of prompts; default: those of {LENGTHS} that fit the model".replace(",", ""),
    )
    add("--max-tokens", "-m", type=int, default=64, help="tokens after each prompt (%(default)s)")
    add("--rounds", type=int, default=3, help="the table has medians of so many (%(default)s)")
    add("--against", choices=["mlx-lm"], help="run the same checkpoint by it too, in turns; it must fit in memory")
    add("--json", action="store_true", help="print all of it as one line of JSON too, the last")
    add_model_options(made)
    add_rank_options(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(together(run), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
