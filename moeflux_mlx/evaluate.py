"""`python -m moeflux_mlx.evaluate`: how well a model predicts a text, and how far it is from another."""

import argparse
import sys
from collections.abc import Sequence

from .cli.evaluation import run
from .cli.options import (
    add_activations,
    add_dtype,
    add_expert_io,
    add_kv_bits,
    add_memory,
    add_shards_in,
    add_tiles,
)
from .cli.run import Parser, execute
from .tools.evaluate import WINDOW


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "evaluate",
        "Measure a model's perplexity on a text, and its KL divergence from another model.",
    )
    add = made.add_argument_group("measurement").add_argument
    add("--model", help="directory, or Hugging Face repo id org/name; default: the demo model in the package")
    add_shards_in(add)
    add(
        "--against",
        metavar="MODEL",
        help="reference model, such as the same one with more bits; its keys and values have 16 bits",
    )
    add("--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text to read; several stand alone")
    add(
        "--window",
        type=int,
        default=WINDOW,
        metavar="TOKENS",
        help="tokens that are read together; each window is independent (%(default)s)",
    )
    add("--tokens", type=int, metavar="N", help="read the first N tokens of each text; default: all")
    add(
        "--layer-by-layer",
        action="store_true",
        help="keep one layer and one expert of a model in memory, in floats; a checkpoint that cannot be used in place "
        "is always read so",
    )
    add("--svg", metavar="FILE", help="draw the KL divergence by position to FILE")
    add = made.add_argument_group("memory and expert I/O").add_argument
    add_dtype(add)
    add_activations(add)
    add_kv_bits(add)
    add_expert_io(add)
    add_tiles(add)
    add_memory(add)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
