"""`python -m moeflux_mlx.ranks`: prepares several machines to run one model."""

import argparse
import sys
from collections.abc import Sequence

from .cli.hosts import default_python, run
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "ranks",
        "Check by ssh that machines have the same versions and model, write a host file for mlx.launch "
        "and print the command that starts all ranks.",
    )
    add = made.add_argument
    add("--hosts", required=True, metavar="A,B,C", help="host names for ssh; the first is rank 0")
    add("--ips", metavar="A,B,C", help="addresses at which the machines reach each other; default: the host names")
    add("--model", metavar="DIR", help="directory of the model, at the same path on all machines")
    add("--output", default="hosts.json", metavar="FILE", help="host file to write (%(default)s)")
    add("--backend", choices=("ring", "jaccl"), default="ring", help="transport between ranks (%(default)s)")
    add("--python", default=default_python(), help="interpreter on all machines (%(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
