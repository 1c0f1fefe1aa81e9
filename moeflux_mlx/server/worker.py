"""Loads and runs a model in the model's thread, and keeps the queue of its jobs.

MLX's streams belong to threads, so only this thread uses the model. Other threads submit jobs and receive events.
`main` admits jobs, lets the loop do a piece of the prompt that is due or a step of all answers, and emits the results.
Prompts are computed one after the other; between two pieces of a prompt, steps of the answers run for their share of
the time. `Idle` is what happens to the machine while nothing is computed.
"""

import gc
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from ..driving.loop import Loop
from ..driving.session import Answer
from ..experts.stats import Asked
from ..model.step import MAX_ROWS
from ..opening.engine import Engine
from ..ops.interrupt import stay
from ..planning.awake import Awake
from ..planning.wired import rest, wake
from .admission import Admission
from .live import Watch
from .running import CANCELLED, Job, Running, Totals
from .sessions import Sessions

REST_SECONDS = 180.0  # after so long, memory leaves Metal's residency sets; going back takes less than loading


class Idle:
    """Lets the machine sleep while there is no request, and wired memory go after some minutes of that. It belongs to
    the model's thread.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: float | None = None
        self._awake = Awake()

    def patience(self, other: float | None) -> float | None:
        """Seconds to wait for a request: until something is due here, or `other`."""
        if self._since is None:
            self._since = self._clock()
            self._awake.__exit__()
        left = self._since + REST_SECONDS - self._clock()
        due = [seconds for seconds in (other, left if left > 0 else None) if seconds is not None]
        return min(due, default=None)

    def look(self) -> None:
        """Lets memory go if it is due."""
        if self._since is not None and self._clock() - self._since >= REST_SECONDS:
            rest()

    def end(self) -> None:
        """Something is computed from here on."""
        self._since = None
        self._awake.__enter__()
        wake()


class TurnPace:
    """Divides the time between prompts and answers.

    Args:
        share: share of the time for answers while a prompt is computed and answers wait for tokens; from 0 to below 1.
        totals: counts the seconds of both.
    """

    def __init__(self, share: float, totals: Totals):
        self._rate, self._totals = share / (1 - share), totals
        self._credit = 0.0

    def computed(self, seconds: float, answering: bool) -> None:
        """Records the time of a piece of a prompt. `answering`: answers wait for tokens."""
        self._totals.prompt_seconds += seconds
        self._credit = self._credit + self._rate * seconds if answering else 0.0

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
    describe: called there with the engine while the model is being loaded.

    Attributes:
        engine: while it is loaded; `error` is why it could not be. Other threads may read these and `running`.
        running: the running requests in the order in which they began.
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
        describe: Callable[[Engine], None] = lambda engine: None,
    ):
        self._load, self._make_sessions, self._make_admission = load, make_sessions, make_admission
        self._on_ready, self._on_end, self._describe = on_ready, on_end, describe
        self.engine: Engine | None = None
        self.error: BaseException | None = None
        self.running: list[Running] = []
        self.totals, self.watch = totals, watch
        self._pace = TurnPace(decode_share, totals)
        self._jobs: list[Job] = []
        self._idle = Idle()
        self._wake = threading.Condition()
        self._stopping = False
        self.sessions: Sessions | None = None
        self.admission: Admission | None = None
        self._loop = Loop[Answer](self._choose)
        self._prompt: Running | None = None  # whose prompt is being computed
        self._computed: Running | None = None  # the same; None: the turn is the answers'

    def begin_stop(self) -> None:
        """Begins to end all work; waiting jobs are told that they are cancelled."""
        with self._wake:
            self._stopping = True
            waiting, running = list(self._jobs), list(self.running)
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
            self.sessions = self.engine = None
            gc.collect()  # a model and its experts refer to each other
            mx.clear_cache()
            self._on_end()

    def _run(self) -> None:
        try:
            engine = self._opened()
        except BaseException as error:  # every end must reach those who wait for the model
            _forget_locals(error)
            self.error = error
        self._on_ready()
        if self.error is not None:
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
            self._describe(engine)
        except BaseException:
            engine.experts.close()
            raise
        engine.experts.counts_rows = True
        self.engine = engine
        return engine

    def _has_work(self) -> bool:
        """Admits jobs that may begin, and waits for one while nothing runs; returns False when the worker should
        end.
        """
        with self._wake:
            while not (self.running or self._jobs or self._stopping):
                self._wake.wait(self._idle.patience(self.watch.patience))
                if not self._jobs:
                    self.look()
                    self._idle.look()
        self._idle.end()
        self._admit()
        return bool(self.running)

    def _admit(self) -> None:
        """Begins all jobs that may run."""
        engine, sessions, admission, running = self.engine, self.sessions, self.admission, self.running
        assert engine is not None and sessions is not None and admission is not None
        while not self._stopping and (job := self._taken(admission)) is not None:
            if not running:
                self.watch.begin_request(engine, self.totals)
            one = Running(job, sessions, self.totals)
            admission.begin(one)
            running.append(one)

    def _taken(self, admission: Admission) -> Job | None:
        with self._wake:
            job = admission.choose(self._jobs, self.running)
            if job is not None:
                self._jobs.remove(job)
                job.on_begin()
            return job

    def _turn(self, engine: Engine) -> None:
        """Lets the loop compute a piece of a prompt or a step of answers."""
        stay()
        self._end_cancelled()
        before, began = replace(engine.experts.stats), time.perf_counter()
        events = self._loop.step()
        seconds = time.perf_counter() - began
        if self._computed is not None:
            self._computed.job.thread = None
            self._pace.computed(seconds, bool(self._answering()))
            counts = replace(engine.experts.stats).since(before)
            self._computed.asked += Asked(counts.hits, counts.misses, counts.bytes_read)
        else:
            self._pace.stepped(seconds)
        of = {one.answer: one for one in self.running}
        for event in events:
            of[event.text].take(event)
        self._forget_over()
        self.look()

    def _choose(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """What the loop does next: the prompt that is due, or the answers, which get their share of the time."""
        answering, prompt = self._answering(), self._due_prompt()
        self._computed = None if self._pace.is_due and answering else prompt
        if prompt is None or self._computed is None:
            return self._may_step(answering)
        self.watch.compute([prompt])
        try:
            if prompt.answer is None:
                self._loop.pause()  # another prompt may have computed a part of this one
            answer = prompt.answer or prompt.begin()
        except Exception as error:
            prompt.fail(error)
            return []
        if answer not in answers:
            self._loop.add(answer)
        # Several ranks must leave a layer at the same place.
        prompt.job.thread = threading.get_ident() if answer.shares_steps else None
        return [answer]

    def _due_prompt(self) -> Running | None:
        """The prompt to go on with: the one that was computed last, unless it is over or another one overtakes it. One
        that begins like a prompt in progress waits until it can begin behind what they share.
        """
        prompts, last = [one for one in self.running if one.in_prompt and not one.is_over], self._prompt
        begun = [one for one in prompts if one.answer is not None]
        for one in prompts:
            one.follow(begun)
        prompts = [one for one in prompts if not one.waits]
        if last not in prompts or any(one.overtakes(last) for one in prompts if one is not last):
            for one in prompts:
                one.estimate()
            self._prompt = min(prompts, key=lambda one: one.due, default=None)
        return self._prompt

    def _may_step(self, answering: Sequence[Running]) -> Sequence[Answer]:
        """The answers whose next token has room."""
        assert self.admission is not None
        taking = self.admission.may_step(answering, self.running)[:MAX_ROWS]
        for one in answering:
            if one not in taking and one.answer is not None and one.answer.decoding is not None:
                one.answer.decoding.separate()
        self.watch.compute(taking)
        return [one.answer for one in taking if one.answer is not None]

    def _answering(self) -> list[Running]:
        return [one for one in self.running if not one.in_prompt and not one.is_over]

    def _end_cancelled(self) -> None:
        for one in self.running:
            if one.job.cancelled.is_set():
                one.cancel()
        self._forget_over()

    def _forget_over(self) -> None:
        self.running[:] = [one for one in self.running if not one.is_over]

    def look(self) -> None:
        """Shows what is done; called between any two parts of the work."""
        if self.engine is not None:
            self.watch.look(self.engine, self.running, self.queue, self.totals)


def _forget_locals(error: BaseException) -> None:
    """Clears the frames that `error` passed through, which may hold much memory."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
