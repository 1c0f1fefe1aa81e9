"""What the commands share: options, running one, and the terminal.

If MLX cannot be imported, a command that runs as a module (`python -m moeflux_mlx.plan`) ends here with one line,
because its own imports need MLX. They take half a second, in which an interrupt ends the process at once.
"""

import sys

from .main import COMMANDS, require_mlx
from .terminal import end_at_once

_spec = getattr(sys.modules["__main__"], "__spec__", None)
if _spec is not None and _spec.name in {module for module, _ in COMMANDS.values()}:
    end_at_once()
    require_mlx()
