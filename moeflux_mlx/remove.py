"""`python -m moeflux_mlx.remove`: delete a model that was downloaded."""

import argparse
import sys

from .cli.downloads import remove_model
from .cli.run import Parser, main_of


def parser() -> argparse.ArgumentParser:
    made = Parser("remove", "Delete a model, with all of its revisions, from the Hugging Face Hub's cache.")
    made.add_argument("name", metavar="ORG/NAME", help="name of the model, as moeflux list shows it")
    made.add_argument("--yes", action="store_true", help="delete it without asking")
    return made


main = main_of(remove_model, parser, writes=False)


if __name__ == "__main__":
    sys.exit(main())
