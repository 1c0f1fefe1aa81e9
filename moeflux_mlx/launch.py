"""`python -m moeflux_mlx.launch`: a coding agent or chat program with its own server."""

import argparse
import sys
from collections.abc import Sequence

from .cli.launching import run
from .cli.options import add_model_options, add_prompt_cache_options
from .cli.programs import PROGRAMS
from .cli.run import Parser, execute
from .serve import DECODE_SHARE, POOL_SHARE, add_sampling_defaults


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "launch",
        "Serve a model on a free port with a new key, start a program that uses it, and end both together. Arguments "
        "after -- go to the program. Its own configuration does not change.",
    )
    made.add_argument(
        "program", choices=PROGRAMS, help="program to start; if it is missing, a line says how to install it"
    )
    made.add_argument(
        "--verbose", action="store_true", help="also print the sizes of prompt pieces and the time to load"
    )
    add_sampling_defaults(made)
    add_model_options(made)
    add_prompt_cache_options(made, with_file=False)
    made.set_defaults(
        pool_share=POOL_SHARE, seed=None, host="127.0.0.1", port=0, allowed_host=[], cors_origin=[], sessions=4,
        queue=64, keep_agent_headers=False, allow_image_urls=False, quiet=True, idle_minutes=None,
        parallel=None, decode_share=DECODE_SHARE,
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:end])
    options.arguments = words[end + 1 :]
    return execute(run, options)


if __name__ == "__main__":
    sys.exit(main())
