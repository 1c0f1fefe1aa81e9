"""One request under way, from taking a session to giving it back: tokens in, events out, a piece at a time."""

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..engine.constrained import make_constraint
from ..engine.generation import GenerationResponse
from ..engine.running_text import Stopped
from ..engine.sampling import LogitsProcessor, make_logits_processors, make_sampler
from ..engine.session import Answer
from ..errors import DeviceError, MoefluxError, RequestError
from .answering import Answering
from .job import Job
from .prepare import sampler_settings
from .request import Accepted, Failed, PromptProgress, Sampling
from .sessions import Kept, Sessions

REPORT_EVERY = 0.25  # seconds between reports on a prompt
ALL = 1 << 31  # tokens that count for penalties on what was said: all of them
CANCELLED = Failed(503, "cancelled", "the request was cancelled")


@dataclass
class Totals:
    """Counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # of prompts, while they are computed
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    cancelled: int = 0
    failed: int = 0


class Running:
    """Args:
    job: what is answered.
    sessions: has the session that computes it, and that knows it afterwards.
    look: called with `progress` at every step of the prompt; may raise `Stopped` to leave the prompt half done.
    totals: counts what is computed.

    Attributes:
        progress: tokens of the prompt that are done, and all of them; two zeros before anything is known.
        overtaken: how many others ran while the prompt was half computed.
        is_over: the last event is told, and the session given back.
    """

    def __init__(
        self,
        job: Job,
        sessions: Sessions,
        look: Callable[[tuple[int, int]], Any],
        totals: Totals,
    ):
        self.job, self._sessions, self._look, self._totals = job, sessions, look, totals
        self.progress, self.overtaken, self.is_over = (0, 0), 0, False
        self._kept: Kept | None = None
        self._answer: Answer | None = None
        self._answering: Answering | None = None
        self._in_prompt, self._cached = True, 0  # tokens of the prompt that were known
        self._reported_at = 0.0  # when a report on the prompt was given last
        self._since = 0.0  # up to when time has been counted
        self._prompt_seconds = self._answer_seconds = 0.0

    def advance(self) -> None:
        """Computes and tells of one token, the first with the whole prompt before it, which `look` may leave half done.

        Whatever goes wrong ends this request, and nothing else.
        """
        try:
            self._check()
            self._advance()
        except Stopped:
            if self.job.cancelled.is_set():
                self._totals.cancelled += 1
                self._fail(CANCELLED)
        except Exception as error:
            self._totals.failed += 1
            remedy = f": {error}" if isinstance(error, DeviceError) else ""  # another error may tell what was asked
            print(f"error: a request failed: {type(error).__name__}{remedy}", file=sys.stderr, flush=True)
            self._fail(_failure(error))

    def _advance(self) -> None:
        if self._answer is None or self._answering is None:
            self._answer, self._answering = self._begin()
        if self._in_prompt:
            self._since = time.perf_counter()
        response = self._answer.advance()
        self._token(response, self._answering)
        if response.finish_reason or self._answering.done:
            self._end(response, self._answer, self._answering)

    def _begin(self) -> tuple[Answer, Answering]:
        prepared = self.job.prepared
        self._kept = self._sessions.take(prepared.tokens, prepared.request.session)
        session = self._kept.session
        answer = session.answer(
            prepared.tokens,
            boundaries=prepared.boundaries,
            prompt_progress_callback=self._progress,
            max_tokens=prepared.max_tokens,
            **self._sampling(prepared.request.sampling),
        )
        return answer, Answering(prepared, session.tokenizer)

    def _token(self, response: GenerationResponse, answering: Answering) -> None:
        first, self._in_prompt = self._in_prompt, False
        if not first:
            self._count_time()
        self._totals.generated_tokens += 1
        for event in [*(answering.begin() if first else []), *answering.take(response)]:
            self.job.emit(event)

    def _end(self, last: GenerationResponse, answer: Answer, answering: Answering) -> None:
        answer.close()
        answer.session.keep()
        for event in answering.rest(last):
            self.job.emit(event)
        self.job.raw = answering.raw
        self.job.emit(answering.finish(last, self._cached, (self._prompt_seconds, self._answer_seconds)))
        self._put_back()

    def _fail(self, event: Failed) -> None:
        self.job.emit(event)
        self._put_back()

    def _put_back(self) -> None:
        """Lets later requests take the conversation up; one that cannot be kept is lost, the others are served."""
        self.is_over, prepared = True, self.job.prepared
        try:
            if self._answer is not None:
                self._answer.close()
        except Exception as error:
            _lost(error)
        try:
            if self._kept is not None:
                self._sessions.give_back(self._kept, max(prepared.boundaries, default=len(prepared.tokens) - 1))
        except Exception as error:
            _lost(error)

    def _count_time(self) -> None:
        now = time.perf_counter()
        spent, self._since = now - self._since, now
        if self._in_prompt:
            self._prompt_seconds += spent
            self._totals.prompt_seconds += spent
        else:
            self._answer_seconds += spent
            self._totals.answer_seconds += spent

    def _progress(self, done: int, total: int) -> None:
        self._check()
        self._count_time()
        before, known = self.progress
        if not known:
            assert self._answer is not None
            before = self._cached = total - self._answer.session.reuse.computed
            self._totals.prompt_tokens += total
            self._totals.cached_tokens += before
            self.job.emit(Accepted(total, before))
        self._totals.computed_tokens += max(done - before, 0)
        self.progress = max(done, before), total
        if self._since - self._reported_at >= REPORT_EVERY and done < total:
            self._reported_at = self._since
            self.job.emit(PromptProgress(done, total))
        self._look(self.progress)

    def _check(self) -> None:
        if self.job.cancelled.is_set():
            raise Stopped

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        """Random numbers belong to the request: the same seed gives the same answer, whatever else runs."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return {
            "sampler": make_sampler(**sampler_settings(sampling), key=mx.random.key(seed)),
            "logits_processors": self._processors(sampling),
        }

    def _processors(self, sampling: Sampling) -> list[LogitsProcessor]:
        bias = make_logits_processors(sampling.logit_bias)
        said = make_logits_processors(
            presence_penalty=sampling.presence_penalty,
            presence_context_size=ALL,
            frequency_penalty=sampling.frequency_penalty,
            frequency_context_size=ALL,
        )
        repeated = make_logits_processors(repetition_penalty=sampling.repetition_penalty)
        after = len(self.job.prepared.tokens)
        penalties = [*(self._in_text(one, after) for one in said), *(self._in_text(one, 0) for one in repeated)]
        mask = self.job.prepared.mask
        return [*bias, *penalties, *([make_constraint(mask())] if mask else [])]

    def _in_text(self, process: LogitsProcessor, start: int) -> LogitsProcessor:
        """`process` of the tokens from `start` on; within a call of a tool it would push the model off the form."""

        def processed(tokens: mx.array, logits: mx.array) -> mx.array:
            is_calling = self._answering is not None and self._answering.is_calling
            return logits if is_calling else process(tokens[start:], logits)

        return processed


def _failure(error: Exception) -> Failed:
    """What a client hears: what it asked for wrongly, and of anything else no path and no detail."""
    if isinstance(error, RequestError):
        return Failed(400, "invalid_value", str(error))
    what = "reading or computing failed" if isinstance(error, MoefluxError) else "the server has a fault"
    return Failed(500, "server_error", f"{what} ({type(error).__name__}); try again, or look at the server's log")


def _lost(error: Exception) -> None:
    print(f"error: a conversation was lost: {type(error).__name__}", file=sys.stderr, flush=True)
