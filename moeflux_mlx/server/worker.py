"""Loads and runs a model in the model's thread, and keeps the queue of its jobs.

MLX's streams belong to threads, so only this thread uses the model. Other threads submit jobs and receive events.
`main` is a loop: it admits jobs, computes a prompt or one step of all answers, and emits the results. Prompts are
computed one after the other; between two waves or blocks of a prompt, steps of the answers run for their share of the
time.
"""

import gc
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..engine.engine import Engine
from ..engine.running_text import Stopped
from ..engine.session import advance_answers
from ..errors import DeviceError, RequestError
from ..experts.stats import Asked, LoaderStats
from ..model.step import MAX_ROWS
from ..ops.interrupt import go_on, interruptible
from .admission import Admission
from .job import Job
from .live import Watch
from .running import CANCELLED, Running, Totals
from .sessions import Sessions


@dataclass
class WorkerState:
    """The worker's state, which other threads may read at any time.

    Args:
        engine: the engine while it is loaded.
        error: why it could not be loaded.
        running: the running requests in the order in which they began.
    """

    engine: Engine | None = None
    error: BaseException | None = None
    running: list[Running] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.engine is not None


class TurnPace:
    """Divides the time between prompts and answers.

    Args:
        share: share of the time for answers while a prompt is computed and answers wait for tokens; from 0 to below 1.
        totals: counts the seconds of both.
    """

    def __init__(self, share: float, totals: Totals):
        self._rate, self._totals = share / (1 - share), totals
        self._credit = self._since = 0.0

    def begin_prompt(self) -> None:
        """A prompt begins or continues."""
        self._since = time.perf_counter()

    def pause_prompt(self, answering: bool) -> None:
        """The prompt pauses. `answering`: answers wait for tokens."""
        spent = time.perf_counter() - self._since
        self._totals.prompt_seconds += spent
        self._credit = self._credit + self._rate * spent if answering else 0.0

    def stepped(self, seconds: float) -> None:
        """Records the time of a step of answers."""
        self._totals.steps += 1
        self._totals.answer_seconds += seconds
        self._credit -= seconds

    @property
    def is_due(self) -> bool:
        """Whether a step of answers comes before the rest of the prompt."""
        return self._credit > 0


class Worker:
    """Args:
    load: loads the engine, in the worker's thread.
    make_sessions: makes the `Sessions` of an engine.
    make_admission: makes the `Admission` of an engine.
    decode_share: share of the time for answers while a prompt is computed.
    totals, watch: count and show what is done.
    on_ready: called in the worker's thread when the model is loaded or loading has failed.
    on_end: called there when the model is no longer in memory.

    Attributes:
        sessions, admission: those of the loaded engine, None without one.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        make_sessions: Callable[[Engine], Sessions],
        make_admission: Callable[[Engine], Admission],
        decode_share: float,
        totals: Totals,
        watch: Watch,
        on_ready: Callable[[], None],
        on_end: Callable[[], None],
    ):
        self._load, self._make_sessions, self._make_admission = load, make_sessions, make_admission
        self._on_ready, self._on_end = on_ready, on_end
        self.state, self.totals, self.watch = WorkerState(), totals, watch
        self._pace = TurnPace(decode_share, totals)
        self._jobs: list[Job] = []
        self._wake = threading.Condition()
        self._stopping = False
        self.sessions: Sessions | None = None
        self.admission: Admission | None = None
        self._before = LoaderStats()  # the counts when the prompt began or continued

    def begin_stop(self) -> None:
        """Begins to end all work; waiting jobs are told that they are cancelled."""
        with self._wake:
            self._stopping = True
            waiting, running = list(self._jobs), list(self.state.running)
            self._jobs.clear()
            self._wake.notify_all()
        for job in waiting:
            job.emit(CANCELLED)
        for one in running:
            one.job.cancel()

    def submit(self, job: Job) -> None:
        """Queues the job. If the worker ends first, the job is told that it is cancelled."""
        with self._wake:
            if not self._stopping:
                self._jobs.append(job)
                self._wake.notify_all()
                return
        job.emit(CANCELLED)

    def cancel(self, job: Job) -> None:
        """Cancels the job."""
        job.cancel()
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)

    @property
    def queue(self) -> int:
        """The number of waiting jobs."""
        return len(self._jobs)

    def wake(self) -> None:
        """Wakes the thread because a page was opened and pictures are due."""
        with self._wake:
            self._wake.notify_all()

    def main(self) -> None:
        """Loads the model and runs its jobs until `begin_stop`; to be called in the model's thread."""
        try:
            self._run()
        finally:
            self.sessions = self.state.engine = None
            gc.collect()  # a model and its experts refer to each other
            mx.clear_cache()
            self._on_end()

    def _run(self) -> None:
        try:
            engine = self._opened()
        except BaseException as error:  # every end must reach those who wait for the model
            _forget_locals(error)
            self.state.error = error
        self._on_ready()
        if self.state.error is not None:
            return
        try:
            while self._has_work():
                self._turn(engine)
        finally:
            engine.experts.close()

    def _opened(self) -> Engine:
        """Loads the engine; it is closed if what belongs to it cannot be made."""
        engine = self._load()
        try:
            self.sessions, self.admission = self._make_sessions(engine), self._make_admission(engine)
        except BaseException:
            engine.experts.close()
            raise
        engine.experts.counts_rows = True
        self.state.engine = engine
        return engine

    def _has_work(self) -> bool:
        """Admits jobs that may begin, and waits for one while nothing runs; returns False when the worker should
        end.
        """
        with self._wake:
            while not (self.state.running or self._jobs or self._stopping):
                self._wake.wait(self.watch.patience)
                if not self._jobs:
                    self.look()
        self._admit()
        return bool(self.state.running)

    def _admit(self) -> None:
        """Begins all jobs that may run."""
        engine, sessions, admission, running = self.state.engine, self.sessions, self.admission, self.state.running
        assert engine is not None and sessions is not None and admission is not None
        while not self._stopping and (job := self._taken(admission)) is not None:
            if not running:
                self.watch.begin_request(engine, self.totals)
            one = Running(job, sessions, self._between, self.totals)
            admission.begin(one)
            running.append(one)

    def _taken(self, admission: Admission) -> Job | None:
        with self._wake:
            job = admission.choose(self._jobs, self.state.running)
            if job is not None:
                self._jobs.remove(job)
                job.on_begin()
            return job

    def _turn(self, engine: Engine) -> None:
        """Computes a prompt until another one interrupts it, or one step of all answers."""
        self._end_cancelled(None)
        prompts = [one for one in self.state.running if one.in_prompt]
        for one in prompts:
            one.estimate()
        if prompts:
            prompt = min(prompts, key=lambda one: one.due)
            self._pace.begin_prompt()
            self._before = replace(engine.experts.stats)
            self.watch.compute([prompt])
            prompt.compute_prompt()
            self._count_asked(engine, prompt)
            self._pace.pause_prompt(bool(self._answering()))
        else:
            with suppress(DeviceError):  # the answers have already been told
                self._step(engine)
        self._forget_over()
        self.look()

    def _between(self, prompt: Running) -> None:
        """Called between two waves or blocks of a prompt: admits jobs, and gives the answers their share of the time.

        Raises:
            Stopped: another prompt goes first.
            DeviceError: a step failed; the computed part of the prompt may be lost too.
        """
        engine, pace = self.state.engine, self._pace
        assert engine is not None
        self._end_cancelled(prompt)
        self._count_asked(engine, prompt)
        pace.pause_prompt(bool(self._answering()))
        self._admit()
        while pace.is_due and self._answering():
            with engine.experts.interlude(), interruptible(go_on):
                self._step(engine)
            self._forget_over()
        self.look()
        self._before = replace(engine.experts.stats)
        self.watch.compute([prompt])
        pace.begin_prompt()
        if any(one.in_prompt and one.overtakes(prompt) for one in self.state.running):
            raise Stopped

    def _count_asked(self, engine: Engine, prompt: Running) -> None:
        """Adds the experts that the prompt has requested since the last call, its beginning or its continuation."""
        stats = replace(engine.experts.stats)
        counts, self._before = stats.since(self._before), stats
        prompt.asked += Asked(counts.hits, counts.misses, counts.bytes_read)

    def _step(self, engine: Engine) -> None:
        """Computes the next token of all answers that have room for it."""
        assert self.admission is not None
        began = time.perf_counter()
        answering = self._answering()
        taking = self.admission.may_step(answering, self.state.running)[:MAX_ROWS]
        for one in answering:
            if one not in taking and one.answer.shares_steps and (waiting := one.answer.decoding) is not None:
                waiting.separate()
        self.watch.compute(taking)
        try:
            outcomes = advance_answers([one.answer for one in taking]) if taking else []
        except (DeviceError, RequestError) as error:
            for one in taking:
                one.fail(error)
            if isinstance(error, DeviceError):
                raise
            return
        finally:
            self._pace.stepped(time.perf_counter() - began)
        for one, outcome in zip(taking, outcomes, strict=True):
            one.take(outcome)

    def _answering(self) -> list[Running]:
        return [one for one in self.state.running if not one.in_prompt and not one.is_over]

    def _end_cancelled(self, computing: Running | None) -> None:
        """Ends cancelled requests, except the one whose prompt is being computed, which ends by itself."""
        for one in self.state.running:
            if one is not computing and one.job.cancelled.is_set():
                one.cancel()
        self._forget_over()

    def _forget_over(self) -> None:
        self.state.running[:] = [one for one in self.state.running if not one.is_over]

    def look(self) -> None:
        """Shows what is done; called between any two parts of the work."""
        if self.state.engine is not None:
            self.watch.look(self.state.engine, self.state.running, self.queue, self.totals)


def _forget_locals(error: BaseException) -> None:
    """Clears the frames that `error` passed through, which may hold much memory."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
