"""Drives every text: a piece of the prompt that is due, or one step of the model for a row of every answer that is.

A `Text` says what is computed for it and takes the results; a `Loop` decides nothing but the order of the calls, which
`choose` gives. No other module calls `Model.advance` or `Model.step`.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx

from ..caches.layer_cache import LayerCache
from ..errors import DeviceError, ExpertIOError, RequestError
from ..model.decoder import Model
from ..model.step import MAX_ROWS, Step
from ..ops.interrupt import Left
from ..ops.limits import within_limits
from .decoding import ChosenToken, Decoding, Proposed, choose_likeliest
from .drafts import head_drafts
from .prefill import Prefill
from .prompt import Prompt
from .sampling import LogitsProcessor, Sampler

Outcome = tuple[int, mx.array] | Exception  # a token and its logprobs [vocab_size], or the error
Progress = Callable[[int, int], object]
Made = TypeVar("Made")


AnyText = TypeVar("AnyText", bound="Text")


@dataclass(frozen=True, slots=True)
class Event(Generic[AnyText]):
    """What one piece or row has done for a text.

    Attributes:
        done: work done in tokens of the prompt; all of them with a token.
        token: the next token of the answer; None: the prompt is still being computed, or there is an `error`.
        logprobs: [vocab_size] float32.
        from_draft: whether the token was an accepted draft.
        finish_reason: "stop", "length" or "error" if the text has ended, else None.
    """

    text: AnyText
    done: int = 0
    token: int | None = None
    logprobs: Any = None
    from_draft: bool = False
    finish_reason: str | None = None
    error: Exception | None = None


class Text:
    """A prompt and its answer. It waits in the prompt, then answers, then it is over.

    Args:
        cache: from `Model.make_cache`; it absorbs the prompt, and each token of the answer when the next one is
            computed. When the text is over in the middle of its prompt, whole spans of it are left.
        prompt: what is new behind `cache`.
        max_tokens: limit of the answer; -1: there is none.
        is_end: whether the answer, given all of its tokens, has ended.
        span, prefill_step_size: as `Prefill` has them.
        choice: `sampler` and `logits_processors`, as `Decoding` has them.

    Attributes:
        tokens: of the answer so far.
        decoding: chooses them; None in the prompt and at the end.
        is_over: whether nothing is left to do.
        shares_steps: whether its rows may be computed together with other texts'.
    """

    shares_steps = True

    def __init__(
        self,
        model: Model,
        cache: list[LayerCache],
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        is_end: Callable[[list[int]], bool] = lambda tokens: False,
        span: int | None = None,
        prefill_step_size: int | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
    ):
        self.model, self.cache, self.prompt, self.is_end = model, cache, prompt, is_end
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "sampler": sampler,
            "logits_processors": logits_processors,
        }
        self._cut: dict[str, Any] = {"span": span, "block": prefill_step_size}
        self.tokens: list[int] = []
        self.decoding: Decoding | None = None
        self.is_over = False
        self._pieces: Generator[int, None, mx.array] | None = None
        self._prefill: Prefill | None = None

    @property
    def is_in_prompt(self) -> bool:
        return self.decoding is None and not self.is_over

    def prompt_pieces(self) -> Generator[int, None, mx.array]:
        """The pieces of the prompt, as `absorb_prompt` has them."""
        if self._prefill is None:
            drafts, images = head_drafts(self.model), self.prompt.images.after(self.cache)
            if drafts is not None:  # the tokens that the cache has absorbed are not known here
                drafts.begin([0] * self.cache[0].offset + list(self.prompt))
            given = self.model, self.cache, self.prompt.tokens
            self._prefill = Prefill(*given, **self._cut, drafts=drafts, images=images)
        return (yield from absorb_prompt(self._prefill))

    def decode(self, logits: mx.array) -> Decoding:
        """Chooses the tokens of the answer, after the logits [1, vocab_size] of the prompt."""
        assert self._prefill is not None
        given = self.model, self.cache, self.prompt.tokens, logits
        return Decoding(*given, drafts=self._prefill.drafts, **self._options)

    def advance_prompt(self) -> int | None:
        """Computes a piece of the prompt; returns the work done in tokens, or None when the answer begins. After `Left`
        it is paused.
        """
        if self._pieces is None:
            self._pieces = self.prompt_pieces()
        try:
            return next(self._pieces)
        except Left:
            self.pause()
            raise
        except StopIteration as end:
            self._pieces = None
            self.decoding = self.decode(end.value)
            return None
        except BaseException:
            self._pieces.close()
            self._pieces = None
            raise

    def pause(self) -> None:
        """Leaves the prompt between two layers, from where it goes on; what a layer in progress has computed is lost,
        and its memory is free.
        """
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            pieces.close()

    def advance_alone(self) -> Outcome:
        """The next token of a text that shares no steps."""
        assert self.decoding is not None
        return advance_together([self.decoding])[0]

    def take(self: AnyText, outcome: Outcome) -> Event[AnyText]:
        """Takes the next token, or the error that ends the text."""
        if isinstance(outcome, Exception):
            self.end(outcome)
            return Event(self, finish_reason="error", error=outcome)
        assert self.decoding is not None
        token, logprobs = outcome
        from_draft, is_last = self.decoding.from_draft, self.decoding.is_done
        self.tokens.append(token)
        reason = "stop" if self.is_end(self.tokens) else "length" if is_last else None
        if reason is not None:
            self.decoding.close()  # so that the caches hold what is reported
        self.follow()
        if reason is not None:
            self.end()
        return Event(self, len(self.prompt), token, logprobs, from_draft, reason)

    def follow(self) -> None:
        """A token was chosen, so the caches have absorbed the one before it."""

    def end(self, error: BaseException | None = None) -> None:
        """Ends the text, after an error or at any moment: the caches then hold all tokens but the last."""
        if not self.is_over:
            self.is_over = True
            self.pause()
            decoding, self.decoding = self.decoding, None
            if decoding is not None:
                decoding.close()
            elif self._prefill is not None:
                self._prefill.drop()


def absorb_prompt(prefill: Prefill) -> Generator[int, None, mx.array]:
    """Computes the rest of a prompt; returns the logits [1, vocab_size] after its last token.

    Yields at the beginning and after each block of a mixer and each wave of experts the work done in tokens, ascending
    and less than there are. Closing the iterator, like an error, leaves a half-done span, with which another goes on.

    Raises:
        ExpertIOError, DeviceError: as calling the model does.
    """
    yield prefill.done
    most = len(prefill.tokens) - 1
    for span in prefill.spans():
        with closing(prefill.model.advance(span, prefill.cache)) as pieces:
            try:
                while True:
                    yield min(prefill.done + int(span.length * next(pieces)), most)
            except StopIteration as end:
                prefill.take(span, end.value)
    assert prefill.logits is not None  # a prompt has a token
    return prefill.logits


def first_come(texts: Sequence[AnyText]) -> Sequence[AnyText]:
    """The first prompt; where there is none, every answer."""
    prompts = [text for text in texts if text.is_in_prompt]
    return prompts[:1] or texts[:MAX_ROWS]


class Loop(Generic[AnyText]):
    """Drives texts of one model, in one thread. One prompt is computed at a time: one that gives way to another is
    paused, so that the temporaries of one span are in memory.

    Args:
        choose: says which of the texts are due: one in its prompt, or at most `MAX_ROWS` that answer; none: nothing is.

    Attributes:
        texts: those that are not over, in the order in which they were added.
    """

    def __init__(self, choose: Callable[[Sequence[AnyText]], Sequence[AnyText]] = first_come):
        self.texts: list[AnyText] = []
        self._choose = choose
        self._begun: AnyText | None = None  # whose prompt is being computed

    def add(self, text: AnyText) -> None:
        """Adds a text that has not begun, or whose prompt was paused."""
        self.texts.append(text)

    def step(self) -> list[Event[AnyText]]:
        """Does a piece of the prompt that is due, or one row of the answers that are. A prompt's last piece also gives
        the first token. An error ends the text; one of the device ends all that were being computed.
        """
        due = self._choose(self.texts)
        if due and due[0].is_in_prompt:
            return self.piece(due[0])
        return self.rows(due)

    def piece(self, text: AnyText) -> list[Event[AnyText]]:
        """A piece of a prompt, and after the last one the first token."""
        if self._begun is not text:
            self.pause()
        self._begun = text
        try:
            done = text.advance_prompt()
        except Left:
            return self._told([])
        except BaseException as error:
            return self._failed([text], error)
        return self._told([Event(text, done)]) if done is not None else self.rows([text])

    def pause(self) -> None:
        """Pauses the prompt that is being computed, so that another text can begin from its session."""
        if self._begun is not None:
            self._begun.pause()

    def rows(self, texts: Sequence[AnyText]) -> list[Event[AnyText]]:
        """The next token of texts that answer, at most `MAX_ROWS`."""
        shared = {text: text.decoding for text in texts if text.shares_steps and text.decoding is not None}
        try:
            outcomes = dict(zip(shared, advance_together(list(shared.values())), strict=True))
            return self._told([text.take(outcomes.get(text) or text.advance_alone()) for text in texts])
        except BaseException as error:
            # After an error of the device, MLX may regard arrays of a prompt as computed that were never written.
            beside = [self._begun] if self._begun is not None and isinstance(error, DeviceError) else []
            return self._failed([*texts, *beside], error)

    def _failed(self, texts: Sequence[AnyText], error: BaseException) -> list[Event[AnyText]]:
        """Ends texts with an error; raises an interrupt."""
        running = [text for text in dict.fromkeys(texts) if not text.is_over]
        for text in running:
            text.end(error)
        events = self._told([])
        if not isinstance(error, Exception):
            raise error
        return events + [Event(text, finish_reason="error", error=error) for text in running]

    def _told(self, events: list[Event[AnyText]]) -> list[Event[AnyText]]:
        self.texts = [text for text in self.texts if not text.is_over]
        if self._begun is not None and not self._begun.is_in_prompt:
            self._begun = None
        return events

    def remove(self, text: AnyText) -> None:
        """Ends a text."""
        text.end()
        self._told([])

    def close(self) -> None:
        """Ends all texts."""
        for text in list(self.texts):
            self.remove(text)


def advance_together(decodings: Sequence[Decoding]) -> list[Outcome]:
    """Returns each decoding's next token with its logprobs [vocab_size] float32, or the error that ends it.

    The decodings that share a step may change from call to call without changing a bit of any result. If the GPU can
    continue without the host, and no logits processor needs the tokens first, the next step begins before these tokens
    have arrived; closing a decoding then takes back its row of that step. A step of one decoding may check drafts.

    If a step fails because experts cannot be read or a row is refused, each row is computed by itself, so only the
    decodings whose rows are affected fail.

    Args:
        decodings: at most `MAX_ROWS`, all of one model, each with its own cache and none of them done.

    Raises:
        RequestError: the decodings cannot share a step; nothing has changed.
        DeviceError: memory is exhausted or the GPU timed out. Like an interrupt, this ends all decodings.
    """
    _check(decodings)
    begun = time.perf_counter()
    failed = _step([one for one in decodings if one.needs_row])
    chosen = [failed[one] if one in failed else attempt(one.hand_out) for one in decodings]
    ahead = [one for one, own in zip(decodings, chosen, strict=True) if isinstance(own, tuple) and not one.is_done]
    if ahead and all(one.may_run_ahead for one in ahead):
        failed = _step(ahead, ahead=True)
        chosen = [failed.get(one, own) for one, own in zip(decodings, chosen, strict=True)]
    with within_limits():
        mx.eval([arrays for arrays in chosen if isinstance(arrays, tuple)])
    outcomes = [
        attempt(partial(one.known, arrays)) if isinstance(arrays, tuple) else arrays
        for one, arrays in zip(decodings, chosen, strict=True)
    ]
    if len(decodings) == 1:
        decodings[0].count_seconds(time.perf_counter() - begun)
    return outcomes


def _check(decodings: Sequence[Decoding]) -> None:
    if len(decodings) > MAX_ROWS:
        raise RequestError(f"{len(decodings)} decodings in a step; at most {MAX_ROWS}: advance them in parts")
    layers = [id(layer) for one in decodings for layer in one.cache]
    if len(set(layers)) < len(layers):
        raise RequestError("a cache is in two decodings of a step; give each one of its own (model.make_cache())")
    if len({id(one.model) for one in decodings}) > 1:
        raise RequestError("the decodings of a step have different models; advance those of each model separately")


def _step(decodings: Sequence[Decoding], ahead: bool = False) -> dict[Decoding, Exception]:
    """Computes a row of each decoding, or the drafted rows of a single one, and begins to choose the tokens; returns
    the errors of those that failed. `ahead`: the host may not know the rows' tokens yet.
    """
    if not decodings:
        return {}
    model, drafts = decodings[0].model, cast("Proposed", ())
    try:
        if len(decodings) > 1 or ahead:
            rows = [one.rows for one in decodings]
        else:
            own, drafts = decodings[0].drafted_rows()
            rows = [own]
        step = model.step(rows)
    except (ExpertIOError, RequestError) as error:
        if ahead:
            return {}  # the error is raised again when these rows are needed
        if len(decodings) == 1:
            return {decodings[0]: error}
        return {one: failure for alone in decodings for one, failure in _step([alone]).items()}
    chosen = _chosen_together(decodings, step)
    takes = [
        partial(one.take_rows, step, i, drafts=drafts, ahead=ahead, chosen=own)
        for i, (one, own) in enumerate(zip(decodings, chosen, strict=True))
    ]
    taken = [attempt(take) for take in takes]
    return {one: error for one, error in zip(decodings, taken, strict=True) if error is not None}


def _chosen_together(decodings: Sequence[Decoding], step: Step) -> Sequence[ChosenToken | None]:
    """The next tokens of several decodings that all take the likeliest, else None for each."""
    if len(decodings) > 1 and all(one.takes_likeliest for one in decodings):
        with within_limits():
            return choose_likeliest(step.logits)
    return [None] * len(decodings)


def attempt(act: Callable[[], Made]) -> Made | Exception:
    """Returns the result of `act`, or its error. A DeviceError is raised, because it affects all decodings."""
    try:
        with within_limits():
            return act()
    except DeviceError:
        raise
    except Exception as error:
        return error
