"""`python -m moeflux_mlx.plan`: what a model needs in memory, how it will be read, and what the disk allows."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import (
    add_draft,
    add_dtype,
    add_expert_io,
    add_kv_bits,
    add_memory,
    add_prompt_sizes,
    add_shards_in,
    add_variant,
    add_vision,
)
from .cli.planning import DISKS, run
from .cli.rank_planning import LINK_GB_PER_S, LINK_US
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "plan",
        "Show the memory plan of a model, how its experts are read, and the speed that the disk allows. Loads nothing.",
    )
    add = made.add_argument_group("model").add_argument
    add(
        "--model",
        help="directory of a packed model or of an MLX checkpoint, or Hugging Face repo id org/name",
    )
    add_shards_in(add)
    add_variant(add)
    add("--recipe", metavar="NAME_OR_FILE", help="store --variant as moeflux convert --recipe would; default: 4 bits")
    add_dtype(add)
    add_kv_bits(add)
    add_vision(add)
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
        help=f"read speed of the disk; default: {', '.join(f'{disk:g}' for disk in DISKS)} side by side",
    )
    add("--measure-disk", action="store_true", help="measure the disk by reading experts of --model")
    add(
        "--chip",
        action="append",
        dest="chips",
        metavar="NAME",
        help="show instead what --variant should reach on a Mac with this chip, such as 'M4 Max', computed from public "
        "figures; may be repeated; default of --ram-gb: the least that it is sold with from 16 GB on",
    )
    add = made.add_argument_group("memory and expert I/O").add_argument
    add_expert_io(add)
    add_memory(add)
    add(
        "--context", type=int, metavar="TOKENS", help="tokens to plan for; default: 8192, or fewer where only fewer fit"
    )
    add_prompt_sizes(add)
    add_draft(add)
    add = made.add_argument_group("several machines (docs/several-machines.md)").add_argument
    add(
        "--ranks",
        type=int,
        dest="rank_count",
        metavar="N",
        help="plan for one of N equal machines, and compare them with a single one",
    )
    add("--link-us", type=float, metavar="US", help=f"microseconds per message ({LINK_US:g})")
    add("--link-gb-per-s", type=float, metavar="GB", help=f"speed at which a machine receives ({LINK_GB_PER_S:g})")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
