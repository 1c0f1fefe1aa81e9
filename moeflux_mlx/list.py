"""`python -m moeflux_mlx.list`: the models that were downloaded."""

import argparse
import sys

from .cli.downloads import list_models
from .cli.run import Parser, main_of


def parser() -> argparse.ArgumentParser:
    return Parser("list", "List the models in the Hugging Face Hub's cache that can be run, and their size on disk.")


main = main_of(list_models, parser)


if __name__ == "__main__":
    sys.exit(main())
