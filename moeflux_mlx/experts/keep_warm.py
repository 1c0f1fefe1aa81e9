"""Keeps an Apple GPU from lowering its clock while an answer waits for the disk.

An Apple GPU without work lowers its clock within milliseconds, and the launches after a wait are slower. While a step
waits for experts, a thread of its own launches a tiny kernel every few milliseconds, on a stream of its own; the thread
of the step only sets an event. So a launch delays neither a read nor a step, changes no result, and there is none
between two answers. It is off unless it is asked for, because nothing here has run on an Apple GPU.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from math import inf

import mlx.core as mx

from ..ops import backend
from .source import ExpertLoader, IoMode

MODES = ("on", "off")
EVERY = 0.003  # seconds between two launches
LONGEST = 10.0  # seconds of a wait: after an interrupt, one may not be said to be over


def tiny_launch() -> Callable[[], object]:
    """A function that adds two numbers on the GPU, on a stream of this thread, and waits for the sum."""
    stream, one = mx.new_stream(mx.gpu), mx.array([1.0])
    return lambda: mx.eval(mx.add(one, one, stream=stream))


class KeepWarm:
    """A context manager in which a step waits for experts, and tiny kernels are launched.

    Attributes:
        waiting: set while a step waits.
        thread: the thread that launches; None before the first wait.
    """

    clock, make_launch = staticmethod(time.perf_counter), staticmethod(tiny_launch)

    def __init__(self) -> None:
        self._since, self.is_closed = -inf, False  # when the last wait began
        self.thread: threading.Thread | None = None
        self.waiting = threading.Event()
        weakref.finalize(self, self.waiting.set)  # which ends the thread

    def __enter__(self) -> None:
        self._since = self.clock()
        self.waiting.set()
        if self.thread is None:
            self.thread = threading.Thread(
                target=_beat, args=(weakref.ref(self), self.waiting), name="keep-warm", daemon=True
            )
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.waiting.clear()

    def beat(self, launch: Callable[[], object]) -> bool:
        """Launches if a step waits. Returns whether the thread goes on."""
        if self.clock() - self._since > LONGEST:
            self.waiting.clear()
        if self.waiting.is_set() and not self.is_closed:
            launch()
        return not self.is_closed

    def close(self) -> None:
        """Ends the thread."""
        self.is_closed = True
        self.waiting.set()


def _beat(held: "weakref.ref[KeepWarm]", waiting: threading.Event) -> None:
    """The thread, which sleeps between waits, and ends when the object is closed or collected."""
    launch: Callable[[], object] | None = None
    with suppress(RuntimeError):  # of the GPU: the step's own launches say it too
        while waiting.wait() and (warm := held()) is not None:
            launch = launch or warm.make_launch()
            if not warm.beat(launch):
                return
            del warm
            time.sleep(EVERY)


def keep_warm_of(mode: str, source: ExpertLoader) -> KeepWarm | None:
    """What keeps an Apple GPU warm while experts of `source` are read, if `mode` is "on"; None elsewhere, and if the
    experts are in memory.
    """
    if mode == "off" or source.mode is not IoMode.PREAD or backend.name() != "metal":
        return None
    warm = KeepWarm()
    source.at_close(warm.close)
    return warm
