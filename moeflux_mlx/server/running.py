"""One answer computed in one session: tokens in, events out, until it ends or nobody listens."""

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..engine.constrained import make_constraint
from ..engine.generation import GenerationResponse
from ..engine.running_text import Stopped
from ..engine.sampling import LogitsProcessor, make_logits_processors, make_sampler
from ..engine.session import Session
from ..text.calls.dialect import Dialect
from .answering import Answering
from .job import Job
from .prepare import sampler_settings
from .request import Accepted, PromptProgress, Sampling

TELL_EVERY = 0.25  # seconds between reports on a prompt
ALL = 1 << 31  # tokens that count for penalties on what was said: all of them


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
    session: computes it, and knows it afterwards.
    dialect: how the model calls tools.
    look: called at every token and every step of the prompt, with (done, total) of the prompt.
    totals: counts what is computed.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        dialect: Dialect | None,
        look: Callable[[int, int], Any],
        totals: Totals,
    ):
        self.job, self.session, self._look, self._totals = job, session, look, totals
        self._answering = Answering(job.prepared, session.tokenizer, dialect)
        self._accepted, self._cached = False, 0
        self._done = 0  # tokens of the prompt, cached or computed
        self._told = 0.0  # when a report on the prompt was given last
        self._since = 0.0  # up to when time has been counted
        self._prompt_seconds = self._answer_seconds = 0.0

    def run(self) -> None:
        """Computes and tells all of it; after `Stopped` by `look` it can be called again, and goes on.

        Raises:
            Stopped: the job is cancelled, or `look` wants the model for something else.
        """
        prepared, last = self.job.prepared, None
        self._since = time.perf_counter()
        responses = self.session.respond(
            prepared.tokens,
            boundaries=prepared.boundaries,
            prompt_progress_callback=self._progress,
            max_tokens=prepared.max_tokens,
            **self._sampling(prepared.request.sampling),
        )
        with closing(responses):
            for last in responses:
                self._token(last)
                if last.finish_reason or self._answering.done:
                    break
        self.session.keep()
        self._end(last)

    def _token(self, response: GenerationResponse) -> None:
        first = response.generation_tokens == 1
        if not first:
            self._count_time(in_prompt=False)
        self._totals.generated_tokens += 1
        for event in [*(self._answering.begin() if first else []), *self._answering.take(response)]:
            self.job.emit(event)
        self._look(1, 1)
        self._check()

    def _count_time(self, in_prompt: bool) -> None:
        now = time.perf_counter()
        spent, self._since = now - self._since, now
        if in_prompt:
            self._prompt_seconds += spent
            self._totals.prompt_seconds += spent
        else:
            self._answer_seconds += spent
            self._totals.answer_seconds += spent

    def _end(self, last: GenerationResponse | None) -> None:
        for event in self._answering.rest(last):
            self.job.emit(event)
        self.job.raw = self._answering.raw
        self.job.emit(self._answering.finish(last, self._cached, (self._prompt_seconds, self._answer_seconds)))

    def _progress(self, done: int, total: int) -> None:
        self._check()
        self._count_time(in_prompt=True)
        if not self._accepted:
            self._accepted, self._cached = True, total - self.session.reuse.computed
            self._done = self._cached
            self._totals.prompt_tokens += total
            self._totals.cached_tokens += self._cached
            self.job.emit(Accepted(total, self._cached))
        self._totals.computed_tokens += max(done - self._done, 0)
        self._done = max(done, self._done)
        if self._since - self._told >= TELL_EVERY and done < total:
            self._told = self._since
            self.job.emit(PromptProgress(done, total))
        self._look(done, total)

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
        return lambda tokens, logits: logits if self._answering.is_calling else process(tokens[start:], logits)
