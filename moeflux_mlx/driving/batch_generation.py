"""Generates many texts at once, with mlx-lm's interface. Texts may join and leave, and each has the bits that it has
alone.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import mlx.core as mx

from ..caches.layer_cache import LayerCache
from ..errors import DeviceError, RequestError
from ..foreign import BATCHES, public
from ..model.decoder import Model
from ..model.step import MAX_ROWS
from ..text.tokenizer import TokenizerWrapper
from .generation import check_max_tokens, encoded
from .loop import Event, Loop, Text
from .prompt import checked_prompt
from .sampling import LogitsProcessor, Sampler

if TYPE_CHECKING:
    from typing_extensions import Unpack

SEQUENCES = 8  # texts that decode together by default


@dataclass
class BatchStats:
    """Counts of tokens and seconds of computation. `peak_memory` is that of MLX's allocations, in GB (1e9 bytes)."""

    prompt_tokens: int = 0
    prompt_time: float = 0.0
    generation_tokens: int = 0
    generation_time: float = 0.0
    peak_memory: float = 0.0

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_time if self.prompt_time else 0.0

    @property
    def generation_tps(self) -> float:
        return self.generation_tokens / self.generation_time if self.generation_time else 0.0


@dataclass(frozen=True)
class BatchToken:
    """A token of one text.

    Args:
        uid: the text's number.
        token: the id; None if there is an `error` instead.
        logprobs: [vocab_size] float32.
        finish_reason: "stop", "length" or "error" if the text has ended, else None.
        prompt_cache: with the last token, the text's cache, which has absorbed all tokens but the last.
        all_tokens: with the last token, all generated tokens.
        error: the error that ended this text; the others continue.
    """

    uid: int
    token: int | None
    logprobs: mx.array | None
    finish_reason: str | None = None
    prompt_cache: list[LayerCache] | None = None
    all_tokens: list[int] | None = None
    error: Exception | None = None


@dataclass
class BatchResponse:
    """The result of `batch_generate`: lists in the order of the prompts, or None for what was not requested."""

    texts: list[str]
    stats: BatchStats
    caches: list[list[LayerCache]] | None = None
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class _NumberedText(Text):
    uid: int


class BatchGenerator:
    """Decodes several texts together; others wait until there is room. A text can be removed at any time.

    A prompt is computed by itself, between two steps of the decoding texts, and shares no span with another prompt. A
    text does not depend on the others, provided that it has its own sampler and processors.

    Args:
        model: computes them.
        max_tokens: default limit per text; -1 means no limit.
        stop_tokens: sequences of tokens; a text ends after any of them.
        sampler, logits_processors: defaults for texts that `insert` gives none, as in `generate_step`.
        completion_batch_size: number of texts that decode together, at most `MAX_ROWS`.
        prefill_step_size, span: as in `generate_step`.

    Attributes:
        stats: counts so far.

    Raises:
        RequestError: a number is out of range.
    """

    @public(replaced=BATCHES)
    def __init__(
        self,
        model: Model,
        *,
        max_tokens: int = 128,
        stop_tokens: Iterable[Sequence[int]] | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        completion_batch_size: int = SEQUENCES,
        prefill_step_size: int | None = None,
        span: int | None = None,
    ):
        if not 1 <= completion_batch_size <= MAX_ROWS:
            raise RequestError(f"completion_batch_size is {completion_batch_size}; it must be 1 to {MAX_ROWS}")
        check_max_tokens(max_tokens)
        self.model, self.max_tokens, self.size = model, max_tokens, completion_batch_size
        self.stop_tokens = [list(tokens) for tokens in stop_tokens or ()]
        self.sampler, self.logits_processors = sampler, logits_processors
        self._cut: dict[str, Any] = {"span": span, "prefill_step_size": prefill_step_size}
        self.stats = BatchStats()
        self._loop, self._waiting = Loop[_NumberedText](), deque[_NumberedText]()
        self._numbers = itertools.count()

    def insert(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int] | None = None,
        caches: Sequence[list[LayerCache]] | None = None,
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: Sequence[Sequence[LogitsProcessor]] | None = None,
    ) -> list[int]:
        """Queues texts and returns their numbers. Each argument has an entry for each prompt.

        Args:
            prompts: token ids.
            caches: what has gone before each prompt; they stay as they are.

        Raises:
            RequestError: as `generate_step`, or lists of different lengths; no text is queued.
        """
        count = len(prompts)
        columns: list[Sequence[Any]] = [
            [self.max_tokens] * count if max_tokens is None else max_tokens,
            [None] * count if caches is None else caches,
            [self.sampler] * count if samplers is None else samplers,
            [self.logits_processors] * count if logits_processors is None else logits_processors,
        ]
        if any(len(column) != count for column in columns):
            raise RequestError(
                f"{count} prompts, but an argument's list has another length; give each list one entry per prompt"
            )
        texts = [self._text(*row) for row in zip(prompts, *columns, strict=True)]
        for text in texts:
            text.uid = next(self._numbers)
        self._waiting.extend(texts)
        return [text.uid for text in texts]

    def _text(self, prompt: Sequence[int], most: int, cache: Any, sampler: Any, processors: Any) -> "_NumberedText":
        check_max_tokens(most)
        choice = {**self._cut, "sampler": sampler or self.sampler, "logits_processors": processors}
        given = self.model, self._own(cache), checked_prompt(prompt, self.model)
        return _NumberedText(*given, max_tokens=most, is_end=self._is_end, **choice)

    def _is_end(self, tokens: list[int]) -> bool:
        return any(tokens[-len(stop) :] == stop for stop in self.stop_tokens if stop)

    def _own(self, cache: list[LayerCache] | None) -> list[LayerCache]:
        """A copy of `cache` that nobody else writes to."""
        made = self.model.make_cache()
        if cache is not None:
            self.model.check_cache(cache)
            for new, old in zip(made, cache, strict=True):
                new.take_from(old, old.offset, old.kept())
        return made

    def next(self) -> list[BatchToken]:
        """Returns the next token of each decoding text. First computes one waiting prompt, if there is room. An empty
        list means that nothing is left to do.

        Raises:
            DeviceError: memory is exhausted or the GPU timed out. Like an interrupt, this ends all decoding texts.
        """
        texts = list(self._loop.texts)
        told = self._admit() if self._waiting and len(texts) < self.size else []
        with self._timed("generation_time"):
            told += self._loop.rows([text for text in texts if not text.is_over])
        for event in told:
            if isinstance(event.error, DeviceError):
                raise event.error
        return [self._token(event) for event in told]

    def __iter__(self) -> Iterator[list[BatchToken]]:
        """Yields the results of `next` until nothing is left to do; texts may be inserted and removed meanwhile."""
        while self._waiting or self._loop.texts:
            yield self.next()

    def remove(self, uids: Iterable[int]) -> dict[int, list[LayerCache]]:
        """Removes texts and returns the caches of those that have begun; the caches have absorbed all tokens but the
        last.
        """
        gone = set(uids)
        self._waiting = deque(text for text in self._waiting if text.uid not in gone)
        removed = [text for text in self._loop.texts if text.uid in gone]
        for text in removed:
            with suppress(DeviceError):
                self._loop.remove(text)
        return {text.uid: text.cache for text in removed}

    def close(self) -> None:
        """Removes all texts."""
        self.remove([text.uid for text in [*self._waiting, *self._loop.texts]])

    def _admit(self) -> list[Event[_NumberedText]]:
        """Computes the prompt of the text that has waited longest; returns its first token, or its error."""
        text = self._waiting.popleft()
        self._loop.add(text)
        events = list[Event[_NumberedText]]()
        with self._timed("prompt_time"):
            while not events or text.is_in_prompt:
                events = self._loop.piece(text)
        if events[-1].error is None:
            self.stats.prompt_tokens += len(text.prompt)
        return events

    def _token(self, event: Event[_NumberedText]) -> BatchToken:
        text, reason = event.text, event.finish_reason
        self.stats.generation_tokens += event.error is None
        cache, tokens = (text.cache, text.tokens) if reason else (None, None)
        return BatchToken(text.uid, event.token, event.logprobs, reason, cache, tokens, event.error)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - start)
            self.stats.peak_memory = mx.get_peak_memory() / 1e9


class BatchOptions(TypedDict, total=False):
    """The keywords of `BatchGenerator` that `batch_generate` passes on."""

    stop_tokens: Iterable[Sequence[int]] | None
    sampler: Sampler | None
    completion_batch_size: int
    prefill_step_size: int | None
    span: int | None


@public(BatchGenerator, replaced=BATCHES)
def batch_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[str | Sequence[int]],
    prompt_caches: Sequence[list[LayerCache]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    samplers: Sequence[Sampler | None] | None = None,
    logits_processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] = (),
    **options: "Unpack[BatchOptions]",
) -> BatchResponse:
    """Continues several prompts together. Each result equals that of `generate` for the prompt alone.

    Args:
        prompts: text (encoded as by `generate`) or token ids of each.
        prompt_caches: the state before each prompt; they are not changed.
        max_tokens: of each text, or of all.
        verbose: whether to print the number of finished texts and the rates.
        return_prompt_caches: whether the response has the caches afterwards.
        return_token_ids: whether the response has the tokens, without the one that ended the text.
        return_logprobs: whether the response has the log-probability of each of these tokens.
        samplers: one for each prompt.
        logits_processors: for all prompts, or a list for each prompt.
        stop_tokens: sequences of tokens; a text ends after any of them. By default the tokenizer's end-of-text tokens.
        sampler, completion_batch_size, prefill_step_size, span: as `BatchGenerator`.

    Raises:
        RequestError: as `BatchGenerator`, or `prompts` is one text. The first error that ends a text is raised too.
        TypeError: there is no such argument.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is one text; give a list of texts")
    options.setdefault("stop_tokens", [[token] for token in tokenizer.eos_token_ids])
    are_for_all = all(map(callable, logits_processors))
    of_each = cast(Any, [logits_processors] * len(prompts) if are_for_all else logits_processors)
    generator = BatchGenerator(model, **options)
    tokens_of = [encoded(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    uids = generator.insert(tokens_of, most, prompt_caches, samplers, of_each)
    tokens: dict[int, list[tuple[int, float]]] = {uid: [] for uid in uids}
    caches: dict[int, list[LayerCache]] = {}
    for told in generator:
        for one in told:
            if one.error is not None:
                raise one.error
            if one.prompt_cache is not None:
                caches[one.uid] = one.prompt_cache
                if verbose:
                    print(f"{len(caches)} of {len(prompts)} texts", end="\r", flush=True)
            if one.finish_reason != "stop" and one.token is not None and one.logprobs is not None:
                chance = cast(float, one.logprobs[one.token].item()) if return_logprobs else 0.0
                tokens[one.uid].append((one.token, chance))
    if verbose:
        stats = generator.stats
        print(f"{stats.prompt_tokens} prompt tokens, {stats.prompt_tps:.1f} a second")
        print(f"{stats.generation_tokens} tokens, {stats.generation_tps:.1f} a second")
    ids = [[token for token, _ in tokens[uid]] for uid in uids]
    return BatchResponse(
        [tokenizer.decode(one) for one in ids],
        generator.stats,
        [caches[uid] for uid in uids] if return_prompt_caches else None,
        ids if return_token_ids else None,
        [[chance for _, chance in tokens[uid]] for uid in uids] if return_logprobs else None,
    )
