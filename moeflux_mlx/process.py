"""Which process computes: MLX's threads and ours do not come along when it is forked, and nothing says so."""

import os

from .errors import ExpertIOError

_computing: int | None = None  # as MLX's own state, one for all models


def claim_process() -> int:
    """This process's id, noted as the one that MLX computes in from now on.

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
