"""`python -m moeflux_mlx.generate`: a prompt in, text out, statistics on stderr."""

import argparse
import sys
from collections.abc import Sequence

from ..cli.answer import DEFAULT_PROMPT, run
from ..cli.options import add_model_options, add_prompt_cache_options, add_sampling_options
from ..cli.ranks import add_rank_options, together
from ..cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "generate",
        "Generate text with a Mixture-of-Experts model.",
    )
    add = made.add_argument_group("prompt").add_argument
    add("words", nargs="*", metavar="PROMPT", help=f"the user's message (default: {DEFAULT_PROMPT!r})")
    add("--prompt", "-p", metavar="TEXT", help="the same; '-' reads stdin")
    add("--image", nargs="+", default=(), metavar="FILE", help="images, placed before the prompt")
    add("--system-prompt", metavar="TEXT", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="give the prompt to the model without a template")
    made.add_argument(
        "--verbose", action="store_true", help="also print the prompt's tokens, the time to load and details of I/O"
    )
    add_sampling_options(made)
    add_model_options(made)
    add_rank_options(made)
    add_prompt_cache_options(made, with_file=True)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(together(run), parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
