"""Generation without a session: a prompt in, tokens or text out."""

import inspect
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import LayerCache
from ..errors import RequestError
from ..experts.stats import LoaderStats
from ..foreign import COMPUTING, GENERATION, Replaced, public
from ..model.decoder import Model
from ..model.images import ImageSource
from ..spec import ModelArgs
from ..text.tokenizer import TokenizerWrapper
from .loop import AnyText, Event, Loop, Progress, Text
from .prompt import checked_prompt, prompt_with_images
from .sampling import LogitsProcessor, Sampler, make_logits_processors, make_sampler

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class GenerationResponse:
    """One step of `stream_generate`.

    `text` is the text that this step adds; `logprobs` is [vocab_size]; `from_draft` says whether the token was an
    accepted draft (`draft` of `load`); rates are in tokens per second; `peak_memory` is that of MLX's allocations, in
    GB (1e9 bytes). The last response has `finish_reason` "stop" or "length". The figures of expert I/O cover the tokens
    after the first: the share of requested experts that were in memory, bytes read per token, GB/s while the drive was
    reading, and seconds that the computation waited. All are 0 if experts are mapped.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    expert_hit_rate: float = 0.0
    expert_bytes_per_token: float = 0.0
    expert_gb_per_second: float = 0.0
    expert_wait_seconds: float = 0.0


Responses = Generator[GenerationResponse, None, None]


class SamplerOptions(TypedDict, total=False):
    """The keywords of `generate_step` that say how tokens are chosen."""

    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor]


class GenerationOptions(SamplerOptions, total=False):
    """The keywords of `generate_step` that `stream_generate` and `generate` pass on."""

    prompt_cache: list[LayerCache] | None
    prefill_step_size: int | None
    span: int | None
    prompt_progress_callback: Progress | None


# Settings of the sampler and of the logits processors are not arguments of `generate`.
SAMPLING = {"temperature": Replaced("give sampler=make_sampler(temp=...)", ...)} | {
    name: Replaced(f"give {argument}={make.__name__}({name}=...)", ...)
    for make, argument in ((make_sampler, "sampler"), (make_logits_processors, "logits_processors"))
    for name in inspect.signature(make).parameters
}


@public()
def make_prompt_cache(model: Model, max_kv_size: None = None) -> list[LayerCache]:
    """Returns the empty caches of a text for `model`, one or two per layer, to be given to several calls in turn.

    Args:
        max_kv_size: None; caches keep every position.

    Raises:
        RequestError: `max_kv_size` is not None.
    """
    if max_kv_size is not None:
        raise RequestError(f"max_kv_size is {max_kv_size}; {COMPUTING['max_kv_size'].remedy}")
    return model.make_cache()


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: Model,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_cache: list[LayerCache] | None = None,
    prefill_step_size: int | None = None,
    span: int | None = None,
    prompt_progress_callback: Progress | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yields (token, logprobs [vocab_size] float32), without end when `max_tokens` is -1.

    Once it is closed, `prompt_cache` holds the prompt and what was yielded, but for the last token. An exception while
    the prompt is computed leaves `prompt_cache` with whole spans of it, or none.

    Args:
        prompt: token ids.
        sampler: logprobs [1, V] -> token [1]; None takes the most likely.
        logits_processors: (tokens so far, logits [1, V]) -> logits.
        prompt_cache: the state to continue from; it is updated.
        prefill_step_size: the most prompt tokens that attention or a recurrent mixer handles at once; None, or more
            than planned for the model, means the planned size. The number of tokens that go through the experts
            together is set by `span`.
        span: the most prompt tokens that go through the model together, so that each expert is read once for all of
            them; None, or more than planned for the model, means the planned size.
        prompt_progress_callback: called with (work done in tokens, number of tokens), ascending; the two are equal only
            at the end. It is for display, and may raise an exception to stop.

    Raises:
        RequestError: an empty prompt, a token count out of range, or caches that are not this model's.
        ModelFileError: the logits are NaN, which damaged weights cause.
        DeviceError: memory is exhausted or the GPU timed out; the state of the cache is then undefined.
    """
    text = _text(
        prompt,
        model,
        max_tokens=max_tokens,
        prompt_cache=prompt_cache,
        span=span,
        prefill_step_size=prefill_step_size,
        sampler=sampler,
        logits_processors=logits_processors,
    )
    with closing(_tokens(text, prompt_progress_callback)) as events:
        for event in events:
            assert event.token is not None
            yield event.token, event.logprobs


def _text(
    prompt: Sequence[int] | mx.array,
    model: Model,
    *,
    max_tokens: int = 256,
    prompt_cache: list[LayerCache] | None = None,
    **options: Any,
) -> Text:
    """The text of a call, for a `Loop`."""
    prompt = checked_prompt(prompt, model)
    check_max_tokens(max_tokens)
    if prompt_cache is not None:
        model.check_cache(prompt_cache)
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    return Text(model, cache, prompt, max_tokens=max_tokens, **options)


def _tokens(text: Text, report: Progress | None) -> Generator[Event[Text], None, None]:
    """Computes a text by itself; yields the event of each token, and raises the error that ends it."""
    loop, total = Loop[Text](), len(text.prompt)
    loop.add(text)
    with closing(loop):
        while loop.texts:
            for event in loop.step():
                if event.error is not None:
                    raise event.error
                if report is not None and len(text.tokens) < 2:
                    report(event.done, total)
                if event.token is not None:
                    yield event


def respond(text: Text, responder: "Responder", report: Progress | None) -> Responses:
    """The responses of a text that is computed by itself."""
    with closing(_tokens(text, report)) as events:
        for event in events:
            yield responder.response(event)


@public(generate_step, replaced=SAMPLING | GENERATION)
def stream_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    image: ImageSource | Sequence[ImageSource] | None = None,
    **options: "Unpack[GenerationOptions]",
) -> Responses:
    """Generates text piece by piece until an end-of-text token or `max_tokens`.

    Args:
        prompt: text (encoded without a template; the tokenizer's special tokens are added unless it begins with them)
            or token ids.
        max_tokens: limit of the answer; -1 means no limit.
        image: one image or a list of them, each a path, a `data:` URL, bytes or a picture of Pillow's; in order, they
            replace the image tokens that a chat template has written.
        sampler: logprobs [1, V] -> token [1], from `make_sampler`; None takes the most likely token.
        logits_processors: (tokens so far, logits [1, V]) -> logits [1, V], from `make_logits_processors`.
        prompt_cache: the state to continue from, from `make_prompt_cache`; it is updated.
        prefill_step_size: the most prompt tokens that attention or a recurrent mixer handles at once; None means the
            size that was planned for the model.
        span: the most prompt tokens that go through the model together, so that each expert is read once for all of
            them; None means the size that was planned for the model.
        prompt_progress_callback: called with (tokens done, number of tokens) while the prompt is computed; an exception
            from it ends the call.

    Raises:
        RequestError: an empty prompt, a token count out of range, caches that are not this model's, an image that
            cannot be read, or a number of images that differs from the number of places in the prompt.
        ModelFileError: the logits are NaN, which damaged weights cause.
        DeviceError: memory is exhausted or the GPU timed out; the state of the cache is then undefined.
        TypeError: there is no such argument.
    """
    if isinstance(prompt, str):
        prompt = encoded(tokenizer, prompt)
    if image is not None:
        prompt = prompt_with_images(prompt, image, model)
    report, ends = options.pop("prompt_progress_callback", None), tokenizer.eos_token_ids
    text = _text(prompt, model, max_tokens=max_tokens, is_end=lambda tokens: tokens[-1] in ends, **options)
    yield from respond(text, Responder(model, tokenizer, len(text.prompt)), report)


def encoded(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """The tokens of a text without a template, after the beginning that the tokenizer adds unless it is there."""
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=not has_bos)


class Responder:
    """Makes the response of each token of an answer: the text that it adds, the finish reason, and the rates.

    Args:
        model: the source of the expert I/O figures.
        tokenizer: decodes the tokens.
        prompt_tokens: number of tokens of the whole prompt.

    Attributes:
        computed: number of prompt tokens that had to be computed, for the prompt's rate.
    """

    def __init__(self, model: Model, tokenizer: TokenizerWrapper, prompt_tokens: int):
        self.prompt_tokens = self.computed = prompt_tokens
        self._detokenizer = tokenizer.detokenizer
        self._experts, self._before = getattr(model, "experts", None), LoaderStats()  # after the first token
        self._tokens, self._start = 0, time.perf_counter()
        self._first = self._start

    @property
    def first_token_seconds(self) -> float:
        """Seconds from construction to the first token."""
        return self._first - self._start

    def response(self, event: Event[AnyText]) -> GenerationResponse:
        """Makes the response of the token that has just been chosen."""
        assert event.token is not None
        self._tokens += 1
        now = time.perf_counter()
        if self._tokens == 1:
            self._first, self._before = now, replace(self._experts.stats) if self._experts else LoaderStats()
        if event.finish_reason != "stop":
            self._detokenizer.add_token(event.token)
        if event.finish_reason:
            self._detokenizer.finalize()
        return GenerationResponse(
            text=self._detokenizer.last_segment,
            token=event.token,
            logprobs=event.logprobs,
            from_draft=event.from_draft,
            prompt_tokens=self.prompt_tokens,
            prompt_tps=self.computed / max(self.first_token_seconds, 1e-9),
            generation_tokens=self._tokens,
            generation_tps=(self._tokens - 1) / (now - self._first) if self._tokens > 1 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=event.finish_reason,
            **self._expert_figures(),
        )

    def _expert_figures(self) -> dict[str, Any]:
        """Expert I/O of the tokens after the first."""
        if self._experts is None or self._tokens == 1:
            return {}
        since = self._experts.stats.since(self._before)
        return {
            "expert_hit_rate": since.hit_rate,
            "expert_bytes_per_token": since.bytes_read / (self._tokens - 1),
            "expert_gb_per_second": since.gb_per_second,
            "expert_wait_seconds": since.wait_seconds,
        }


@public(stream_generate, replaced=SAMPLING | GENERATION)
def generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    verbose: bool = False,
    *,
    max_tokens: int = 256,
    image: ImageSource | Sequence[ImageSource] | None = None,
    **options: "Unpack[GenerationOptions]",
) -> str:
    """Generates text until an end-of-text token or `max_tokens`, and returns it.

    Args:
        verbose: whether to print the text as it is generated, and the rates.
        max_tokens, sampler, ...: arguments and errors are those of `stream_generate`.
    """
    text = ""
    with closing(stream_generate(model, tokenizer, prompt, max_tokens, image=image, **options)) as responses:
        for response in responses:
            text += response.text
            if verbose:
                print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{response.prompt_tokens} prompt tokens, {response.prompt_tps:.1f} a second")
        print(f"{response.generation_tokens} tokens, {response.generation_tps:.1f} a second")
    return text


def xtc_special_tokens(tokenizer: TokenizerWrapper) -> list[int]:
    """The tokens that XTC never drops in mlx-lm's server and commands: a line break, and those that end a text."""
    return [*tokenizer.encode("\n", add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]


def within_limit(args: ModelArgs, prompt_tokens: int, max_tokens: int) -> int:
    """`max_tokens`, or the room that the model has after the prompt if that is less; at least 1."""
    room = max(args.max_position_embeddings - prompt_tokens, 1)
    return room if max_tokens == -1 else min(max_tokens, room)


def check_max_tokens(max_tokens: int) -> None:
    """Raises RequestError: `max_tokens` is neither a positive integer nor -1."""
    if not isinstance(max_tokens, (int, np.integer)) or max_tokens == 0 or max_tokens < -1:
        raise RequestError(f"max_tokens is {max_tokens!r}; it must be a positive integer, or -1 for no limit")
