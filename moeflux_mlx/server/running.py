"""One request on its way: takes a session, makes events of what the loop computes, and gives the session back.

A `Job` is one request in the queue or in progress: its content, its client, and whether it is cancelled.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..driving.generation import GenerationResponse, Responder, SamplerOptions, xtc_special_tokens
from ..driving.loop import Event
from ..driving.sampling import Constraint, LogitsProcessor, make_logits_processors, make_sampler
from ..driving.session import Answer, PromptEnd
from ..errors import MoefluxError, RequestError
from ..experts.stats import Asked
from ..ops.interrupt import leave
from ..text.boundaries import shared_length
from ..text.tokenizer import TokenizerWrapper
from .answering import Answering
from .faults import report
from .prepare import PreparedRequest, sampler_settings
from .request import Accepted, Failed, Finish, PromptProgress, Sampling, ServerEvent
from .sessions import WORTH_COPYING, KeptSession, Sessions


@dataclass(eq=False)
class SharedPrompt:
    """A prompt that several jobs answer, and that is computed for the first of them.

    Args:
        waiting: how many of the jobs have not begun.
        end: what the others begin from, once it is computed.
    """

    waiting: int
    end: PromptEnd | None = None

    def begin(self) -> PromptEnd | None:
        """One of the jobs begins: where its answer begins, or None if it is to compute the prompt."""
        self.waiting -= 1
        end = self.end
        if not self.waiting:
            self.end = None
        return end


@dataclass(eq=False)
class Job:
    """Args:
    prepared: the request.
    emit: takes the events; may be called in any thread.
    client: the client; clients take turns, regardless of the number of their jobs.
    on_begin: called when the job begins, in any thread.
    shared: its prompt, if other jobs answer the same one.
    """

    prepared: PreparedRequest
    emit: Callable[[ServerEvent], None]
    client: str = ""
    on_begin: Callable[[], None] = lambda: None
    shared: SharedPrompt | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    raw: str = ""  # what the model wrote, set before the last event
    thread: int | None = None  # the one that computes its prompt at the moment, by its identifier

    def cancel(self) -> None:
        """Cancels the job; its work ends within a token, a wave of experts or a block of a mixer, on the CPU
        within a piece of these.
        """
        self.cancelled.set()
        if (thread := self.thread) is not None:
            leave(thread)


REPORT_EVERY = 0.25  # seconds between reports on a prompt
OVERTAKING = 4  # a prompt overtakes the rest of one that is this many times as long
ALL, RECENT = 1 << 31, 20  # context sizes of penalties, in tokens: everything, and mlx-lm's default
CANCELLED = Failed(503, "cancelled", "the request was cancelled")


@dataclass
class Totals:
    """Counts since the start; seconds are computing time of the model's thread."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # tokens of prompts, counted while they are computed
    generated_tokens: int = 0
    steps: int = 0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    cancelled: int = 0
    failed: int = 0


class Running:
    """Args:
    job: the request to answer.
    sessions: provides the session and keeps it afterwards.
    totals: counts what is computed.

    Attributes:
        progress: computed tokens of the prompt and their total; two zeros at first.
        answer: for the loop, from `begin` on.
        in_prompt: whether no token has been chosen yet.
        is_over: whether the last event is sent and the session given back.
        left: tokens of the prompt still to be computed.
        waits: whether another prompt is being computed that begins alike, and has not come to where they differ.
        set_aside: number of tokens for which memory is reserved.
        tokens: number of tokens of the answer.
        asked: the experts that its prompt requested.
    """

    def __init__(self, job: Job, sessions: Sessions, totals: Totals):
        self.job, self._sessions, self._totals = job, sessions, totals
        self.progress, self.in_prompt, self.is_over = (0, 0), True, False
        self.left = self.set_aside = self.tokens = 0
        self.waits, self.asked = False, Asked()
        self._shared: WeakKeyDictionary[Running, int] = WeakKeyDictionary()
        self._ahead = 0  # tokens of the prompt that others have computed for theirs
        self._came = totals.computed_tokens
        self._kept: KeptSession | None = None
        self.answer: Answer | None = None
        self._answering: Answering | None = None
        self._cached = 0  # tokens of the prompt that were known
        self._began = self._first = time.perf_counter()  # start of the prompt, and of the answer
        self._reported_at = 0.0  # when a report on the prompt was given last
        self.estimate()

    def estimate(self) -> None:
        """Recomputes how many tokens of a waiting prompt are already known."""
        if self.answer is None:
            tokens = self.job.prepared.tokens
            self.left = len(tokens) - max(self._sessions.known(tokens), self._ahead)

    def follow(self, begun: "Sequence[Running]") -> None:
        """Notes what the prompts that are being computed save a waiting one, and whether it waits for more."""
        self.waits = False
        for other in begun if self.answer is None else ():
            assert other.answer is not None
            shared, absorbed = self._shared_with(other), other.answer.session.absorbed
            self._ahead = max(self._ahead, min(shared, absorbed))
            known = len(self.job.prepared.tokens) - self.left
            is_same = self.job.shared is not None and self.job.shared is other.job.shared
            saves = shared - max(known, absorbed)
            is_worth_it = 2 * saves >= self.left or not self.overtakes(other)
            self.waits |= is_same or (saves >= WORTH_COPYING and is_worth_it)
        self.left = min(self.left, len(self.job.prepared.tokens) - self._ahead)

    def _shared_with(self, other: "Running") -> int:
        """The length of the beginning that both prompts have."""
        if other not in self._shared:
            self._shared[other] = shared_length(self.job.prepared.tokens[:-1], other.job.prepared.tokens)
        return self._shared[other]

    @property
    def due(self) -> int:
        """The virtual finish time: prompt tokens computed at arrival plus own tokens. The lowest goes first. So a short
        prompt overtakes a long one, but no prompt waits for more tokens of later prompts than it has itself.
        """
        return self._came + self.left + (self.progress[0] - self._cached)

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer."""
        return len(self.job.prepared.tokens) + self.tokens

    @property
    def seconds(self) -> tuple[float, float]:
        """Since the prompt was begun to its end, and from there on."""
        now = time.perf_counter()
        return (now - self._began, 0.0) if self.in_prompt else (self._first - self._began, now - self._first)

    def overtakes(self, other: "Running") -> bool:
        """Whether this prompt overtakes the rest of the one being computed; an interruption costs part of a layer."""
        return self.due < other.due and OVERTAKING * self.left <= other.left

    def begin(self) -> Answer:
        """Takes a session and makes its answer, of which nothing is computed yet."""
        prepared, shared = self.job.prepared, self.job.shared
        self._began = time.perf_counter()
        end = shared.begin() if shared is not None else None
        if end is not None:
            self.answer = end.answer(prepared.max_tokens, **self._sampling(end.session.tokenizer))
            self._kept = self._sessions.hold(self.answer.session, prepared.request.session)
        else:
            self._kept = self._sessions.take(prepared.tokens, prepared.request.session)
            self.answer = self._kept.session.answer(
                prepared.tokens,
                boundaries=prepared.boundaries,
                max_tokens=prepared.max_tokens,
                **self._sampling(self._kept.session.tokenizer),
            )
            self.answer.keeps_end = shared is not None and shared.waiting > 0 and self.answer.shares_steps
        session = self._kept.session
        self._answering = Answering(prepared, session.tokenizer)
        self._responder = Responder(session.model, session.tokenizer, len(prepared.tokens))
        return self.answer

    def take(self, event: Event[Answer]) -> None:
        """Emits what the loop has done: a piece of the prompt, the next token, or an error. An error ends only this
        request.
        """
        try:
            if event.error is not None:
                raise event.error
            if event.token is None:
                self._progress(event.done)
                return
            if self.in_prompt:
                self._end_prompt()
            self._token(self._responder.response(event))
        except Exception as error:
            self.fail(error)

    def _end_prompt(self) -> None:
        assert self.answer is not None
        self.in_prompt, self.left = False, 0
        if self.answer.keeps_end and self.job.shared is not None:
            self.job.shared.end, self.answer.prompt_end = self.answer.prompt_end, None
        self._first = time.perf_counter()
        self.job.emit(PromptProgress(self.progress[1], self.progress[1]))  # the first token may have no text

    def cancel(self) -> None:
        """Ends the cancelled request."""
        self._totals.cancelled += 1
        self._end_with(CANCELLED)

    def fail(self, error: Exception) -> None:
        if not isinstance(error, RequestError):  # the client's own mistake, which only the client is told
            self._totals.failed += 1
            report("a request failed", error)
        self._end_with(_failure(error))

    def _token(self, response: GenerationResponse) -> None:
        answering = self._answering
        assert answering is not None
        self.tokens += 1
        self._totals.generated_tokens += 1
        for event in [*(answering.begin() if self.tokens == 1 else []), *answering.take(response)]:
            self.job.emit(event)
        if response.finish_reason or answering.done:
            self._end(response, answering)

    def _end(self, last: GenerationResponse, answering: Answering) -> None:
        assert self.answer is not None
        self.answer.end()
        self.answer.session.keep()
        for event in answering.rest(last):
            self.job.emit(event)
        self.job.raw = answering.raw
        self._end_with(answering.finish(last, self._cached, self.seconds, self.asked + self.answer.asked))

    def _end_with(self, event: Finish | Failed) -> None:
        """Emits the last event and gives the session back for later requests. A session that cannot be kept is
        dropped.
        """
        if self.is_over:
            return
        self.is_over, prepared = True, self.job.prepared
        self.job.emit(event)
        try:
            if self.answer is not None:
                self.answer.end()
        except Exception as error:
            report("a conversation was lost", error)
        try:
            if self._kept is not None:
                self._sessions.give_back(self._kept, max(prepared.boundaries, default=len(prepared.tokens) - 1))
        except Exception as error:
            report("a conversation was lost", error)

    def _progress(self, done: int) -> None:
        (before, known), total = self.progress, len(self.job.prepared.tokens)
        if not known:
            assert self.answer is not None
            before = self._cached = total - self.answer.session.reuse.computed
            self._totals.prompt_tokens += total
            self._totals.cached_tokens += before
            self.job.emit(Accepted(total, before))
        self._totals.computed_tokens += max(done - before, 0)
        self.progress = max(done, before), total
        self.left = total - self.progress[0]
        now = time.perf_counter()
        if now - self._reported_at >= REPORT_EVERY and done < total:
            self._reported_at = now
            self.job.emit(PromptProgress(done, total))

    def _sampling(self, tokenizer: TokenizerWrapper) -> SamplerOptions:
        """The sampler's random numbers belong to the request, so the same seed gives the same answer, whatever else
        runs.
        """
        sampling = self.job.prepared.request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        settings = {**sampler_settings(sampling), "xtc_special_tokens": xtc_special_tokens(tokenizer)}
        return {
            "sampler": make_sampler(**settings, key=mx.random.key(seed)),
            "logits_processors": self._processors(sampling),
        }

    def _processors(self, sampling: Sampling) -> list[LogitsProcessor]:
        processors = make_logits_processors(sampling.logit_bias)
        answer, mask = len(self.job.prepared.tokens), self.job.prepared.mask
        usual = {"repetition": (0, RECENT), "presence": (answer, ALL), "frequency": (answer, ALL)}
        for name, (start, size) in usual.items():
            asked = getattr(sampling, f"{name}_context_size")
            start, size = (start, size) if asked is None else (0, asked)
            if size:
                penalty = {f"{name}_penalty": getattr(sampling, f"{name}_penalty"), f"{name}_context_size": size}
                processors += [self._in_text(one, start) for one in make_logits_processors(**penalty)]
        return [*processors, *([Constraint(mask())] if mask else [])]

    def _in_text(self, process: LogitsProcessor, start: int) -> LogitsProcessor:
        """Applies `process` to the tokens from `start` on, but not within a tool call, whose form it would disturb."""

        def processed(tokens: mx.array, logits: mx.array) -> mx.array:
            is_calling = self._answering is not None and self._answering.is_calling
            return logits if is_calling else process(tokens[start:], logits)

        return processed


def _failure(error: Exception) -> Failed:
    """The error for the client: its own mistake in full, any other error without paths and details."""
    if isinstance(error, RequestError):
        return Failed(400, "invalid_value", str(error))
    what = "reading or computing failed" if isinstance(error, MoefluxError) else "the server has a fault"
    return Failed(500, "server_error", f"{what} ({type(error).__name__}); try again, or look at the server's log")
