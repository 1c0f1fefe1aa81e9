"""Cuts a prompt into spans, keeps states at chosen positions, and can stop in the middle of a span.

It knows only tokens and caches. The session decides what is reused and which states are kept.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache
from ..errors import RequestError
from ..model.decoder import Model
from ..model.images import NO_IMAGES, Images
from ..model.span import Span
from ..ops.limits import within_limits
from .drafts import HeadDrafts


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
        logits: [1, vocab_size] after the last of them; None at first.
        kept: for each position of `keep` that was reached, the states of the layers that cannot be cut.
        half: the half-done span, if the work was left.

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
        self.logits: mx.array | None = None
        self.kept: dict[int, dict[int, Arrays]] = {}

    def spans(self) -> Iterator[Span]:
        """The spans of the rest of the prompt, each to be taken through the model and given to `take`."""
        for layer in self.cache:
            layer.expect(len(self.tokens) - self.done)
        for i, length in enumerate(self._lengths()):
            if i:
                mx.clear_cache()  # the last span's temporaries have other sizes
            self.half = self.half or self._span(length)
            yield self.half
        for _, image in self.images.placed:
            image.forget()

    @within_limits()
    def take(self, span: Span, logits: mx.array) -> None:
        """Notes that the model has absorbed the span, with the logits [1, vocab_size] after its last token."""
        mx.eval([layer.state for layer in self.cache])
        self.kept |= {self.done + end: states for end, states in span.kept.items()}
        self.done, self.half, self.logits = self.done + span.length, None, logits
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
