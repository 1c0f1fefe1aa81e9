"""Lets another thread end a long computation on the CPU between two of its pieces.

A call of a native kernel with all rows of a block can take seconds, and nobody can end it. So such calls are cut into
pieces of `PIECE_WORK`, and between two pieces a thread that was told to `leave` raises `Left`. The computations of a
few rows, as in a step, are not cut.
"""

import threading
from collections.abc import Iterator

from .tiles import MAX_TOKENS

PIECE_WORK = 1 << 33  # multiply-adds of a piece: 0.1 to 0.5 s on two cores

_leaving: set[int] = set()  # the threads that were told to leave


class Left(Exception):
    """The computation was left between two pieces."""


def leave(thread: int) -> None:
    """Ends the long computation of the thread with this identifier, or its next one."""
    _leaving.add(thread)


def stay() -> None:
    """Lets this thread compute on, whatever it was told before."""
    _leaving.discard(threading.get_ident())


def check() -> None:
    """Raises `Left` if this thread was told to leave."""
    if threading.get_ident() in _leaving:
        raise Left


def pieces(rows: int, work: int) -> Iterator[slice]:
    """Cuts `rows` of `work` multiply-adds each into pieces, and calls `check` before each but the first."""
    size = rows if rows <= MAX_TOKENS else max(PIECE_WORK // max(work, 1), MAX_TOKENS)
    for start in range(0, rows, max(size, 1)):
        if start:
            check()
        yield slice(start, min(start + size, rows))
