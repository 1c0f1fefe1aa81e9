"""Lets long computations on the CPU be interrupted between two of their pieces.

A call of a native kernel with all rows of a block can take seconds, and nobody can end it. So such calls are cut into
pieces of `PIECE_WORK`. Within `interruptible(check)` the thread calls `check` between two pieces; an exception from it
leaves the computation. The computations of a few rows, as in a step, are not cut.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .tiles import MAX_TOKENS

PIECE_WORK = 1 << 33  # multiply-adds of a piece: 0.1 to 0.5 s on two cores


def go_on() -> None:
    """The check that interrupts nothing."""


class _Checking(threading.local):
    check: Callable[[], object] = staticmethod(go_on)


_checking = _Checking()


@contextmanager
def interruptible(check: Callable[[], object]) -> Iterator[None]:
    """This thread's long computations call `check` until the block is left."""
    before, _checking.check = _checking.check, check
    try:
        yield
    finally:
        _checking.check = before


def check() -> None:
    """Calls this thread's check."""
    _checking.check()


def pieces(rows: int, work: int) -> Iterator[slice]:
    """Cuts `rows` of `work` multiply-adds each into pieces, and calls `check` before each but the first."""
    size = rows if rows <= MAX_TOKENS else max(PIECE_WORK // max(work, 1), MAX_TOKENS)
    for start in range(0, rows, max(size, 1)):
        if start:
            check()
        yield slice(start, min(start + size, rows))
