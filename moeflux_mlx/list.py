"""`python -m moeflux_mlx.list`: the models that were downloaded."""

import argparse
import sys
from collections.abc import Sequence

from .cli.downloads import list_models
from .cli.run import Parser, execute


def parser() -> argparse.ArgumentParser:
    return Parser("list", "List the models in the Hugging Face Hub's cache that can be run, and their size on disk.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(list_models, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
