"""Keeps an Apple GPU from lowering its clock while an answer waits for the disk.

An Apple GPU without work lowers its clock within milliseconds, and the launches after a wait are slower. While a step
waits for experts, a thread of its own launches a tiny kernel every few milliseconds, on a stream of its own; the thread
of the step only sets an event. So a launch delays neither a read nor a step, changes no result, and there is none
between two answers. Whether the launches help is measured by the first answers and stored in a file of `kept_rows`, for
each GPU and directory of a model. Nothing here has run on an Apple GPU.
"""

import statistics
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import mlx.core as mx

from ..experts.source import ExpertLoader, IoMode
from ..ops import backend
from .kept_rows import Row, file_of, keep_row, read_rows
from .tiles import gpu_name, mlx_version

MODES = ("auto", "on", "off")
EVERY = 0.003  # seconds between two launches
LONGEST = 10.0  # seconds of a wait: after an interrupt, one may not be said to be over
POWER_SECONDS = 60.0  # between two questions whether the machine runs on battery
# Tokens of a turn of the comparison, and whether each turn launches; the order cancels a steady drift.
TURN, ORDER = 32, (False, True, True, False) * 2
WORTH = 0.02  # launches must make a token faster by this share


@dataclass(frozen=True)
class WarmTimes:
    """The seconds of a token without launches, and with them."""

    off: float
    on: float

    @classmethod
    def of_row(cls, row: Row) -> "WarmTimes | None":
        """None: it is damaged."""
        off, on = row.get("off"), row.get("on")
        return cls(off, on) if isinstance(off, float) and isinstance(on, float) and min(off, on) > 0 else None

    @property
    def helps(self) -> bool:
        return self.on * (1 + WORTH) <= self.off

    def __str__(self) -> str:
        verdict = "on" if self.helps else "off"
        return f"{verdict}: a token took {self.on * 1e3:.1f} ms with launches and {self.off * 1e3:.1f} ms without"


def tiny_launch() -> Callable[[], object]:
    """A function that adds two numbers on the GPU, on a stream of this thread, and waits for the sum."""
    stream, one = mx.new_stream(mx.gpu), mx.array([1.0])
    return lambda: mx.eval(mx.add(one, one, stream=stream))


def on_mains() -> bool:
    """Whether a Mac does not run on battery, as `pmset` says."""
    with suppress(OSError, subprocess.SubprocessError):
        # With its own descriptors left to the child, Python spawns it without a copy of this process's page tables.
        call = ["/usr/bin/pmset", "-g", "batt"]
        said = subprocess.run(call, stdout=subprocess.PIPE, close_fds=False, timeout=10, check=True).stdout
        return b"'Battery Power'" not in said
    return True


def keep_warm_file() -> Path:
    return file_of("keep_warm.json")


class KeepWarm:
    """Launches while a step waits for experts of `source`: `RoutedExperts` calls it as a context manager.

    Args:
        key: the GPU and the model, for which the result of the comparison is stored.
        always: whether to launch on battery too, and without a comparison.

    Attributes:
        measured: the result of the comparison; None before it.
        seconds: of the tokens that were compared.
        waiting: set while a step waits.
        thread: the thread that launches; None before the first wait.
    """

    clock, on_mains, make_launch = staticmethod(time.perf_counter), staticmethod(on_mains), staticmethod(tiny_launch)

    def __init__(self, source: ExpertLoader, key: Row, always: bool = False):
        self._source = weakref.ref(source)  # which refers to this by `at_close`, and must be freed when it is dropped
        self._first, self._key, self._always = source.layout.moe_layers[0], key, always
        rows = (row for row in read_rows(keep_warm_file()) if row.items() >= key.items())
        self.measured = next(map(WarmTimes.of_row, rows), None)
        self.seconds: list[float] = []
        self._begun: float | None = None  # when the step that runs began, if it is compared
        self._since = self._asked = -inf  # when the last wait began, and when the power was asked for
        self._is_powered = self.is_closed = False
        self.thread: threading.Thread | None = None
        self.waiting = threading.Event()
        weakref.finalize(self, self.waiting.set)  # which ends the thread
        source.at_close(self.close)

    def __call__(self, layer: int, rows: int) -> "KeepWarm":
        """A context manager in which a step of `rows` rows waits for experts of `layer`; not entered if it need not."""
        if layer == self._first and self.measured is None and not self._always:
            now = self.clock()
            if self._begun is not None:
                self._compare(now - self._begun)
            self._begun = now if rows == 1 and self._is_powered else None
        if getattr(self._source(), "is_filling", False):  # which only the token's last layer knows of all
            self._begun = None
        return self

    def _compare(self, seconds: float) -> None:
        """Counts a token. The last one decides; it is not added, since the thread asks whose turn is next."""
        both = [*self.seconds, seconds]
        if len(both) < TURN * len(ORDER):
            self.seconds = both
            return
        turns = [statistics.median(both[i : i + TURN]) for i in range(0, len(both), TURN)]
        self.measured = WarmTimes(
            *(statistics.mean(one for one, on in zip(turns, ORDER, strict=True) if on is way) for way in (False, True))
        )
        with suppress(OSError):  # the next start measures again
            keep_row(keep_warm_file(), {**self._key, **asdict(self.measured)}, "gpu", "model")

    @property
    def _launches(self) -> bool:
        """Whether the token that is computed has launches."""
        if self._always:
            return True
        measured = self.measured
        return self._is_powered and (ORDER[len(self.seconds) // TURN] if measured is None else measured.helps)

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
        now = self.clock()
        if now - self._since > LONGEST:
            self.waiting.clear()
        if self.waiting.is_set() and not self._always and now - self._asked >= POWER_SECONDS:
            self._is_powered, self._asked = self.on_mains(), now
        if self.waiting.is_set() and self._launches and not self.is_closed:
            launch()
        return not self.is_closed and (self._always or self.measured is None or self.measured.helps)

    def close(self) -> None:
        """Ends the thread."""
        self.is_closed = True
        self.waiting.set()

    @property
    def said(self) -> str:
        """One line: whether launches are made, and why."""
        done = f"{len(self.seconds)} of {TURN * len(ORDER)} tokens compared, by turns with and without launches"
        return f"keep-warm: {'on' if self._always else self.measured or done}"


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


def keep_warm_of(mode: str, model: Path, source: ExpertLoader) -> KeepWarm | None:
    """What keeps an Apple GPU warm while experts of `source` are read; None elsewhere, and if they are in memory.

    Args:
        mode: of `MODES`; "auto": if a comparison shows that it helps.
        model: the directory, for which the result of the comparison is stored.
    """
    if mode == "off" or source.mode is not IoMode.PREAD or backend.name() != "metal":
        return None
    return KeepWarm(source, {"gpu": gpu_name(), "mlx": mlx_version(), "model": str(model.resolve())}, mode == "on")
