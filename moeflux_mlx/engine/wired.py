"""MLX's limit of wired memory (Metal), which all models of the process share. It knows only numbers of bytes."""

import threading
from collections.abc import Callable

import mlx.core as mx

_lock = threading.RLock()  # a garbage collection inside may release another model's share
_shares: dict[object, int] = {}


def wire(nbytes: int, at_most: int) -> Callable[[], None]:
    """Raises the limit by `nbytes`, up to `at_most` in total; the returned function takes the share back, once."""
    share = object()

    def release() -> None:
        with _lock:
            if _shares.pop(share, None) is not None:
                _set(at_most)

    with _lock:
        _shares[share] = nbytes
        try:
            _set(at_most)
        except BaseException:
            del _shares[share]
            raise
    return release


def _set(at_most: int) -> None:
    total = None
    while total != sum(_shares.values()):  # repeat until no share was released meanwhile
        total = sum(_shares.values())
        mx.set_wired_limit(min(total, at_most))
