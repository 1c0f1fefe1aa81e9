"""A session: one running text that answers prompts, one token at a time.

`respond` answers a prompt. `answer` returns an answer that the caller advances, so that several answers can take turns.
`RunningText` keeps the states of earlier prompts. Text, messages and templates are the caller's concern.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from ..experts.stats import Asked
from ..files import JsonDict
from ..model.decoder import Model
from ..state.fingerprint import Fingerprint
from ..state.prompt_file import PromptHeader, load_prompt, save_prompt
from ..text.tokenizer import TokenizerWrapper
from .batch import Outcome, advance_together, attempt
from .decoding import Decoding
from .generation import GenerationResponse, Responder, Responses, SamplerOptions, check_max_tokens
from .prompt import Prompt, checked_prompt
from .running_text import RunningText, TextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AnswerOptions(SamplerOptions, total=False):
    """The keywords of `Session.answer` that say how tokens are chosen, and how many."""

    max_tokens: int


class ResponseOptions(AnswerOptions, total=False):
    """The keywords of `Session.answer`."""

    boundaries: Sequence[int]
    prompt_progress_callback: Callable[[int, int], object] | None


class Session(RunningText):
    """A text in progress, and its answers.

    Args:
        options: as `RunningText`.

    Attributes:
        first_token_seconds: seconds from the first call to the first token of the last answer.
        prompt_bytes: bytes of experts that were read for the last prompt.
        last: the newest response; None before the first one.
    """

    def __init__(self, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[TextOptions]"):
        super().__init__(model, **options)
        self.tokenizer = tokenizer
        self.first_token_seconds = 0.0
        self.prompt_bytes = 0
        self.last: GenerationResponse | None = None

    def answer(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        prompt_progress_callback: Callable[[int, int], object] | None = None,
        max_tokens: int = 256,
        **choice: "Unpack[SamplerOptions]",
    ) -> "Answer":
        """Makes an answer to `prompt`, the token ids of the whole text so far; nothing is computed yet.

        Args:
            boundaries, prompt_progress_callback: as `sync`; the callback is also called at the end, with two equal
                numbers.
            max_tokens: limit of the answer; -1: only an end-of-text token ends it.
            choice: `sampler` and `logits_processors`, as `generate_step`.

        Raises:
            RequestError: an empty prompt, a token outside the vocabulary, or a count out of range.
        """
        prompt = checked_prompt(prompt, self.model)
        check_max_tokens(max_tokens)
        return Answer(self, prompt, boundaries, prompt_progress_callback, max_tokens, choice)

    def respond(self, prompt: Sequence[int], **options: "Unpack[ResponseOptions]") -> Responses:
        """Yields the responses of an answer; `options` as for `answer`.

        After the iterator is closed or an exception is raised, the session can continue, as `Answer` says.

        Raises:
            RequestError: as `answer`. Errors of `Answer.advance`.
        """
        with closing(self.answer(prompt, **options)) as answer:
            while True:
                response = answer.advance()
                yield response
                if response.finish_reason:
                    return

    def fork(self, length: int) -> "Session":
        """Returns another session with the first `length` tokens, or with those up to the last kept state before that.

        This session does not change; arrays are shared until one of the two writes to them.
        """
        whole = self.half is None and length >= len(self.tokens)
        reached = len(self.tokens) if whole else self.points.nearest(min(length, len(self.tokens)))
        other = self._blank(
            store=self.store,
            checkpoint_bytes=self.points.max_bytes,
            checkpoint_every=self.checkpoint_every,
            prefill_step_size=self.prefill_step_size,
            span=self.span,
        )
        kept = {} if whole else self.points.states_at(reached)
        for i, (new, old) in enumerate(zip(other.cache, self.cache, strict=True)):
            new.take_from(old, reached, old.kept() if whole else kept.get(i))
        mx.eval([layer.state for layer in other.cache])
        other.tokens = self.tokens[:reached]
        other.drafts = self.drafts and self.drafts.copy()
        for position in self.points.positions:
            if position <= reached:
                other.points.add(position, self.points.states_at(position))
        return other

    def _blank(self, **options: "Unpack[TextOptions]") -> "Session":
        """A new session of this kind."""
        return Session(self.model, self.tokenizer, **options)

    def save(self, path: Path, fingerprint: Fingerprint, extra: JsonDict) -> None:
        """Writes tokens, state and `extra` to a file. Raises PromptCacheError, SnapshotError."""
        self._drop_half()
        behind = self.drafts.saved(len(self.tokens)) if self.drafts is not None else b""
        save_prompt(path, self.model, self.cache, self.tokens, fingerprint, extra, behind)

    def load(self, path: Path, fingerprint: Fingerprint) -> PromptHeader:
        """Restores what `save` wrote; after an error the session is unchanged. Raises PromptCacheError."""
        self._drop_half()
        header = load_prompt(path, self.model, self.cache, fingerprint)
        self.points.drop_after(0)
        self.tokens, self._step = header.tokens.tolist(), None
        self.points.keep(len(self.tokens))
        if self.drafts is not None:
            self.drafts.restore(header.behind, self.tokens)
        return header


class Answer:
    """An answer in progress, made by `Session.answer`; the session must not be used otherwise until it is closed.

    Attributes:
        session: absorbs the prompt, and each token when the next one has been computed.
        shares_steps: whether `advance_answers` may advance it together with others.
        asked: the experts that its tokens requested, without the prompt's, if they are counted.
    """

    shares_steps = True
    asked = Asked()

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        boundaries: Sequence[int],
        report: Callable[[int, int], object] | None,
        max_tokens: int,
        choice: SamplerOptions,
    ):
        self.session = session
        self._prompt, self._boundaries, self._report = prompt, boundaries, report or (lambda done, total: None)
        self._max_tokens, self._choice = max_tokens, choice
        self._decoding: Decoding | None = None

    def advance(self) -> GenerationResponse:
        """Returns the response of the next token; the first call computes the prompt. Must not be called after the last
        token.

        If the prompt was left with `Stopped`, it can be called again and continues in the middle of the span. Any other
        exception ends the answer. The session remains usable; after a DeviceError its text is empty.

        Raises:
            RequestError, PromptCacheError, ExpertIOError, DeviceError: as `RunningText.sync`.
            ModelFileError: as `Decoding.advance`.
        """
        try:
            return self._first() if self._decoding is None else self._following(*self._decoding.advance())
        except BaseException as error:
            self._end(error)
            raise

    @property
    def decoding(self) -> Decoding | None:
        """The decoding that chooses the tokens; None before the prompt is computed and after the answer has ended."""
        return self._decoding

    def take(self, outcome: Outcome) -> GenerationResponse:
        """Returns the response of the token that `decoding` chose in a shared step; an error ends the answer and is
        raised.
        """
        try:
            if isinstance(outcome, Exception):
                raise outcome
            return self._following(*outcome)
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        """Ends the answer: the session then holds the prompt and all tokens but the last."""
        self._end(None)

    def _first(self) -> GenerationResponse:
        session, prompt, read = self.session, self._prompt, self._bytes_read()
        session.last = None
        self._responder = Responder(session.model, session.tokenizer, len(prompt), self._max_tokens)
        logits = session._sync(prompt, self._boundaries, self._report)
        self._responder.computed = session.reuse.computed
        options: AnswerOptions = {"max_tokens": self._max_tokens, **self._choice}
        self._decoding = Decoding(
            *(session.model, session.cache, prompt.tokens, logits),
            draft_limit=session._draft_limit,
            drafts=session.drafts,
            **options,
        )
        chosen = self._decoding.advance()
        self._report(len(prompt), len(prompt))
        response = self._said(*chosen)
        session.first_token_seconds = self._responder.first_token_seconds
        session.prompt_bytes = self._bytes_read() - read
        session._answering = True
        return response

    def _following(self, token: int, logprobs: mx.array) -> GenerationResponse:
        assert self.session.last is not None and self._decoding is not None
        before = self.session.last.token
        response = self._said(token, logprobs)
        self.asked = self._decoding.asked
        self.session._append(before, keep=self._decoding.is_settled)
        return response

    def _said(self, token: int, logprobs: mx.array) -> GenerationResponse:
        assert self._decoding is not None
        self.session.last = response = self._responder.response(token, logprobs, self._decoding.from_draft)
        if response.finish_reason:
            self._decoding.close()  # so that the caches hold what has been reported
        return response

    def _end(self, error: BaseException | None) -> None:
        session, decoding, self._decoding = self.session, self._decoding, None
        try:
            if decoding is not None:
                decoding.close()
            session.points.drop_after(len(session.tokens))  # the last kept state may be one token further
        finally:
            if error is not None:
                session._recover(error)
            session._save_states(self._prompt)

    def _bytes_read(self) -> int:
        experts = self.session.model.experts
        return 0 if experts is None else experts.stats.bytes_read


def advance_answers(answers: Sequence[Answer]) -> list[GenerationResponse | Exception]:
    """Advances each answer by one step of the model for all; returns each next response, or the error that ended the
    answer.

    Answers of several ranks are advanced one after the other.

    Args:
        answers: at most `model.step.MAX_ROWS`, of sessions of one model; each has its first token and has not ended.

    Raises:
        RequestError, DeviceError: as `advance_together`. Like an interrupt, they end all answers.
    """
    sharing = {answer: answer.decoding for answer in answers if answer.shares_steps and answer.decoding is not None}
    try:
        outcomes = dict(zip(sharing, advance_together(list(sharing.values())), strict=True))
        acts = [partial(one.take, outcomes[one]) if one in outcomes else one.advance for one in answers]
        return [attempt(act) for act in acts]
    except BaseException as error:
        for answer in answers:
            answer._end(error)
        raise
