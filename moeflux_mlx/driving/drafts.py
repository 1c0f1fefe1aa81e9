"""Proposes next tokens for a text, so that one step can check several. Nothing here computes or chooses a token."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..ops.backend import AnyArray

SHORTEST, LONGEST = 2, 32  # how many last tokens of a text are searched for; a single one predicts too little


class Drafts(Protocol):
    """Proposes tokens for one text."""

    def add(self, token: int, hidden: AnyArray = None) -> None:
        """Appends `token` to the text. `hidden` [1, 1, hidden_size] is a head's input from the position before it."""

    def propose(self, count: int) -> Sequence[int] | mx.array:
        """Proposes at most `count` next tokens; an array of them, uint32 [n], need not be evaluated."""

    def may_propose(self) -> bool:
        """Whether there may be a proposal, as far as this is known before the next token."""


class Lookup:
    """Proposes the tokens that followed the newest earlier occurrence of the text's longest repeated ending.

    Args:
        text: token ids so far.
    """

    def __init__(self, text: Sequence[int] | np.ndarray):
        self._ids = np.array(text, np.uint32)
        self._count = len(self._ids)

    def add(self, token: int, hidden: AnyArray = None) -> None:
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
