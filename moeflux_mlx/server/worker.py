"""The one thread that loads and runs the model, and the queue of those who wait for it.

MLX's streams belong to threads, so the model never leaves this one. Others hand in jobs and hear of events; a job runs
to its end, and only while a long prompt is computed may a few short ones go first.
"""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..engine.engine import Engine
from ..engine.running_text import Stopped
from ..errors import DeviceError, MoefluxError, RequestError
from ..text.calls.dialect import dialect_of
from .job import Job
from .live import Watch
from .prepare import Prepared
from .request import Failed
from .running import Running, Totals
from .sessions import Kept, Sessions

SHORT = 1024  # tokens of a prompt that may go before a long one
LONG = 4 * SHORT  # tokens that are still to be computed of one that lets it
IN_A_ROW = 3  # short prompts that may go before the same long one
CANCELLED = Failed(503, "cancelled", "the request was cancelled")


class QueueFullError(RequestError):
    """As many requests wait as may."""


@dataclass
class State:
    """What others may read of the worker at any time.

    Args:
        engine: once it is loaded.
        error: why it could not be.
        running: the job under way.
    """

    engine: Engine | None = None
    error: BaseException | None = None
    running: Job | None = None
    totals: Totals = field(default_factory=Totals)

    @property
    def ready(self) -> bool:
        return self.engine is not None


class Worker:
    """Args:
    load: makes the engine, in the worker's thread.
    make_sessions: what is kept of conversations, for an engine.
    waiting: jobs that may wait, besides the one that runs.
    told: called in the worker's thread when the model is ready, or could not be loaded.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        make_sessions: Callable[[Engine], Sessions],
        waiting: int = 64,
        told: Callable[[], None] = lambda: None,
    ):
        self._load, self._make_sessions, self._told = load, make_sessions, told
        self.waiting = waiting
        self.state, self.watch = State(), Watch()
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._sessions: Sessions | None = None
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_stop(self) -> None:
        """Ends all work; those who wait are told that it was cancelled."""
        with self._wake:
            self._stopping = True
            waiting, running = list(self._jobs), self.state.running
            self._jobs.clear()
            self._wake.notify_all()
        for job in waiting:
            job.emit(CANCELLED)
        if running is not None:
            running.cancel()

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
            self._dialect = dialect_of(engine.tokenizer.chat_template)
            self._sessions = self._make_sessions(engine)
            self.state.engine = engine
        except BaseException as error:  # whoever waits for the model must hear of any end
            self.state.error = error
            self._told()
            return
        self._told()
        try:
            while (job := self._next()) is not None:
                self._serve(job)
        finally:
            engine.experts.close()

    def _next(self) -> Job | None:
        with self._wake:
            while not self._jobs and not self._stopping:
                self._wake.wait(self.watch.patience)
                if not self._jobs:
                    self._look(None)
            return None if self._stopping else self._jobs.popleft()

    def _serve(self, job: Job, may_give_way: bool = True) -> None:
        """Runs a job to its end; nothing that goes wrong in it may end the thread."""
        assert self._sessions is not None
        kept: Kept | None = None
        before = self.state.running
        if before is None and self.state.engine is not None:  # one that goes before another counts with it
            self.watch.begin_request(self.state.engine, self.state.totals)
        self.state.running = job
        try:
            kept = self._sessions.take(job.prepared.tokens, job.prepared.request.session)
            self._run(job, kept, may_give_way)
        except Stopped:
            self.state.totals.cancelled += 1
            job.emit(CANCELLED)
        except Exception as error:  # one request's failure is not the others'
            self.state.totals.failed += 1
            remedy = f": {error}" if isinstance(error, DeviceError) else ""  # another error may tell what was asked
            print(f"error: a request failed: {type(error).__name__}{remedy}", file=sys.stderr, flush=True)
            job.emit(_failure(error))
        finally:
            self.state.running = before
            if kept is not None:
                self._put_back(kept, job.prepared)

    def _put_back(self, kept: Kept, prepared: Prepared) -> None:
        """Lets later requests take a conversation up; one that cannot be kept is lost, the others are served."""
        assert self._sessions is not None
        try:
            self._sessions.give_back(kept, max(prepared.boundaries, default=len(prepared.tokens) - 1))
        except Exception as error:
            print(f"error: a conversation was lost: {type(error).__name__}", file=sys.stderr, flush=True)

    def _run(self, job: Job, kept: Kept, may_give_way: bool) -> None:
        def look(done: int, total: int) -> None:
            self._look((done, total))
            if self._stopping:
                job.cancel()
                raise Stopped
            if may_give_way and total - done > LONG and self._short_waits(job):
                raise Stopped

        running = Running(job, kept.session, self._dialect, look, self.state.totals)
        while True:
            try:
                return running.run()
            except Stopped:
                if job.cancelled.is_set():
                    raise
            self._let_pass(job)

    def _short_waits(self, job: Job) -> bool:
        return job.overtaken < IN_A_ROW and any(_is_short(other) for other in tuple(self._jobs))

    def _let_pass(self, job: Job) -> None:
        """Runs the first short job that waits; the long one's half-done span stays in its session, and its experts in
        memory but for as many as a token uses.
        """
        with self._wake:
            other = next((one for one in self._jobs if _is_short(one)), None)
            if other is not None:
                self._jobs.remove(other)
        job.overtaken += 1
        engine = self.state.engine
        if other is not None and engine is not None:
            with engine.experts.guest(engine.model.args.num_experts_per_tok):
                self._serve(other, may_give_way=False)

    def _look(self, progress: tuple[int, int] | None) -> None:
        if self.state.engine is not None:
            self.watch.look(self.state.engine, progress, self.queue, self.state.totals)


def _is_short(job: Job) -> bool:
    return len(job.prepared.tokens) <= SHORT


def _failure(error: Exception) -> Failed:
    """What a client hears: what it asked for wrongly, and of anything else no path and no detail."""
    if isinstance(error, RequestError):
        return Failed(400, "invalid_value", str(error))
    what = "reading or computing failed" if isinstance(error, MoefluxError) else "the server has a fault"
    return Failed(500, "server_error", f"{what} ({type(error).__name__}); try again, or look at the server's log")
