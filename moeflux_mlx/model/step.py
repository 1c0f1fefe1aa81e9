"""A step of rows: the next few tokens of several sequences, and the way back to any of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from ..caches.layer_cache import JoinedRow, LayerCache, WayBack
from ..errors import RequestError
from ..experts.stats import Asked
from ..ops.rows import StepRows
from .tokens import token_ids

MAX_ROWS = 16  # the most rows of a step
MAX_OF_SEQUENCE = 8  # the most rows of one sequence in a step


@dataclass(frozen=True)
class SequenceRows:
    """The next tokens of one sequence.

    Args:
        cache: from `Model.make_cache`; it may be empty.
        tokens: ids in order. An array need not be evaluated yet: on a GPU its ids are assumed to be in the vocabulary.
    """

    cache: list[LayerCache]
    tokens: Sequence[int] | mx.array

    @property
    def count(self) -> int:
        return len(self.tokens)


class _Absorbing:
    """What one sequence absorbs in a step: its first position, and the ways back to before each row."""

    def __init__(self, rows: SequenceRows):
        self.cache, self.start = rows.cache, rows.cache[0].offset
        self.ways: list[list[WayBack | None]] = [[None] * len(rows.cache) for _ in range(rows.count)]
        self.ways[0] = [layer.way_back() for layer in rows.cache]

    def begin(self, row: int, i: int) -> None:
        """Cache number i has absorbed the rows before this one."""
        self.ways[row][i] = self.cache[i].way_back()

    def go_back(self, rows: int) -> None:
        """Keeps the first `rows` rows."""
        for layer, way in zip(self.cache, self.ways[rows], strict=True):
            layer.take_back(self.start + rows, way)
        del self.ways[rows:]


class Step:
    """The results of `Model.step`, with the ways back.

    Attributes:
        sequences: as they were given, the tokens as arrays [n].
        logits: [R, vocab_size], in the order of the sequences and of their tokens.
        hidden: a draft head's input for the rows, [1, R, hidden_size]; None if the model has no head.
        asked: the requests of each row, if they are counted (`ExpertLoader.counts_rows`).
    """

    logits: mx.array
    hidden: mx.array | None
    asked: Sequence[Asked] = ()

    def __init__(self, sequences: list[SequenceRows]):
        self.sequences = sequences
        self._absorbing = [_Absorbing(rows) for rows in sequences]
        self._places = [(one, row) for one in self._absorbing for row in range(len(one.ways))]
        self._mark = object()  # not the step itself: that would be a reference cycle with the cache
        for rows in sequences:
            rows.cache[0].last_step = self._mark

    @property
    def nbytes(self) -> int:
        """Bytes of the states for the ways back that the caches do not hold."""
        ways = (way for one in self._absorbing for ways in one.ways for way in ways)
        pairs = (way.arrays if isinstance(way, JoinedRow) else way for way in ways)
        return sum({id(array): array.nbytes for pair in pairs for array in pair or () if array is not None}.values())

    @property
    def tokens(self) -> mx.array:
        """The tokens of all rows, [1, R]."""
        tokens = [cast(mx.array, rows.tokens) for rows in self.sequences]
        return (tokens[0] if len(tokens) == 1 else mx.concatenate(tokens))[None]

    @property
    def caches(self) -> list[StepRows]:
        """For each cache of a sequence, those that absorb the rows; they notify the step when a row begins."""
        return [self._of_number(i) for i in range(len(self.sequences[0].cache))]

    def _of_number(self, i: int) -> StepRows:
        return StepRows([one.cache[i] for one, _ in self._places], lambda row: self.begin(row, i))

    def begin(self, row: int, i: int) -> None:
        """Cache number i of the row's sequence has absorbed the rows before this one."""
        absorbing, own = self._places[row]
        if own:
            absorbing.begin(own, i)

    def start(self, sequence: int) -> int:
        """The position where a sequence's rows begin."""
        return self._absorbing[sequence].start

    def rewind(self, sequence: int, rows: int) -> None:
        """Takes the caches of a sequence, counted from 0, back to where they had absorbed the first `rows` of its rows.

        It can be called again for fewer rows, until the caches absorb more or go back in another way.

        Raises:
            RequestError: there is no such sequence or row, or its caches have changed since.
        """
        if not 0 <= sequence < len(self.sequences):
            raise RequestError(f"sequence {sequence} is not in a step of {len(self.sequences)}, counted from 0")
        absorbing = self._absorbing[sequence]
        first, count = absorbing.cache[0], len(absorbing.ways)
        if first.last_step is not self._mark or first.offset != absorbing.start + count:
            raise RequestError(f"the caches of sequence {sequence} went on; only their last step can be taken back")
        if not 0 <= rows <= count:
            raise RequestError(f"a cache cannot keep {rows} rows of its last step; it can keep 0 to {count}")
        if rows < count:
            absorbing.go_back(rows)
            first.last_step = self._mark

    def undo(self) -> None:
        """Takes all caches back to the beginning of the step, also if it is incomplete."""
        for absorbing in self._absorbing:
            absorbing.go_back(0)


def checked_rows(sequences: Sequence[SequenceRows], vocab_size: int, believed: bool) -> list[SequenceRows]:
    """The same with their tokens as arrays [n]; an array of ids is `believed`. Raises RequestError: they cannot form a
    step.
    """
    checked = [rows if believed and _are_ids(rows.tokens) else _as_array(rows, vocab_size) for rows in sequences]
    if len(checked) == 1 and checked[0].count == 1:
        return checked
    longest, total = max((rows.count for rows in checked), default=0), sum(rows.count for rows in checked)
    if not checked:
        raise RequestError("a step of no sequences; give at least one")
    if longest > MAX_OF_SEQUENCE:
        raise RequestError(f"{longest} rows of one sequence in a step; at most {MAX_OF_SEQUENCE}: make several steps")
    if total > MAX_ROWS:
        raise RequestError(f"{total} rows in a step; at most {MAX_ROWS}: make several steps")
    caches = [id(layer) for rows in checked for layer in rows.cache]
    if len(set(caches)) < len(caches):
        raise RequestError("a cache is in two sequences of a step; give each one of its own (model.make_cache())")
    return checked


def _are_ids(tokens: Sequence[int] | mx.array) -> bool:
    return isinstance(tokens, mx.array) and tokens.dtype == mx.uint32 and tokens.ndim == 1 and tokens.size > 0


def _as_array(rows: SequenceRows, vocab_size: int) -> SequenceRows:
    return replace(rows, tokens=token_ids(rows.tokens, vocab_size, "a sequence's row of tokens"))
