"""`python -m moeflux_mlx.serve`: a model behind HTTP, for agents and chat apps, with a web page."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import PENALTY, add_context_size, add_model_options, add_prompt_cache_options, add_xtc
from .cli.ranks import add_rank_options, together
from .cli.run import Parser, execute
from .cli.serving import run

DECODE_SHARE = 1 / 3
POOL_SHARE = 0.75  # share of the pool that a context longer than the default must leave


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "serve",
        "Serve Mixture-of-Experts models to agents and chat apps, with the APIs of OpenAI and Anthropic.",
    )
    server = made.add_argument_group("server")
    add_address(server)
    add_capacity(server)
    add_client_options(server)
    server.add_argument("--quiet", action="store_true", help="do not print a line for each request")
    server.add_argument(
        "--verbose", action="store_true", help="also print the sizes of prompt pieces and the time to load"
    )
    add_sampling_defaults(made)
    add_model_options(made, several=True)
    add_rank_options(made)
    add_prompt_cache_options(made, with_file=False)
    made.set_defaults(pool_share=POOL_SHARE, seed=None)
    return made


def add_address(server: argparse._ArgumentGroup) -> None:
    """Where the server listens, and the key that lets clients in."""
    add, key = server.add_argument, server.add_mutually_exclusive_group().add_argument
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8080, help="port to listen at; 0: any free port (%(default)s)")
    key("--api-key-file", metavar="FILE", help="file with the key that clients must send")
    key("--no-key", action="store_true", help="let other machines in without a key")


def add_capacity(server: argparse._ArgumentGroup) -> None:
    """How much is computed, waits and stays in memory."""
    add = server.add_argument
    add(
        "--parallel",
        type=int,
        metavar="N",
        help="maximum number of requests that are answered at a time; default: as many as fit in memory, and at most 8 "
        "if experts are read from disk",
    )
    add(
        "--decode-share",
        type=float,
        default=DECODE_SHARE,
        metavar="SHARE",
        help="share of the time that running answers get while a prompt is computed (%(default).2g)",
    )
    add("--sessions", type=int, default=4, metavar="N", help="maximum number of conversations in memory (%(default)s)")
    add(
        "--idle-minutes",
        type=float,
        metavar="MINUTES",
        help="unload a model that nobody has used for this time; the next request loads it again",
    )
    add("--queue", type=int, default=64, metavar="N", help="maximum number of waiting requests (%(default)s)")


def add_client_options(server: argparse._ArgumentGroup) -> None:
    """Which clients may use the server, and what happens to the prompts that they send."""
    add = server.add_argument
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin use the server; may be repeated",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that clients may use for this server; may be repeated",
    )
    add(
        "--keep-agent-headers",
        action="store_true",
        help="keep agents' billing headers and token counters in prompts; cached prompts are then not reused",
    )
    add(
        "--allow-image-urls",
        action="store_true",
        help="fetch images of http:// and https:// URLs from public addresses; without it, clients must send them as "
        "data: URLs",
    )


def add_sampling_defaults(parser: argparse.ArgumentParser) -> None:
    default = "default: the model's generation_config.json"
    add = parser.add_argument_group("sampling, if a request does not set it", default).add_argument
    add("--temp", type=float, help="sampling temperature; 0: most likely token")
    add("--top-p", type=float, help="keep the smallest set of likely tokens whose probabilities add up to this")
    add("--top-k", type=int, help="keep this many of the most likely tokens")
    add("--min-p", type=float, help="drop tokens whose probability is below this share of the most likely token's")
    add_xtc(add)
    add("--repetition-penalty", type=float, metavar="P", help=PENALTY)
    add_context_size(add)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(argv)
    options.model = options.models[0] if options.models else None  # which further ranks load
    return execute(together(run), options)


if __name__ == "__main__":
    sys.exit(main())
