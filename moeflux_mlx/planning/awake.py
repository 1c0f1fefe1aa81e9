"""Keeps a Mac from falling asleep while something is computed."""

import os
import subprocess
import sys
from contextlib import suppress


class Awake:
    """A context manager that keeps the machine awake within it, by a child `caffeinate`, which ends with this process
    at the latest. Elsewhere than on a Mac it does nothing. It belongs to one thread.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Awake":
        if sys.platform == "darwin" and (self._child is None or self._child.poll() is not None):
            with suppress(OSError):  # without it, the machine may sleep
                self._child = subprocess.Popen(["caffeinate", "-i", "-w", str(os.getpid())], close_fds=False)
        return self

    def __exit__(self, *_: object) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.terminate()
            child.wait()
