"""The one thread in which all models are loaded and run, one after another.

MLX keeps a stream, which has a thread of its own, for each thread that has computed, until that thread clears it. A
thread for each loaded model would leave one more behind at each change of models.
"""

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import mlx.core as mx


class ModelThread:
    def __init__(self, name: str = "model") -> None:
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work` in the thread, once all earlier work has ended."""
        self._works.put(work)

    def stop(self, seconds: float) -> bool:
        """Ends the thread after all work that it was given; returns whether it ended in time."""
        self._works.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                work()
            except BaseException:  # reported as at the end of a thread, but the next model needs this one
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
            del work  # it holds the model's sessions
        # Compiled functions belong to their thread. Freed after its last line, they would wait for an interpreter that
        # is ending, and the process would be aborted.
        mx.clear_streams()
