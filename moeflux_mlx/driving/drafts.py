"""Proposes next tokens for a text, so that one step can check several. Nothing here computes or chooses a token.

`HeadDrafts` is the state of a draft head for one text: its cache, and the hidden states that the head has not processed
yet. Row p of the cache is computed from the hidden state of position p and the token after it. Rows are computed when
drafts are requested, or many at once, so an unused head costs almost nothing. If the head has not seen a part of the
text, its rows start anew after that part, and fewer drafts are accepted.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import LayerCache
from ..model.decoder import Model
from ..model.head import DraftHead
from ..model.span import Span
from ..ops import backend
from ..ops.backend import EitherArray, leave
from ..state.snapshot import head_rows, load_head_rows
from ..text.boundaries import shared_length

SHORTEST, LONGEST = 2, 32  # how many last tokens of a text are searched for; a single one predicts too little


class Lookup:
    """Proposes the tokens that followed the newest earlier occurrence of the text's longest repeated ending.

    Args:
        text: token ids so far.
    """

    def __init__(self, text: Sequence[int] | np.ndarray):
        self._ids = np.array(text, np.uint32)
        self._count = len(self._ids)

    def add(self, token: int, hidden: EitherArray | None = None) -> None:
        """Appends `token` to the text."""
        if self._count == len(self._ids):
            self._ids = np.resize(self._ids, max(2 * self._count, 1024))
        self._ids[self._count] = token
        self._count += 1

    def may_propose(self) -> bool:
        """Whether the text's ending occurred before."""
        return bool(self.propose(1))

    def propose(self, count: int) -> list[int]:
        """Returns `count` tokens, or none if the text's ending did not occur before. A proposal that reaches the end of
        the text repeats.
        """
        ids = self._ids[: self._count]
        ends = np.flatnonzero(ids[:-1] == ids[-1]) if count > 0 else np.empty(0, int)
        length = int(len(ends) > 0)
        while 0 < length < LONGEST:
            longer = ends[ends >= length]
            longer = longer[ids[longer - length] == ids[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < SHORTEST:
            return []
        start, period = int(ends[-1]) + 1, self._count - int(ends[-1]) - 1
        return [int(ids[start + i % period]) for i in range(count)]


MOST_WAITING = 256  # rows that are not absorbed yet


def head_drafts(model: Model) -> "HeadDrafts | None":
    """The state for a new text; None if the model has no draft head or drafts are off."""
    return HeadDrafts(model) if model.head is not None and model.drafting.kind == "head" else None


class HeadDrafts:
    """Args:
        model: a model with a draft head.

    Attributes:
        cache: the caches of the head's layer.
        tokens: the known tokens of the text.
        start: the position of the first row.
        rows: number of rows made from the model's hidden states.
        shown: number of positions up to the last one whose hidden state is known.
    """

    def __init__(self, model: Model):
        self._model, self._head = model, cast(DraftHead, model.head)
        self.cache: list[LayerCache] = self._head.make_cache()
        self.tokens: list[int] = []
        self.start = self.rows = self.shown = 0
        self._waiting: list[EitherArray] = []  # hidden states of the next positions, each [1, n, hidden_size]
        self._out: EitherArray | None = None  # the head's output for the last row
        self._next_out: EitherArray | None = None  # the head's output for the last drafted token but one
        self._drafted: list[mx.array] = []  # drafted tokens [1, 1]; all but the last have a row at the end of the cache

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.cache) + sum(part.nbytes for part in self._waiting)

    def copy(self) -> "HeadDrafts":
        """A copy with the same text."""
        other = HeadDrafts(self._model)
        other.cache, other.tokens = [one.copy() for one in self.cache], list(self.tokens)
        other.start, other.rows, other.shown = self.start, self.rows, self.shown
        other._waiting = list(self._waiting)
        return other

    def saved(self, length: int) -> bytes:
        """The cache of the first `length` tokens as bytes, for `restore`; empty if the rows do not begin at the first
        token.
        """
        self._absorb()
        cache, rows = [one.copy() for one in self.cache], min(self.rows, length)
        if self.start or not rows or not _reaches(cache, rows):
            return b""
        _go_back(cache, rows)
        return head_rows(cache)

    def restore(self, data: bytes, text: Sequence[int]) -> None:
        """Sets the text, whose beginning is the one that `saved` made `data` from. If `data` is empty or belongs to
        another head, no rows are restored.
        """
        self._restart(0)
        if load_head_rows(self.cache, data, self._model.activation_dtype):
            self.rows = self.shown = self.cache[0].offset
            self._cut(len(text))
        self.tokens = list(text)

    def begin(self, text: Sequence[int]) -> None:
        """Sets the text; the rows of the prefix that it shares with the previous text are kept."""
        waiting = sum(part.shape[1] for part in self._waiting)
        if self.cache[0].offset < self.rows or self.shown != self.start + self.rows + waiting:
            self._restart(0)
        self._cut(shared_length(self.tokens, text))
        self.tokens = list(text)

    def absorb_span(self, span: Span) -> None:
        """Takes the hidden states of a span that has passed all layers of the model."""
        for start in range(0, span.length, span.block):
            end = min(start + span.block, span.length)
            self.show(self._model.draft_states(span, start, end), span.start + start)
            self._absorb()

    def add(self, token: int, hidden: EitherArray | None = None) -> None:
        """Appends `token` to the text; `hidden` as in `Drafts`, None if the head has it already."""
        self.tokens.append(token)
        self._drafted = []
        if hidden is not None:
            self.show(hidden, len(self.tokens) - 2)
        if len(self._waiting) >= MOST_WAITING:
            self._absorb()

    def may_propose(self) -> bool:
        """Whether the hidden state of the last position is known."""
        return self.shown == len(self.tokens) - 1

    def propose(self, count: int) -> Sequence[int] | mx.array:
        """Proposes at most `count` tokens, each the most likely one; none if the last position's hidden state is not
        known. The host does not wait for them.
        """
        if count < 1 or not self.may_propose():
            return []
        self._absorb(draft=True)
        if self._out is None:
            return []
        if not self._drafted:
            _go_back(self.cache, self.rows)
            self._drafted = [self._head.next(self._out)]
        if len(self._drafted) == 1:
            self._next_out = self._out
        while len(self._drafted) < count:
            self._next_out, token = self._head.follow(self._next_out, self._drafted[-1], self.cache)
            self._drafted.append(token)
        mx.async_eval(self._drafted)
        return mx.concatenate([token.reshape(-1) for token in self._drafted[:count]])

    def show(self, hidden: EitherArray, position: int) -> None:
        """Takes hidden states [1, n, hidden_size] of the positions from `position` on."""
        if position < self.shown:
            self._cut(position)
        if position != self.shown:
            self._restart(position)
        self._waiting.append(hidden)
        self.shown += hidden.shape[1]

    def _absorb(self, draft: bool = False) -> None:
        """Makes the rows of all waiting hidden states whose next tokens are known, and a draft if `draft` is set."""
        first = self.start + self.rows
        count = min(self.shown, len(self.tokens) - 1) - first
        if count < 1:
            return
        waiting, rest = _divided(self._waiting, count)
        _go_back(self.cache, self.rows)
        self._drafted = []
        last = self._model.args.vocab_size - 1  # an image's rows have keys instead of tokens
        tokens = [min(token, last) for token in self.tokens[first + 1 : first + 1 + count]]
        self._out, drafted = self._head.absorb(waiting, tokens, self.cache, draft)
        self.rows, self._waiting = self.rows + count, [leave(part) * 1 for part in rest]  # copied, to free the block
        self._drafted = [] if drafted is None else [drafted]
        backend.start(self._out, *(array for one in self.cache for array in one.state[:-1]))

    def _cut(self, length: int) -> None:
        """Forgets everything after the first `length` tokens, and those too if the cache cannot go back that far."""
        rows = min(max(length - self.start, 0), self.rows)
        if not _reaches(self.cache, rows):
            self._restart(max(length, self.start))
            return
        kept = max(length - self.start - self.rows, 0)
        self._waiting = _divided(self._waiting, kept)[0]
        self._drafted, self.shown = [], min(self.shown, max(length, self.start))
        if rows < self.rows:
            self.rows, self._out = rows, None
            _go_back(self.cache, rows)

    def _restart(self, position: int) -> None:
        """Forgets all rows; the next ones begin at `position`."""
        self.cache, self._waiting, self._drafted, self._out = self._head.make_cache(), [], [], None
        self.start = self.shown = position
        self.rows = 0
        for one in self.cache:
            one.shift(position)


def _reaches(cache: Sequence[LayerCache], rows: int) -> bool:
    return all(one.reaches(rows) for one in cache)


def _go_back(cache: Sequence[LayerCache], rows: int) -> None:
    for one in cache:
        one.go_back(rows, None)


def _divided(parts: Sequence[EitherArray], count: int) -> tuple[list[EitherArray], list[EitherArray]]:
    """Splits parts [1, n, hidden_size] into the first `count` rows and the rest."""
    first, rest = list[EitherArray](), list[EitherArray]()
    for part in parts:
        here = min(count, part.shape[1])
        count -= here
        first += [part[:, :here]] if here else []
        rest += [part[:, here:]] if here < part.shape[1] else []
    return first, rest


# Proposes tokens for one text. `add` appends a token to the text, with a head's input [1, 1, hidden_size] from the
# position before it. `propose` gives at most `count` next tokens; an array of them, uint32 [n], need not be evaluated.
# `may_propose` says whether there may be some, as far as this is known before the next token.
Drafts = Lookup | HeadDrafts
