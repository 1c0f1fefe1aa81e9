"""`python -m moeflux_mlx.pull`: download a model, and do nothing else."""

import argparse
import sys

from .cli.opening import pull
from .cli.options import add_shared
from .cli.run import Parser, main_of


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "pull", "Download a model into the Hugging Face Hub's cache, without loading it; its directory is printed."
    )
    made.add_argument("model", metavar="ORG/NAME", help="repository of the model; of a GGUF: org/name:Q4_K_M")
    add_shared(made.add_argument, "--revision", "--yes")
    return made


main = main_of(pull, parser)


if __name__ == "__main__":
    sys.exit(main())
