"""Keeps a GPU from lowering its clock while an answer waits for the disk.

An Apple GPU without work lowers its clock within milliseconds, and the launches after a wait are slower. While a step
waits for experts, a thread of its own launches a tiny kernel every few milliseconds, on a stream of its own; the thread
of the step only sets a flag. So a launch delays neither a read nor a step, changes no result, and there is none between
two answers. Whether the launches help is measured by the first answers (`WarmTrial`) and stored in a file of
`kept_rows`, for each GPU and directory of a model. Nothing here has run on an Apple GPU.
"""

import statistics
import subprocess
import sys
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
from .kept_rows import Row, alone, file_of, read_rows, write_rows
from .tiles import gpu_name, mlx_version

MODES = ("auto", "on", "off")
EVERY = 0.003  # seconds between two launches
IDLE = 0.1  # seconds between two looks while none may be made
PATIENCE = 1.0  # seconds without a wait after which the thread sleeps until it is woken
LONGEST = 10.0  # seconds of a wait: after an interrupt, one may not be said to be over
POWER_SECONDS = 60.0  # between two questions whether the machine runs on battery
TURN, ORDER = 32, (False, True, True, False) * 2  # tokens of a turn; whether each turn launches
WORTH = 0.02  # launches must make a token faster by this share


@dataclass(frozen=True)
class WarmTimes:
    """The seconds of a token without launches, and with them."""

    off: float
    on: float

    @property
    def helps(self) -> bool:
        return self.on * (1 + WORTH) <= self.off

    def __str__(self) -> str:
        verdict = "on" if self.helps else "off"
        return f"{verdict}: a token took {self.on * 1e3:.1f} ms with launches and {self.off * 1e3:.1f} ms without"


class WarmTrial:
    """Compares turns of `TURN` tokens without and with launches. Their order cancels a steady drift, and the median of
    a turn ignores pauses between two answers.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @property
    def tokens(self) -> int:
        return len(self._seconds)

    @property
    def is_over(self) -> bool:
        return self.tokens == TURN * len(ORDER)

    @property
    def launches(self) -> bool:
        """Whether the next token is computed with launches."""
        return not self.is_over and ORDER[self.tokens // TURN]

    def add(self, seconds: float) -> None:
        """Records the time of a token that was computed as `launches` says."""
        if not self.is_over:
            self._seconds.append(seconds)

    @property
    def result(self) -> WarmTimes:
        turns = [statistics.median(self._seconds[i * TURN : (i + 1) * TURN]) for i in range(len(ORDER))]
        off = statistics.mean(turn for turn, launches in zip(turns, ORDER, strict=True) if not launches)
        on = statistics.mean(turn for turn, launches in zip(turns, ORDER, strict=True) if launches)
        return WarmTimes(off, on)


class KeepWarm:
    """Launches while a step waits for experts: `RoutedExperts` calls it as a context manager.

    Args:
        make_launch: returns a function that computes something tiny and waits for it; both are called in the thread
            that launches.
        first: the first layer that has experts.
        always: whether to launch on battery too, and without a trial.
        measured: the result of an earlier trial; None: the first tokens are a trial.
        is_filling: whether the pool has free memory; a trial does not count these tokens.
        on_mains: whether the machine does not run on battery.
        keep: stores the result of the trial.
        clock: seconds.

    Attributes:
        launched: number of launches.
        keep: as given.
        trial: the trial that is being made, or None.
        thread: the thread that launches; None before the first wait.
        wake: ends the thread's sleep when it is set.
    """

    def __init__(
        self,
        make_launch: Callable[[], Callable[[], object]],
        first: int,
        *,
        always: bool = False,
        measured: WarmTimes | None = None,
        is_filling: Callable[[], bool] = lambda: False,
        on_mains: Callable[[], bool] = lambda: True,
        keep: Callable[[WarmTimes], object] = lambda measured: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.measured, self.launched = measured, 0
        self._first, self._always = first, always
        self.trial = None if always or measured else WarmTrial()
        self._make_launch, self.keep, self._clock = make_launch, keep, clock
        self._is_filling, self._on_mains = is_filling, on_mains
        self._launch: Callable[[], object] | None = None
        self._begun: float | None = None  # when the step that runs began, if a trial counts it
        self._is_waiting = self._is_powered = self.is_closed = False
        self._waits, self._last = 0, (0, -inf)  # the number of waits; the one that was seen last, and since when
        self._slept = self._is_parked = False  # the thread sleeps until it is woken, which clears only the second
        self._seen = self._asked = -inf  # when a step was seen to wait, and when the power was asked for
        self.wake = threading.Event()
        weakref.finalize(self, self.wake.set)
        self.thread: threading.Thread | None = None

    def __call__(self, layer: int, rows: int) -> "KeepWarm":
        """A context manager in which a step of `rows` rows waits for experts of `layer`."""
        trial = self.trial
        if trial is not None and layer == self._first:
            now = self._clock()
            if self._begun is not None:
                trial.add(now - self._begun)
            self._begun = now if rows == 1 and self._is_powered else None
        if self._begun is not None and self._is_filling():  # which only the token's last layer knows of all
            self._begun = None
        return self

    def __enter__(self) -> None:
        self._is_waiting = True
        self._waits += 1
        if self._is_parked:
            self._is_parked = False
            self.wake.set()
        elif self.thread is None and self._is_needed:
            self.thread = threading.Thread(target=_beat, args=(weakref.ref(self), self.wake), name="keep-warm")
            self.thread.daemon = True
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_waiting = False

    @property
    def _is_needed(self) -> bool:
        return not self.is_closed and (self._always or self.measured is None or self.measured.helps)

    def beat(self) -> float | None:
        """What the thread does again and again: launches if a step waits. Returns the seconds until the next time,
        infinite if it is woken for it; None: there will be none.
        """
        now, trial = self._clock(), self.trial
        if trial is not None and trial.is_over:
            self.measured, self.trial = trial.result, None
            self.keep(self.measured)
        if not self._is_needed:
            return None
        if self._waits != self._last[0]:
            self._last = self._waits, now
        is_waiting = self._is_waiting and now - self._last[1] < LONGEST
        if is_waiting and not self._always and now - self._asked >= POWER_SECONDS:
            self._is_powered, self._asked = self._on_mains(), now
        may_launch = self._always or (self._is_powered and (self.trial is None or self.trial.launches))
        if is_waiting and may_launch:
            self._launch = self._launch or self._make_launch()
            self._launch()
            self.launched += 1
        was_woken = self._slept and not self._is_parked  # by a wait that may be over
        if is_waiting or was_woken:
            self._seen = now
        self._slept = self._is_parked = now - self._seen >= PATIENCE
        if self._is_parked and self._waits == self._last[0]:  # else a wait began that saw no sleeping thread
            return inf
        return EVERY if may_launch else IDLE

    def close(self) -> None:
        """Ends the thread."""
        self.is_closed = True
        self.wake.set()

    @property
    def said(self) -> str:
        """One line: whether launches are made, and why."""
        if self._always:
            return "keep-warm: on"
        if self.measured is not None:
            return f"keep-warm: {self.measured}"
        trial = self.trial
        done = f"{trial.tokens if trial else 0} of {TURN * len(ORDER)}"
        return f"keep-warm: {done} tokens compared, by turns with and without launches"


def _beat(warm: "weakref.ref[KeepWarm]", wake: threading.Event) -> None:
    """The thread, which ends when the object is closed or collected."""
    while (own := warm()) is not None:
        try:
            seconds = own.beat()
        except RuntimeError:  # of the GPU: the step's own launches say it too
            return
        del own
        if seconds is None:
            return
        wake.wait(None if seconds == inf else seconds)
        wake.clear()


def keep_warm_of(mode: str, model: Path, source: ExpertLoader) -> KeepWarm | None:
    """What keeps the GPU warm while experts of `source` are read; None: nothing, as with experts that are in memory.

    Args:
        mode: of `MODES`; "auto": on a Mac, by a trial; "on": on every GPU.
        model: the directory, for which the result of a trial is stored.
    """
    gpus = {"auto": ["metal"], "on": ["metal", "cuda"], "off": []}[mode]
    if source.mode is not IoMode.PREAD or backend.name() not in gpus:
        return None
    held = weakref.ref(source)  # which refers to `warm` by `at_close`, and would not be freed when it is dropped
    key: Row = {"gpu": gpu_name(), "mlx": mlx_version(), "model": str(model.resolve())}
    warm = KeepWarm(
        tiny_launch,
        source.layout.moe_layers[0],
        always=mode == "on",
        measured=next((measured for one, measured in read_measured(keep_warm_file()) if one == key), None),
        is_filling=lambda: getattr(held(), "is_filling", False),
        on_mains=on_mains,
        keep=lambda measured: keep_measured(key, measured),
    )
    source.at_close(warm.close)
    return warm


def tiny_launch() -> Callable[[], object]:
    """A function that adds two numbers on the GPU, on a stream of this thread, and waits for the sum."""
    stream, one = mx.new_stream(mx.gpu), mx.array([1.0])
    return lambda: mx.eval(mx.add(one, one, stream=stream))


def on_mains() -> bool:
    """Whether a Mac does not run on battery, as `pmset` says."""
    if sys.platform != "darwin":
        return True
    call = ["/usr/bin/pmset", "-g", "batt"]
    with suppress(OSError, subprocess.SubprocessError):
        # With its own descriptors left to the child, Python spawns it without a copy of this process's page tables.
        said = subprocess.run(call, stdout=subprocess.PIPE, close_fds=False, timeout=10, check=True).stdout
        return b"'Battery Power'" not in said
    return True


def keep_warm_file() -> Path:
    return file_of("keep_warm.json")


def read_measured(file: Path) -> list[tuple[Row, WarmTimes]]:
    """Everything in the file: the GPU, MLX's version and the directory of a model, with the result."""
    rows = [(row, row.get("off"), row.get("on")) for row in read_rows(file) if row.keys() >= {"gpu", "mlx", "model"}]
    return [
        ({name: row[name] for name in ("gpu", "mlx", "model")}, WarmTimes(off, on))
        for row, off, on in rows
        if isinstance(off, float) and isinstance(on, float) and min(off, on) > 0
    ]


def keep_measured(key: Row, measured: WarmTimes) -> None:
    """Stores a result in place of that of another version of MLX. If that is impossible, the next start measures
    again.
    """
    with suppress(OSError), alone(keep_warm_file()):
        other = [(one, of) for one, of in read_measured(keep_warm_file()) if {**one, "mlx": 0} != {**key, "mlx": 0}]
        write_rows(keep_warm_file(), [{**one, **asdict(of)} for one, of in [*other, (key, measured)]])
