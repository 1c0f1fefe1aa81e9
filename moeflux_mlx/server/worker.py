"""The one thread that loads and runs the model, and the queue of those who wait for it.

MLX's streams belong to threads, so the model never leaves this one. Others hand in jobs and hear of events. The thread
is a loop: it admits a job, takes one of those that run a step further, and hands out what came of it. A job runs to its
end, and only while a long prompt is computed may a few short ones go first.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..engine.engine import Engine
from ..engine.running_text import Stopped
from ..errors import RequestError
from .job import Job
from .live import Watch
from .running import CANCELLED, Running, Totals
from .sessions import Sessions

SHORT = 1024  # tokens of a prompt that may go before a long one
LONG = 4 * SHORT  # tokens that are still to be computed of one that lets it
IN_A_ROW = 3  # short prompts that may go before the same long one


class QueueFullError(RequestError):
    """As many requests wait as may."""


@dataclass
class State:
    """What others may read of the worker at any time.

    Args:
        engine: once it is loaded.
        error: why it could not be.
        running: what is under way, in the order in which it began.
    """

    engine: Engine | None = None
    error: BaseException | None = None
    running: list[Running] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    @property
    def ready(self) -> bool:
        return self.engine is not None


class Worker:
    """Args:
    load: makes the engine, in the worker's thread.
    make_sessions: what is kept of conversations, for an engine.
    waiting: jobs that may wait, besides the one that runs.
    on_ready: called in the worker's thread when the model is ready, or could not be loaded.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        make_sessions: Callable[[Engine], Sessions],
        waiting: int = 64,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self._load, self._make_sessions, self._on_ready = load, make_sessions, on_ready
        self.waiting = waiting
        self.state, self.watch = State(), Watch()
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._sessions: Sessions | None = None
        self._short_job = contextlib.ExitStack()  # of the source of experts, while one goes before another
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_stop(self) -> None:
        """Ends all work; those who wait are told that it was cancelled."""
        with self._wake:
            self._stopping = True
            waiting, running = list(self._jobs), list(self.state.running)
            self._jobs.clear()
            self._wake.notify_all()
        for job in waiting:
            job.emit(CANCELLED)
        for one in running:
            one.job.cancel()

    def stop(self, seconds: float) -> bool:
        """Ends all work; whether the thread ended in time."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Raises QueueFullError."""
        with self._wake:
            if len(self._jobs) >= self.waiting:
                raise QueueFullError(f"{len(self._jobs)} requests wait, which is the limit; try again later")
            self._jobs.append(job)
            self._wake.notify_all()

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more."""
        job.cancel()
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)

    @property
    def queue(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Somebody looks at the model meanwhile."""
        self.watch.begin()
        with self._wake:
            self._wake.notify_all()
        try:
            yield self.watch
        finally:
            self.watch.end()

    def _main(self) -> None:
        try:
            engine = self._load()
            self._sessions = self._make_sessions(engine)
            self.state.engine = engine
        except BaseException as error:  # whoever waits for the model must hear of any end
            self.state.error = error
            self._on_ready()
            return
        self._on_ready()
        try:
            while self._admit():
                self._step()
        finally:
            engine.experts.close()

    def _admit(self) -> bool:
        """Lets somebody begin who may, waiting for one while nothing runs; False once all work has ended."""
        with self._wake:
            while not (self.state.running or self._jobs or self._stopping):
                self._wake.wait(self.watch.patience)
                if not self._jobs:
                    self._look(None)
            job = None if self._stopping else self._next()
            if job is not None:
                self._jobs.remove(job)
                self._begin(job)
            return bool(self.state.running)

    def _next(self) -> Job | None:
        """Who of those that wait may begin: the first one while nothing runs, one with a short prompt while nothing
        but a long one is computed."""
        waiting, running = tuple(self._jobs), self.state.running
        if not running:
            return next(iter(waiting), None)
        (done, total), overtaken = running[0].progress, running[0].overtaken
        if len(running) > 1 or total - done <= LONG or overtaken == IN_A_ROW:
            return None
        return next((job for job in waiting if len(job.prepared.tokens) <= SHORT), None)

    def _begin(self, job: Job) -> None:
        """One that goes before another counts with it, and may replace no more of the experts in memory than a token
        uses."""
        engine, sessions, running = self.state.engine, self._sessions, self.state.running
        assert engine is not None and sessions is not None
        if running:
            running[0].overtaken += 1
            self._short_job.enter_context(engine.experts.short_job(engine.model.args.num_experts_per_tok))
        else:
            self.watch.begin_request(engine, self.state.totals)
        running.append(Running(job, sessions, self._look_at_prompt, self.state.totals))

    def _step(self) -> None:
        """Takes one of those that run further: whoever is cancelled, else the one that began last."""
        running = self.state.running
        one = next((one for one in running if one.job.cancelled.is_set()), running[-1])
        one.advance()
        self._look(one.progress)
        if one.is_over:
            running.remove(one)
            self._short_job.close()

    def _look_at_prompt(self, progress: tuple[int, int]) -> None:
        """Leaves a prompt half done where somebody else may begin."""
        self._look(progress)
        if self._next() is not None:
            raise Stopped

    def _look(self, progress: tuple[int, int] | None) -> None:
        if self.state.engine is not None:
            self.watch.look(self.state.engine, progress, self.queue, self.state.totals)
