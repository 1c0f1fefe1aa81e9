"""A step of rows: the next few tokens of several sequences, and the way back to any of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import RequestError
from ..state.cache import Cache
from .tokens import token_ids

MAX_ROWS = 16  # of a step
MAX_OF_SEQUENCE = 8  # of these, of one sequence


@dataclass(frozen=True)
class SequenceRows:
    """The next tokens of one sequence.

    Args:
        cache: a cache for each layer, from `Model.make_cache`; it may be empty.
        tokens: ids in order. An array of one id need not be evaluated yet: on a GPU it is believed to be in the
            vocabulary.
    """

    cache: list[Cache]
    tokens: Sequence[int] | mx.array

    @property
    def count(self) -> int:
        return len(self.tokens)


class Step:
    """What `Model.step` has computed.

    Attributes:
        sequences: as they were given.
        logits: [R, vocab_size], in the order of the sequences and of their tokens.
    """

    def __init__(self, sequences: Sequence[SequenceRows]):
        self.sequences = sequences
        self._logits: list[mx.array] = []
        for rows in sequences:
            for layer in rows.cache:
                layer.begin_step()
        self._begun = [[layer.last_step for layer in rows.cache] for rows in sequences]

    @property
    def logits(self) -> mx.array:
        return self._logits[0] if len(self._logits) == 1 else mx.concatenate(self._logits)

    def add(self, rows: SequenceRows, logits: mx.array) -> None:
        """The next row of a sequence has been computed; its logits are [1, vocab_size]."""
        self._logits.append(logits)
        for layer in rows.cache:
            layer.end_row()

    def rewind(self, sequence: int, rows: int) -> None:
        """Takes the caches of a sequence, counted from 0, back to where they had absorbed the first `rows` of its rows.

        Any number of rows can be kept that has not been taken back yet, until the sequence's next step or prompt.

        Raises:
            RequestError: there is no such sequence or row, or its caches have gone on to something else since.
        """
        if not 0 <= sequence < len(self.sequences):
            raise RequestError(f"sequence {sequence} is not in a step of {len(self.sequences)}, counted from 0")
        cache = self.sequences[sequence].cache
        if any(layer.last_step is not begun for layer, begun in zip(cache, self._begun[sequence], strict=True)):
            raise RequestError(f"the caches of sequence {sequence} went on; only their last step can be taken back")
        for layer in cache:
            layer.rewind(rows)

    def undo(self) -> None:
        """Takes all caches back to where the step began."""
        for sequence in range(len(self.sequences)):
            self.rewind(sequence, 0)


def checked_rows(sequences: Sequence[SequenceRows], vocab_size: int) -> list[SequenceRows]:
    """The same with their tokens as arrays [n]. Raises RequestError: they do not make a step."""
    checked = [replace(rows, tokens=_as_array(rows.tokens, vocab_size)) for rows in sequences]
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


def _as_array(tokens: Any, vocab_size: int) -> mx.array:
    if isinstance(tokens, mx.array) and tokens.shape == (1,):
        return tokens
    return token_ids(tokens, vocab_size, "a sequence's row of tokens")
