"""`python -m moeflux_mlx COMMAND` is `moeflux COMMAND`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
