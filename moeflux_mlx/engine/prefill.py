"""Computes a prompt span by span, keeps states at chosen positions, and can stop in the middle of a span.

It knows only tokens and caches. The session decides what is reused and which states are kept.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache
from ..errors import RequestError
from ..model.decoder import Model
from ..model.images import NO_IMAGES, Images
from ..model.span import Span
from ..ops.limits import within_limits
from .head_drafts import HeadDrafts

Progress = Callable[[int, int], object]


def span_lengths(tokens: int, span: int) -> list[int]:
    """The lengths of a prompt's spans: as few as possible, at most `span` each, and about equal."""
    count = -(-tokens // span)
    return [tokens // count + (i < tokens % count) for i in range(count)]


class Prefill:
    """Brings a prompt into a model's caches.

    Args:
        model: computes it.
        cache: absorbs the prompt after its current contents.
        tokens: [N] uint32 of the prompt, at least one.
        span: the most tokens that go through the model together; None, or more than planned for the model, means the
            planned number.
        block: the most tokens of a span that a mixer handles at once; None as for `span`.
        keep: numbers of tokens after which the states of layers that cannot be cut are kept.
        half: a half-done span of an earlier call; the prompt begins with it.
        drafts: the state of a draft head, which gets the hidden states of each span.
        images: the text's images, placed by position in the caches.

    Attributes:
        done: tokens that every cache has absorbed.
        kept: for each position of `keep` that was reached, the states of the layers that cannot be cut.
        half: the half-done span, if the work was stopped.

    Raises:
        RequestError: a size is not positive.
    """

    def __init__(
        self,
        model: Model,
        cache: list[LayerCache],
        tokens: mx.array,
        *,
        span: int | None = None,
        block: int | None = None,
        keep: Sequence[int] = (),
        half: Span | None = None,
        drafts: HeadDrafts | None = None,
        images: Images = NO_IMAGES,
    ):
        for name, value in (("span", span), ("prefill_step_size", block)):
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; it must be positive")
        self.model, self.cache, self.tokens, self.half = model, cache, tokens, half
        self.span = model.sizes.span if span is None else min(span, model.sizes.span)
        self.block = model.sizes.block if block is None else min(block, model.sizes.block)
        self.keep, self.drafts, self.images = sorted(keep), drafts, images
        self.done = 0
        self._logits: mx.array | None = None
        self.kept: dict[int, dict[int, Arrays]] = {}

    @within_limits()
    def run(self, progress: Progress = lambda done, total: None) -> mx.array:
        """Computes the rest of the prompt and returns the logits [1, vocab_size] after its last token.

        Args:
            progress: called with (work done in tokens, number of tokens), ascending, the first always less. An
                exception from it stops the work within a block of a mixer or a wave of experts; `run` can be called
                again.

        Raises:
            ExpertIOError, DeviceError: as calling the model does.
        """
        progress(self.done, len(self.tokens))
        for layer in self.cache:
            layer.expect(len(self.tokens) - self.done)
        for i, length in enumerate(self._lengths()):
            if i:
                mx.clear_cache()  # the last span's temporaries have other sizes
            self._pass(self.half or self._span(length), progress)
        assert self._logits is not None  # a prompt has a token
        for _, image in self.images.placed:
            image.forget()
        return self._logits

    def _pass(self, span: Span, progress: Progress) -> None:
        at, total = self.done, len(self.tokens)
        self.half = span

        def report(share: float) -> None:
            progress(min(at + int(span.length * share), total - 1), total)

        self._logits = self.model.advance(span, self.cache, report)
        mx.eval([layer.state for layer in self.cache])
        self.kept |= {at + end: states for end, states in span.kept.items()}
        self.done, self.half = at + span.length, None
        if self.drafts is not None:
            self.drafts.absorb_span(span)

    def drop(self) -> None:
        """Takes the caches back to the end of the last whole span."""
        if self.half is not None:
            self.half.drop(self.cache)
            self.half = None

    def _lengths(self) -> list[int]:
        rest = len(self.tokens) - self.done
        if self.half is None:
            return span_lengths(rest, self.span) if rest else []
        after = rest - self.half.length
        return [self.half.length, *(span_lengths(after, self.span) if after else [])]

    def _span(self, length: int) -> Span:
        start, end = self.done, self.done + length
        keep = [n - start for n in self.keep if start < n <= end]
        return Span(self.tokens[start:end][None], self.cache[0].offset, self.block, keep, self.images)
