"""Run Mixture-of-Experts language models larger than memory on MLX, streaming experts from disk.

The public names, and MLX with them, are imported when the first of them is used, so commands that need none start at
once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import moeflux_mlx.generate  # noqa: F401  (now: a package that is imported later takes the place of the function)

from .foreign import REPLACED_NAMES
from .process import check_mlx
from .version import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:
    del generate  # noqa: F821

    def __getattr__(name: str) -> Any:
        """A public name, or the list of them.

        Raises:
            ImportError: MLX has no engine here, and the message names what to install; or the name is one of mlx-lm's,
                and the message names what replaces it.
        """
        if name == "__all__" or not name.startswith("_"):
            check_mlx()
            public = import_module("moeflux_mlx.public")
            if name in (*public.__all__, "__all__"):
                return getattr(public, name)
            if name in REPLACED_NAMES:  # for an AttributeError, `from moeflux_mlx import X` has words of its own
                raise ImportError(f"moeflux_mlx has no {name}: {REPLACED_NAMES[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return import_module("moeflux_mlx.public").__all__
