"""`python -m moeflux_mlx.remove`: delete a model that was downloaded."""

import argparse
import sys
from collections.abc import Sequence

from .cli.downloads import remove_model
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    made = Parser("remove", "Delete a model, with all of its revisions, from the Hugging Face Hub's cache.")
    made.add_argument("name", metavar="ORG/NAME", help="name of the model, as moeflux list shows it")
    made.add_argument("--yes", action="store_true", help="delete it without asking")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(remove_model, parser().parse_args(argv), writes=False)


if __name__ == "__main__":
    sys.exit(main())
