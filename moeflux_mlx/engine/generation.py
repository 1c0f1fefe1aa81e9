"""The generation loop: tokens in, text out. It knows a model only by its steps and its cache."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError, RequestError
from ..experts.source import LoaderStats
from ..model.decoder import Model
from ..model.step import SequenceRows
from ..model.tokens import token_ids
from ..ops.elementwise import log_softmax
from ..ops.limits import within_limits
from ..spec import ModelArgs
from ..state.cache import Cache, KVCache
from ..text.tokenizer import TokenizerWrapper
from .prefill import Prefill, Progress
from .sampling import LogitsProcessor, Sampler, make_sampler


@dataclass
class GenerationResponse:
    """One step of `stream_generate`.

    `text` is what this step adds; `logprobs` [vocab_size]; rates in tokens per second; `peak_memory` in
    GB (1e9 bytes) of MLX's allocations. The last response has `finish_reason` "stop" or "length".
    The figures of expert I/O are those of the tokens after the first: the share of experts that were in
    memory, bytes read for a token, GB/s while the drive was reading, seconds that computing waited; all 0
    when experts are mapped.
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


def make_prompt_cache(model: Model) -> list[Cache]:
    """An empty cache for `model`, to be given to several calls in turn."""
    return model.make_cache()


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: Model,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_cache: list[Cache] | None = None,
    prefill_step_size: int | None = None,
    span: int | None = None,
    prompt_progress_callback: Progress | None = None,
    logits: mx.array | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yields (token, logprobs [vocab_size] float32), without end when `max_tokens` is -1.

    Once it is closed, `prompt_cache` holds the prompt and what was yielded, but for the last token. An exception while
    the prompt is computed leaves `prompt_cache` with whole spans of it, or none.

    Args:
        prompt: token ids.
        sampler: logprobs [1, V] -> token [1]; None takes the most likely.
        logits_processors: (tokens so far, logits [1, V]) -> logits.
        prompt_cache: continues after what it has seen, and is updated.
        prefill_step_size: prompt tokens that attention or a recurrent mixer handles at once, at most; None, or more
            than was planned for the model, means what was planned. It does not bound how many go through the experts
            together: `span` does.
        span: prompt tokens that go through the model together, at most, so that each expert is read once for all of
            them; None, or more than was planned for the model, means what was planned.
        prompt_progress_callback: called with (tokens' worth of work that is done, tokens in all), ascending; both are
            equal once, at the end. It is for display only, and may raise to stop.
        logits: [1, vocab_size] after the last token of `prompt`, if `prompt_cache` has absorbed all of it already.

    Raises:
        RequestError: an empty prompt, a token count out of range, or caches that are not this model's.
        ModelFileError: the logits are NaN, which damaged weights cause.
        DeviceError: memory or the GPU's time is at an end; the cache may hold anything.
    """
    tokens = checked_prompt(prompt, model)
    check_max_tokens(max_tokens)
    if prompt_cache is not None:
        model.check_cache(prompt_cache)
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    report = prompt_progress_callback or (lambda done, total: None)
    if logits is None:
        prefill = Prefill(model, cache, tokens, span=span, block=prefill_step_size)
        try:
            logits = prefill.run(report)
        except BaseException:
            prefill.drop()
            raise
    step = _Step(model, cache, sampler or make_sampler(), logits_processors)
    with within_limits(), closing(_chosen(step, tokens, logits, max_tokens)) as chosen:
        for n, (token, logprobs) in enumerate(chosen, start=1):
            if n == 1:
                report(len(tokens), len(tokens))
            yield token, logprobs
            if n == 1 or n % KVCache.step == 0:
                mx.clear_cache()  # a prompt's temporaries, or caches that have grown: they fit no later request


def _chosen(
    step: "_Step", tokens: mx.array, logits: mx.array, max_tokens: int
) -> Generator[tuple[int, mx.array], None, None]:
    """Tokens one after the other, as `generate_step` yields them.

    Where the GPU can go on without the host, it is given the next token's work before this token is waited for. When
    the iterator is closed, the caches are taken back to what they hold without that work.
    """
    chosen, produced, before = step(tokens, logits), 0, None
    try:
        while True:
            mx.async_eval(chosen)
            produced += 1
            following = None
            if step.runs_ahead and produced != max_tokens:
                before = step.cache[0].offset
                following = step(chosen[0].astype(mx.uint32), None)
                mx.async_eval(following)
            token, logprobs, is_broken = chosen
            mx.eval(chosen)
            if is_broken.item():
                raise ModelFileError("the model's logits are NaN: a weight is damaged; run convert again with --verify")
            yield cast(int, token.item()), logprobs
            if produced == max_tokens:
                return
            before = None
            chosen = following or step(token.astype(mx.uint32), None)
    finally:
        for layer in step.cache:
            if before is not None and layer.offset != before:  # an interrupted step has taken itself back
                layer.rewind(0)
            layer.forget_rows()


class _Step:
    """Chooses a token: chunk [L] in with its logits, or [1] for the model; the next token [1], its logprobs, and
    whether these are NaN out.

    Attributes:
        runs_ahead: whether the next step can be begun before this one's token is known here.
    """

    def __init__(self, model: Model, cache: list[Cache], sampler: Sampler, processors: Sequence[LogitsProcessor]):
        self.model, self.cache, self.sampler, self.processors = model, cache, sampler, processors
        self.seen = mx.array([], mx.uint32)  # what the processors look at; kept only when there are any
        self.runs_ahead = model.decode_step is not None and not processors

    def __call__(self, chunk: mx.array, logits: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
        """`logits` [1, vocab_size] are those after `chunk`, if they are known; the logprobs are [vocab_size]."""
        if logits is None:
            logits = self.model.step([SequenceRows(self.cache, chunk)]).logits
        logits = logits.astype(mx.float32)
        if self.processors:
            self.seen = mx.concatenate([self.seen, chunk])
            for process in self.processors:
                logits = process(self.seen, logits)
        logprobs = log_softmax(logits)
        return self.sampler(logprobs), logprobs[0], mx.isnan(logprobs[0, :1])


def stream_generate(
    model: Model,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    **kwargs: Any,
) -> Responses:
    """Generates text piece by piece until an end-of-text token or `max_tokens`.

    Args:
        prompt: text (encoded as it is, with the tokenizer's special tokens unless it begins with them)
            or token ids.
        kwargs: as `generate_step`.

    Raises:
        RequestError, ModelFileError: as `generate_step`.
    """
    if isinstance(prompt, str):
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not has_bos)
    prompt = checked_prompt(prompt, model)
    detokenizer = tokenizer.detokenizer
    clock, meter = _Clock(len(prompt)), _ExpertMeter(model)
    finish_reason = None
    with closing(generate_step(prompt, model, max_tokens=max_tokens, **kwargs)) as steps:
        for n, (token, logprobs) in enumerate(steps, start=1):
            clock.tick()
            if token in tokenizer.eos_token_ids:
                finish_reason = "stop"
            else:
                detokenizer.add_token(token)
                finish_reason = "length" if n == max_tokens else None
            if finish_reason:
                steps.close()  # the caches then hold what has been reported
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=False,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish_reason,
                **clock.rates(),
                **meter.figures(n),
            )


def generate(
    model: Model, tokenizer: TokenizerWrapper, prompt: str | Sequence[int], verbose: bool = False, **kwargs: Any
) -> str:
    """The whole text of `stream_generate`; `verbose` also prints it as it comes, and the rates."""
    text = ""
    with closing(stream_generate(model, tokenizer, prompt, **kwargs)) as responses:
        for response in responses:
            text += response.text
            if verbose:
                print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{response.prompt_tokens} prompt tokens, {response.prompt_tps:.1f} a second")
        print(f"{response.generation_tokens} tokens, {response.generation_tps:.1f} a second")
    return text


def within_limit(args: ModelArgs, prompt_tokens: int, max_tokens: int) -> int:
    """`max_tokens`, or what the model takes after the prompt if that is less; at least 1."""
    room = max(args.max_position_embeddings - prompt_tokens, 1)
    return room if max_tokens == -1 else min(max_tokens, room)


def check_max_tokens(max_tokens: int) -> None:
    """Raises RequestError: it is neither a positive integer nor -1."""
    if not isinstance(max_tokens, (int, np.integer)) or max_tokens == 0 or max_tokens < -1:
        raise RequestError(f"max_tokens is {max_tokens!r}; it must be a positive integer, or -1 for no limit")


def checked_prompt(prompt: Sequence[int] | np.ndarray | mx.array, model: Model) -> mx.array:
    """Token ids as uint32 [N].

    Raises:
        RequestError: there are none, they are no integers, or one is outside the vocabulary. ExpertIOError: this
            process was forked after `model` was loaded.
    """
    model.check_process()  # in a forked child a GPU's arrays cannot even be made
    return token_ids(prompt, model.args.vocab_size, "the prompt")


class _Clock:
    """Prompt and generation rates: the prompt's time ends with the first token."""

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens, self.tokens = prompt_tokens, 0
        self.start = self.first = self.last = time.perf_counter()

    def tick(self) -> None:
        self.tokens += 1
        self.last = time.perf_counter()
        if self.tokens == 1:
            self.first = self.last

    def rates(self) -> dict[str, Any]:
        generating = self.last - self.first
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tps": self.prompt_tokens / max(self.first - self.start, 1e-9),
            "generation_tokens": self.tokens,
            "generation_tps": (self.tokens - 1) / generating if self.tokens > 1 else 0.0,
        }


class _ExpertMeter:
    """Expert I/O of the tokens after the first."""

    def __init__(self, model: Model):
        self.experts = getattr(model, "experts", None)
        self.before: LoaderStats | None = None

    def figures(self, tokens: int) -> dict[str, Any]:
        """Call after each token; `tokens` is how many there have been."""
        if self.experts is None or self.before is None:
            self.before = None if self.experts is None else replace(self.experts.stats)
            return {}
        since = self.experts.stats.since(self.before)
        return {
            "expert_hit_rate": since.hit_rate,
            "expert_bytes_per_token": since.bytes_read / (tokens - 1),
            "expert_gb_per_second": since.gb_per_second,
            "expert_wait_seconds": since.wait_seconds,
        }
