"""Connects the processes of one model, as arranged by `mlx.launch` or the user's MLX_* variables.

No process knows whether another is alive, and MLX waits without limit: a watchdog ends a process that waits too long.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import mlx.core as mx

from ..errors import RankError, RequestError
from ..ops.backend import Array, leave, of_kind
from ..process import claim_process

VARIABLES = {"ring": "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES", "nccl": "NCCL_HOST_IP"}
JOIN_SECONDS = 120.0
# Waits until its input ends, which happens when its parent is done or gone.
OUTSIDE = """
import os, select, sys
if not select.select([sys.stdin], [], [], float(sys.argv[1]))[0]:
    os.write(2, f"error: {sys.argv[3]}\\n".encode())
    os.kill(int(sys.argv[2]), 9)
"""
LATE = 75  # exit code of a process that waited too long (EX_TEMPFAIL)


def backend_of(environ: Mapping[str, str]) -> str | None:
    """The transport that the environment selects; None: this process is alone.

    Raises:
        RequestError: the variables of no transport are set, or those of several.
    """
    if "MLX_RANK" not in environ:
        return None
    backends = [backend for backend, name in VARIABLES.items() if name in environ]
    if len(backends) == 1:
        return backends[0]
    if backends:
        names = " and ".join(VARIABLES[backend] for backend in backends)
        raise RequestError(f"{names} are set; each stands for a transport between ranks: unset all but one of them")
    needs = ", ".join(f"{name} ({backend})" for backend, name in VARIABLES.items())
    raise RequestError(f"MLX_RANK is {environ['MLX_RANK']!r}, but no transport is: set one of {needs}")


def join(environ: Mapping[str, str], limit: float = JOIN_SECONDS) -> "MlxGroup | None":
    """The group of this process, with a time limit on every gathering; None: this process is alone.

    Args:
        environ: the process's environment.
        limit: seconds until the others must have come.

    Raises:
        RequestError: the environment contradicts itself. RankError: the others cannot be reached.
    """
    backend = backend_of(environ)
    if backend is None:
        return None
    claim_process()
    missing = f"the other ranks did not come within {limit:.0f} s; start all of them, and look at the first that failed"
    with _watched_from_outside(limit, missing):
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except RuntimeError as error:
            raise RankError(f"cannot join the other ranks over {backend}: {error}") from None
    return MlxGroup(group, backend, Watchdog())


@contextlib.contextmanager
def _watched_from_outside(seconds: float, message: str) -> Iterator[None]:
    """A context manager with a time limit: after it another process kills this one. MLX holds the GIL while it waits
    for a connection, so a thread could not do this.
    """
    arguments = [sys.executable, "-c", OUTSIDE, str(seconds), str(os.getpid()), message]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as outside:
        yield
        outside.communicate()  # closing its input ends it


class Watchdog:
    """Ends the process when a watched operation takes too long: MLX cannot be interrupted while it waits.

    Args:
        end: called with the message; by default it is printed and the process ends at once.
    """

    def __init__(self, end: "Callable[[str], None] | None" = None):
        self._end = end or end_process
        self._changed = threading.Condition()
        self._deadline, self._message = float("inf"), ""
        threading.Thread(target=self._watch, name="ranks-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def within(self, seconds: float, message: str) -> Iterator[None]:
        """A context manager whose body must end within `seconds`."""
        self._set(time.monotonic() + seconds, message)
        try:
            yield
        finally:
            self._set(float("inf"), "")

    def _set(self, deadline: float, message: str) -> None:
        with self._changed:
            sooner = deadline < self._deadline
            self._deadline, self._message = deadline, message
            if sooner:
                self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                left = self._deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(None if left == float("inf") else left)
                    continue
                message, self._deadline = self._message, float("inf")
            self._end(message)


def end_process(message: str) -> None:
    os.write(2, f"error: {message}\n".encode())
    os._exit(LATE)


class MlxGroup:
    """MLX's group (`mx.distributed.init`): ring over TCP, JACCL over Thunderbolt, or NCCL.

    On a Mac it runs on the CPU's stream between two evaluations: the system would stop a GPU that waits for another
    machine's disk. NCCL works only on the GPU.
    """

    def __init__(self, group: mx.distributed.Group, backend: str, watchdog: Watchdog):
        self._group, self._watchdog, self.limit = group, watchdog, JOIN_SECONDS
        self.rank, self.size, self.on_device = int(group.rank()), int(group.size()), backend == "nccl"

    def gather(self, words: Array) -> Array:
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        message = (
            f"rank {self.rank} has waited {self.limit:.0f} s for the others ({', '.join(others)}): one of them is late "
            "or has ended without a message; read the last output of each, then start all ranks again"
        )
        stream = mx.gpu if self.on_device else mx.cpu
        try:
            with self._watchdog.within(self.limit, message):
                gathered = mx.distributed.all_gather(leave(words)[None], group=self._group, stream=stream)
                mx.eval(gathered)
        except RuntimeError as error:
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(others)}"
            raise RankError(f"{who} is gone ({error}); read its last message, then start all ranks again") from None
        return of_kind(gathered, words)
