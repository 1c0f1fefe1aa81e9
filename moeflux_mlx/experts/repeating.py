"""A thread that calls an object every so often and does not keep it."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind")


def repeat(name: str, one: Kind, call: Callable[[Kind], bool], seconds: float) -> None:
    """Starts a thread that calls `call` with `one` every `seconds`, until it returns False or `one` is gone."""
    threading.Thread(target=_repeat, args=(weakref.ref(one), call, seconds), name=name, daemon=True).start()


def _repeat(reference: "weakref.ref[Kind]", call: Callable[[Kind], bool], seconds: float) -> None:
    while (one := reference()) is not None and call(one):
        del one
        time.sleep(seconds)
