"""Replacements of this machine's backend, kernels and native extension for one thread. They show what a model would
run, also on a backend that this machine lacks, without computing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack


NativeFunctions: TypeAlias = Any  # the native extension, or what has its functions


@dataclass(frozen=True)
class StandIns:
    """Where one is None, the machine's own is used.

    Args:
        backend: operations choose as on it ("metal", "cuda" or "ops"), and `backend.start` computes nothing.
        build: makes of a kernel what its launches call, as `launch.Kernel.build` does.
        extension: has the functions of the native extension.
    """

    backend: str | None = None
    build: Callable[..., Any] | None = None
    extension: NativeFunctions = None


class Given(TypedDict, total=False):
    """The keywords of `standing_in`, as `StandIns` has them."""

    backend: str | None
    build: Callable[..., Any] | None
    extension: NativeFunctions


NONE = StandIns()
_used: ContextVar[StandIns] = ContextVar("stand_ins", default=NONE)
stand_ins = _used.get


@contextmanager
def standing_in(**given: "Unpack[Given]") -> Iterator[None]:
    """A context manager in which this thread's operations use the given stand-ins, in addition to those already in
    use.
    """
    token = _used.set(replace(_used.get(), **given))
    try:
        yield
    finally:
        _used.reset(token)
