"""Shows an observer the rows that each matrix multiplies, while a calibration run computes with the model as it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .backend import AnyArray, Array
from .matrix import Weights
from .norm import Norm

Observer = Callable[[Weights, AnyArray], None]  # takes a matrix and the rows [..., columns] that it multiplies
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Calls `observer` for each product of a matrix in this context. Compiled steps are not seen."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observe(matrix: Weights, x: Array, norm: Norm | None = None) -> None:
    """Shows the observer, if there is one, that `matrix` multiplies norm(x)."""
    observer = _observer.get()
    if observer is not None:
        observer(matrix, x if norm is None else norm(x))
