"""Chooses the tokens of one answer, one after the other. A decoding knows only the model's steps and its own cache.

A step may check drafts: it computes the last known token and the proposed next tokens as rows of one sequence, each
with the bits that it has alone. As long as the sampler chooses the drafts, the next row's logits are already computed.
The rows after the first token that differs from its draft are taken back.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import mlx.core as mx
import numpy as np

from ..caches.growing import Growing
from ..caches.layer_cache import LayerCache
from ..errors import DeviceError, ModelFileError
from ..experts.source import ExpertLoader
from ..experts.stats import Asked
from ..model.decoder import Model
from ..model.step import SequenceRows, Step
from ..ops.elementwise import log_softmax
from ..ops.limits import within_limits
from .drafts import Drafts, Lookup
from .sampling import Constraint, LogitsProcessor, Sampler, greedy, make_sampler

ChosenToken = tuple[mx.array, mx.array, mx.array]  # a token [1], its logprobs [vocab_size], whether they are NaN [1]
Proposed = Sequence[int] | mx.array  # drafts


class OwnStep:
    """This text's rows of a step, and how far they have been followed.

    Args:
        step: the step; its tokens are the last one chosen and then `drafts`.
        drafts: the proposed tokens; an array of them need not be evaluated.
        ahead: whether the step began before the host knew its first token.
        sequence: the text's place in the step; every other text has one row.
        experts: the source of experts, which should first evict what was read only for rejected drafts.

    Attributes:
        logits: [1 + drafts, vocab_size].
        hidden: input for a draft head, [1, 1 + drafts, hidden_size]; None if the model has no head.
        asked: the experts that these rows asked for.
        followed: number of rows whose next token has been handed out.
        chosen: the next token of each row, if they were chosen together.
        seconds: time spent on this step so far.
        is_cold: whether the step read experts into memory that was free.
    """

    def __init__(
        self, step: Step, drafts: Proposed, ahead: bool, sequence: int = 0, experts: ExpertLoader | None = None
    ):
        self._step, self._sequence, self._experts = step, sequence, experts
        self.chosen: list[ChosenToken] = []
        self._drafts, self.ahead, self.drafted = drafts, ahead, len(drafts)
        self.is_cold = experts is not None and experts.is_filling
        rows = slice(sequence, sequence + 1 + len(drafts))
        self.logits = step.logits[rows]
        self.hidden = None if step.hidden is None else step.hidden[:, rows]
        self.asked = sum(step.asked[rows], Asked())
        self.followed, self.seconds = 0, 0.0

    @property
    def rows_left(self) -> int:
        """Number of rows whose next token has not been handed out."""
        return 1 + len(self._drafts) - self.followed

    @property
    def next_logits(self) -> mx.array:
        """[1, vocab_size] of the next row."""
        return self.logits[self.followed : self.followed + 1] if self.drafted else self.logits

    @property
    def next_hidden(self) -> mx.array | None:
        """[1, 1, hidden_size] of the next row."""
        if self.hidden is None or not self.drafted:
            return self.hidden
        return self.hidden[:, self.followed : self.followed + 1]

    def follow(self, token: int) -> bool:
        """Takes `token` as the token after the next row, and returns whether it was the draft. If not, the rows after
        it are taken back.
        """
        self.followed += 1
        if not self.rows_left:
            return False
        self._drafts = _listed(self._drafts)
        was_drafted = token == self._drafts[self.followed - 1]
        if not was_drafted:
            self.take_back()
        return was_drafted

    def take_back(self) -> None:
        """Rewinds the caches to the rows that were followed."""
        if self.rows_left:
            self._drafts = self._drafts[: max(self.followed - 1, 0)]  # first, so that an interrupt rewinds only once
            self._step.rewind(self._sequence, self.followed)
            if self._experts is not None:
                self._experts.take_back(self.followed)


def _listed(drafts: Proposed) -> Sequence[int]:
    return cast("list[int]", drafts.tolist()) if isinstance(drafts, mx.array) else drafts


def choose_likeliest(logits: mx.array) -> list[ChosenToken]:
    """Begins to choose the most likely token after each row of logits [R, vocab_size], as `greedy` chooses it alone.

    On a GPU the rows share these launches, and are submitted together. Each token is then copied to an array of its
    own: MLX for CUDA moves an array of more than 8 bytes before the host reads it.
    """
    logprobs = log_softmax(logits.astype(mx.float32))
    tokens, rows = greedy(logprobs), [logprobs[i : i + 1] for i in range(len(logits))]
    chosen = [(tokens[i : i + 1] | 0, row.reshape(-1), mx.isnan(row[:, 0])) for i, row in enumerate(rows)]
    mx.async_eval(chosen)
    return chosen


class Decoding:
    """Chooses the tokens that follow a prompt.

    The loop (`loop.advance_together`) makes a step of the `rows` of several decodings, or of the `drafted_rows` of one,
    and gives it to `take_rows`; then it calls `hand_out`, and `known` waits for the chosen token. If the GPU can
    continue without the host, it gets the next token's work before this wait.

    Args:
        model: computes the logits.
        cache: has absorbed the prompt; it absorbs each token when the next one is wanted, or earlier as a draft.
        prompt: [N] uint32, the tokens that the processors see before the chosen ones.
        logits: [1, vocab_size] after the prompt.
        max_tokens: the limit, so that no token beyond it is computed ahead; -1 if it is not known.
        sampler: logprobs [1, V] -> token [1]; None takes the most likely.
        logits_processors: (tokens so far, logits [1, V]) -> logits.
        draft_limit: returns a position beyond which no draft is absorbed, besides the model's own limit.
        drafts: proposes tokens for this text and knows the prompt; None means lookup in the text if the model's
            `drafting` is "lookup", else no drafts.

    Attributes:
        count: number of tokens handed out.
        from_draft: whether the last of them was a draft.
        asked: the experts that its rows requested, if they are counted.
    """

    def __init__(
        self,
        model: Model,
        cache: list[LayerCache],
        prompt: mx.array,
        logits: mx.array,
        *,
        max_tokens: int = -1,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        draft_limit: Callable[[], int] | None = None,
        drafts: Drafts | None = None,
    ):
        self.model, self.cache, self.max_tokens = model, cache, max_tokens
        self.sampler, self.processors = sampler or make_sampler(), logits_processors
        self.count, self.from_draft, self.asked = 0, False, Asked()
        self._seen = mx.array([], mx.uint32)  # what the processors have seen; kept only if there are any
        self._last = prompt  # tokens that they have not seen yet
        self._logits: mx.array | None = logits
        self._next: ChosenToken | None = None  # the host may not know it yet
        self._step: OwnStep | None = None  # the last step of this decoding
        self._followed: OwnStep | None = None  # the step whose row the handed-out token follows
        self._runs_ahead = model.decode_step is not None and not logits_processors
        self._drafting = drafts
        if drafts is None and model.drafting.kind == "lookup":
            self._drafting = Lookup(np.array(prompt))
        self._draft_limit = draft_limit or (lambda: model.args.max_position_embeddings)

    @property
    def is_done(self) -> bool:
        """Whether `max_tokens` tokens have been chosen."""
        return self.count == self.max_tokens

    @property
    def is_settled(self) -> bool:
        """Whether the caches hold no draft that may still be taken back."""
        return self._step is None or self._step.rows_left < 2

    @property
    def rows(self) -> SequenceRows:
        """The row whose logits are needed next: the last token, which the host may not know yet."""
        return SequenceRows(self.cache, self._last)

    @within_limits()
    def drafted_rows(self) -> tuple[SequenceRows, Proposed]:
        """The same row with drafts after it, if there are any, and these drafts."""
        drafts = self._drafts(self.model.drafting.depth)
        tokens: Proposed = self._last
        if isinstance(drafts, mx.array):
            tokens = mx.concatenate([self._last, drafts])
        elif drafts:
            tokens = [cast(int, self._last.item()), *drafts]
        return SequenceRows(self.cache, tokens), drafts

    def take(self, logits: mx.array) -> None:
        """Begins to choose the next token from `logits` [1, vocab_size], those after `rows`."""
        logits = logits.astype(mx.float32)
        if self.processors:
            self._seen = mx.concatenate([self._seen, self._last])
            for process in self.processors:
                logits = process(self._seen, logits)
        self._go_on(self._choice(logits))
        mx.async_eval(self._next)

    def _choice(self, logits: mx.array) -> ChosenToken:
        """Chooses from logits [1, vocab_size] float32."""
        logprobs = log_softmax(logits)
        return self.sampler(logprobs), logprobs.reshape(-1), mx.isnan(logprobs[:, 0])

    @property
    def takes_likeliest(self) -> bool:
        """Whether it chooses as `choose_likeliest` does."""
        return self.sampler is greedy and not self.processors

    def _go_on(self, chosen: ChosenToken) -> None:
        """Takes the next token, which the host may not know yet."""
        self._next, self._last = chosen, chosen[0].astype(mx.uint32)

    def take_rows(
        self,
        step: Step,
        sequence: int = 0,
        *,
        drafts: Proposed = (),
        ahead: bool = False,
        chosen: ChosenToken | None = None,
    ) -> None:
        """Takes what `step` has computed for the next row and the `drafts` after it: calls `take` with the logits of a
        single row, or takes what was `chosen` from them. `ahead`: the host may not know the row's token yet.
        """
        experts = self.model.experts if len(step.sequences) == 1 else None
        self._step = own = OwnStep(step, drafts, ahead, sequence, experts)
        self.asked += own.asked
        if own.drafted:
            if self.takes_likeliest:  # no choice depends on one before it
                own.chosen = choose_likeliest(own.logits)
        elif chosen is None:
            self.take(own.next_logits)
        else:
            self._go_on(chosen)

    def count_seconds(self, seconds: float) -> None:
        """Counts the time of the token that was handed out last, whose step had no other text's rows."""
        step = self._followed
        if step is None:
            return
        step.seconds += seconds
        if not step.rows_left:
            self.model.drafting.add(step.drafted, step.followed - 1, step.seconds, step.is_cold)

    @property
    def needs_row(self) -> bool:
        """Whether the next token needs the logits of `rows`: no token was chosen ahead, no computed row is left, and it
        is not the first token.
        """
        return self._next is None and self._logits is None and (self._step is None or not self._step.rows_left)

    def hand_out(self) -> ChosenToken:
        """Hands out the next token, which the host may not know yet, and counts it. Must not be called while a row is
        needed.
        """
        if self._next is None and self._logits is not None:
            self.take(self._logits)
        elif self._next is None:
            step = cast(OwnStep, self._step)
            if step.chosen:
                self._go_on(step.chosen[step.followed])
            else:
                self.take(step.next_logits)
        chosen = cast(ChosenToken, self._next)
        self._followed = self._step if self._step is not None and self._step.rows_left else None
        self._next = self._logits = None
        self.count += 1
        if self.count == 1 or self.count % Growing.step == 0:
            mx.clear_cache()  # buffers of a prompt's temporaries or of outgrown caches, which no later request fits
        return chosen

    def known(self, chosen: ChosenToken) -> tuple[int, mx.array]:
        """Waits for the token that was handed out last and returns it with its logprobs. Raises ModelFileError if they
        are NaN.
        """
        token, logprobs, is_broken = chosen
        mx.eval(chosen)
        if is_broken.item():
            raise ModelFileError("the model's logits are NaN: a weight is damaged; run convert again")
        said = cast(int, token.item())
        if self._drafting is not None:
            self._drafting.add(said, None if self._followed is None else self._followed.next_hidden)
        self.from_draft = self._followed is not None and self._followed.follow(said)
        return said, logprobs

    def close(self) -> None:
        """Takes back drafts and work that was begun ahead, so that the caches hold all tokens but the last."""
        if self._step is not None:
            self._step.take_back()
        self._next = self._step = self._followed = None
        self.separate()

    def separate(self) -> None:
        """Copies states that share arrays with other sequences, whose memory would stay as long as this one's. Without
        memory for the copies they stay.
        """
        with suppress(DeviceError), within_limits():
            for layer in self.cache:
                layer.separate()

    @property
    def may_run_ahead(self) -> bool:
        """Whether the handed-out token can be absorbed before the host knows it."""
        step = self._followed
        if not self._runs_ahead or self.is_done or (step is not None and step.rows_left > 1):
            return False
        if step is not None and not step.ahead and self.cache[0].offset >= self._draft_limit():
            return False  # the state after this step must be kept
        return not (self._drafting and self._room(self.model.drafting.depth) and self._drafting.may_propose())

    def _room(self, count: int) -> int:
        """How many drafts may be checked, at most `count`."""
        offset = self.cache[0].offset
        room = min(self._draft_limit(), self.model.args.max_position_embeddings) - offset - 1
        if self.max_tokens != -1:
            room = min(room, self.max_tokens - self.count - 1)
        return max(min(count, room), 0)

    def _drafts(self, count: int) -> Proposed:
        """At most `count` proposals for the tokens that follow the known ones."""
        room = self._room(count)
        if self._drafting is None or not room:
            return []
        drafts = self._drafting.propose(room)
        for process in self.processors if len(drafts) else ():
            if isinstance(process, Constraint):
                drafts = _listed(drafts)
                drafts = drafts[: max(process.mask.accepts([cast(int, self._last.item()), *drafts]), 1) - 1]
        return drafts
