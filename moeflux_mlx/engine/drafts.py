"""Proposes tokens for a text, of which a step checks several. Nothing here computes or chooses a token."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

SHORTEST, LONGEST = 2, 32  # tokens of the end of a text that are looked for: one alone says too little


class Drafts(Protocol):
    """Proposes tokens for one text."""

    def add(self, token: int, hidden: Any = None) -> None:
        """The text goes on with `token`; `hidden` [1, 1, hidden_size]: what a head takes of the position before it."""
        ...

    def propose(self, count: int) -> list[int]:
        """At most so many tokens that may come next."""
        ...

    def may_propose(self) -> bool:
        """Whether there is one, as far as can be said before the next token is known."""
        ...


class Lookup:
    """Proposes what followed when a text's longest repeated end occurred before; the newest of several places.

    Args:
        text: ids so far.
    """

    def __init__(self, text: Sequence[int] | np.ndarray):
        self._ids = np.array(text, np.uint32)
        self._count = len(self._ids)

    def add(self, token: int, hidden: Any = None) -> None:
        """The text goes on with `token`."""
        if self._count == len(self._ids):
            self._ids = np.resize(self._ids, max(2 * self._count, 1024))
        self._ids[self._count] = token
        self._count += 1

    def may_propose(self) -> bool:
        """Whether the text's end occurred before."""
        return bool(self.propose(1))

    def propose(self, count: int) -> list[int]:
        """`count` tokens, or none: nothing of the text's end occurred before. What is beyond the end repeats it."""
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
