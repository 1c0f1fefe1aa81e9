"""Checks that MLX is installed, and which process computes: neither MLX's threads nor ours survive a fork."""

import os

from .errors import ExpertIOError

_computing: int | None = None  # as MLX's own state, one for all models


def check_mlx() -> None:
    """Raises ImportError: MLX cannot be imported; on Linux the package mlx alone has no engine."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"MLX cannot be imported ({error}); on Linux it needs a backend: pip install 'mlx[cpu]', or 'mlx[cuda13]' "
            "for an NVIDIA GPU, which the extras [cpu] and [cuda13] of moeflux-mlx do"
        ) from None


def claim_process() -> int:
    """Records this process as the one that MLX computes in, and returns its id.

    Raises:
        ExpertIOError: MLX has computed for us in the process that this one was forked from.
    """
    global _computing
    if _computing is None:
        _computing = os.getpid()
    check_process(_computing)
    return _computing


def check_process(process: int) -> None:
    """Raises ExpertIOError: this is not `process` but one that was forked from it."""
    if os.getpid() != process:
        raise ExpertIOError(
            "a model was loaded before this process was forked, and neither its threads nor MLX's come along; "
            "start the process with multiprocessing.get_context('spawn') and load the model there"
        )
