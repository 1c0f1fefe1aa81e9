"""Writes to the server's log why something failed, without what a request contains."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from ..errors import DeviceError, ExpertIOError

TELLING = (DeviceError, ExpertIOError)  # their messages have the remedy; those of other errors may contain the request


def report(what: str, error: BaseException) -> None:
    """Logs that `what` happened, and why: the error's message if it contains no request, else where it was raised."""
    why = f"{type(error).__name__}: {error}" if isinstance(error, TELLING) else names_and_lines(error)
    print(f"error: {what}: {why}", file=sys.stderr, flush=True)


def names_and_lines(error: BaseException) -> str:
    """The names of an unexpected error and of its causes, each with the lines of code that it passed through."""
    return "\nbecause of ".join("\n".join(_lines(one)) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _lines(error: BaseException) -> Iterator[str]:
    yield type(error).__name__
    for place in traceback.extract_tb(error.__traceback__):
        file = "/".join(Path(place.filename).parts[-2:])
        yield f"  {file}, line {place.lineno}, in {place.name}: {place.line}"
