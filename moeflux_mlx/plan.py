"""`python -m moeflux_mlx.plan`: what a model needs in memory, how it will be read, and what the disk allows."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import add_dtype, add_expert_io, add_memory, add_prompt_sizes, add_shards_in
from .cli.planning import DISKS, run
from .cli.run import Parser, execute
from .spec import variants


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "plan",
        "Plan memory, expert I/O and the speed that a disk allows; loads nothing.",
    )
    add = made.add_argument_group("model").add_argument
    add(
        "--model",
        help="directory of a packed model or of an MLX checkpoint, or Hugging Face repo id org/name",
    )
    add_shards_in(add)
    add("--variant", help=f"a known model by name: {', '.join(variants())}")
    add_dtype(add)
    add = made.add_argument_group("machine").add_argument
    add(
        "--ram-gb",
        type=float,
        metavar="GB",
        help="plan for this much memory, in units of 1e9 bytes; default: this machine's. "
        "Only a Mac knows how much of it a Mac's GPU may use",
    )
    add(
        "--disk-gb-per-s",
        type=float,
        metavar="GB",
        help=f"what the disk reads in a second; default: {', '.join(f'{disk:g}' for disk in DISKS)} side by side",
    )
    add("--measure-disk", action="store_true", help="read experts of --model directly, and take that")
    add = made.add_argument_group("memory and expert I/O").add_argument
    add_expert_io(add)
    add("--expert-cache-gb", type=float, metavar="GB", help="memory for streamed experts; default: what is left")
    add_memory(add)
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="positions that the caches hold; default: 8192, or the model's limit, or what there is room for",
    )
    add_prompt_sizes(add)
    add = made.add_argument_group("several machines (docs/several-machines.md)").add_argument
    add("--ranks", type=int, metavar="N", help="plan for one of N such machines, and compare them with one")
    add("--link-us", type=float, default=300.0, metavar="US", help="microseconds of a message (%(default)g)")
    add("--link-gb-per-s", type=float, default=1.0, metavar="GB", help="what a machine receives (%(default)g)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
