"""`python -m moeflux_mlx.serve`: a model behind HTTP, for agents and chat apps, with a page of its own."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import add_model_options, add_prompt_cache_options
from .cli.ranks import add_rank_options, together
from .cli.run import execute, program
from .cli.serving import run

POOL_SHARE = 0.75  # of the pool of experts that a context longer than the default leaves


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program("serve"),
        description="Serve a packed Mixture-of-Experts model to agents and chat apps by OpenAI's and Anthropic's APIs.",
    )
    add = made.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8080, help="port to listen at; 0: any that is free (%(default)s)")
    add("--api-key-file", metavar="FILE", help="holds the key that requests must carry")
    add("--no-key", action="store_true", help="let other machines in without a key")
    add("--sessions", type=int, default=4, metavar="N", help="texts that are kept in memory, at most (%(default)s)")
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait, at most (%(default)s)")
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
        help="a name under which the server may be asked for; may be repeated",
    )
    add(
        "--keep-agent-headers",
        action="store_true",
        help="leave billing headers and token counters in prompts, where agents put them; each makes a prompt new",
    )
    add("--quiet", action="store_true", help="print no line for each request")
    add("--verbose", action="store_true", help="also print how prompts are cut and the time to load")
    add_sampling_defaults(made)
    add_model_options(made)
    add_rank_options(made)
    add_prompt_cache_options(made, with_file=False)
    made.set_defaults(pool_share=POOL_SHARE, seed=None)
    return made


def add_sampling_defaults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where a request does not say; default: the model's generation_config.json")
    add = group.add_argument
    add("--temp", type=float, help="sampling temperature; 0: most likely token")
    add("--top-p", type=float, help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, help="keep this many tokens")
    add("--min-p", type=float, help="drop tokens less likely than this share of the best one")
    add("--repetition-penalty", type=float, help="divide the logits of recent tokens by this")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(together(run), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
