"""MLX's limit of wired memory (Metal), shared by all models of the process.

The limit is one for the process, so each model adds its share while it lives. It knows numbers of bytes only.
"""

import threading
from collections.abc import Callable

import mlx.core as mx

_lock = threading.Lock()
_shares: dict[object, int] = {}


def wire(nbytes: int, at_most: int) -> Callable[[], None]:
    """Raises the limit by `nbytes`, to `at_most` in all; calling what is returned takes the share back, once."""
    share = object()
    _shares[share] = nbytes
    _set(at_most)

    def release() -> None:
        if _shares.pop(share, None) is not None:
            _set(at_most)

    return release


def _set(at_most: int) -> None:
    with _lock:
        mx.set_wired_limit(min(sum(_shares.values()), at_most))
