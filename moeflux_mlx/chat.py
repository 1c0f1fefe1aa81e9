"""`python -m moeflux_mlx.chat`: a conversation with a model, in a terminal or through pipes."""

import argparse
import sys
from collections.abc import Sequence

from .cli.options import add_model_options, add_prompt_cache_options, add_sampling_options
from .cli.ranks import add_rank_options, together
from .cli.repl import run
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "chat",
        "Chat with a Mixture-of-Experts model. In the chat, /help lists the commands.",
    )
    add = made.add_argument_group("chat").add_argument
    add("--system-prompt", metavar="TEXT", help="system message")
    add("--hide-thinking", action="store_true", help="do not show the model's reasoning")
    add("--history-file", metavar="FILE", help="save typed lines in FILE; default: keep them until the chat ends")
    add("--verbose", action="store_true", help="also print the time to load and statistics of every answer")
    add_sampling_options(made)
    add_model_options(made)
    add_rank_options(made)
    add_prompt_cache_options(made, with_file=False)
    made.set_defaults(max_tokens=4096)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(together(run), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
