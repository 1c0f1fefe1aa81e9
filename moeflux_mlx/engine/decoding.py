"""The tokens of one answer, chosen one after the other. It knows a model only by its steps and its cache."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from ..errors import ModelFileError
from ..model.decoder import Model
from ..model.step import SequenceRows, Step
from ..ops.elementwise import log_softmax
from ..ops.limits import within_limits
from ..state.cache import Cache, KVCache
from .sampling import LogitsProcessor, Sampler, make_sampler

Chosen = tuple[mx.array, mx.array, mx.array]  # a token [1], its logprobs [vocab_size], and whether these are NaN [1]


class Decoding:
    """The tokens that follow a prompt.

    `advance` is `take` of the logits of `rows`, and a wait for the token that was chosen. Where the GPU can go on
    without the host, it is given the next token's work before this token is waited for.

    Args:
        model: computes the logits.
        cache: has absorbed the prompt, and absorbs each token once the next one is wanted.
        prompt: [N] uint32, what the processors look at before the tokens that are chosen.
        logits: [1, vocab_size] after the prompt.
        max_tokens: how many are wanted, so that none is computed ahead that is not; -1: no limit is known.
        sampler: logprobs [1, V] -> token [1]; None takes the most likely.
        logits_processors: (tokens so far, logits [1, V]) -> logits.

    Attributes:
        count: tokens that have been chosen.
    """

    def __init__(
        self,
        model: Model,
        cache: list[Cache],
        prompt: mx.array,
        logits: mx.array,
        *,
        max_tokens: int = -1,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
    ):
        self.model, self.cache, self.max_tokens = model, cache, max_tokens
        self.sampler, self.processors = sampler or make_sampler(), logits_processors
        self.count = 0
        self._seen = mx.array([], mx.uint32)  # what the processors look at; kept only when there are any
        self._last = prompt  # what they have not seen
        self._logits: mx.array | None = logits
        self._next: Chosen | None = None  # need not be known here yet
        self._ahead: Step | None = None  # which has absorbed a token whose successor nobody has asked for
        self._runs_ahead = model.decode_step is not None and not logits_processors

    @property
    def is_done(self) -> bool:
        """Whether as many tokens have been chosen as are wanted."""
        return self.count == self.max_tokens

    @property
    def rows(self) -> SequenceRows:
        """The row of a step whose logits come next: the last token, which need not be known here yet."""
        return SequenceRows(self.cache, self._last)

    def take(self, logits: mx.array) -> None:
        """Begins to choose the next token: `logits` [1, vocab_size] are those after `rows`."""
        logits = logits.astype(mx.float32)
        if self.processors:
            self._seen = mx.concatenate([self._seen, self._last])
            for process in self.processors:
                logits = process(self._seen, logits)
        logprobs = log_softmax(logits)
        token = self.sampler(logprobs)
        self._next = token, logprobs[0], mx.isnan(logprobs[0, :1])
        self._last = token.astype(mx.uint32)
        mx.async_eval(self._next)

    def advance(self) -> tuple[int, mx.array]:
        """The next token, and its logprobs [vocab_size] float32.

        Raises:
            ModelFileError: the logits are NaN, which damaged weights cause.
            RequestError, ExpertIOError, DeviceError: as `Model.step`.
        """
        with within_limits():
            if self.count == 1 or (self.count and self.count % KVCache.step == 0):
                mx.clear_cache()  # a prompt's temporaries, or caches that have grown: they fit no later request
            if self._next is None:
                self.take(self.model.step([self.rows]).logits if self._logits is None else self._logits)
            token, logprobs, is_broken = chosen = cast(Chosen, self._next)
            self._next = self._logits = self._ahead = None
            self.count += 1
            if self._runs_ahead and not self.is_done:
                self._ahead = self.model.step([self.rows])
                self.take(self._ahead.logits)
            mx.eval(chosen)
            if is_broken.item():
                raise ModelFileError("the model's logits are NaN: a weight is damaged; run convert again with --verify")
            return cast(int, token.item()), logprobs

    def close(self) -> None:
        """Takes the caches back to what they hold without work that was begun ahead: all tokens but the last."""
        if self._ahead is not None:
            self._ahead.undo()
        self._next = self._ahead = None
