"""The texts that a server keeps in memory, and which of them a prompt goes on with.

A prompt goes on in the session that knows most of it. If it would undo what another conversation is likely to come
back to, it gets a copy, so that agents that share a beginning share its computation. The least recently used session
goes when there are too many, short ones first, or when they hold too much; a store on disk may still know its text.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engine.session import Session

WORTH_COPYING = 64  # tokens; fewer are computed anew rather than copied
SMALL = 256  # tokens; texts as short as titles are asked for go first


@dataclass(eq=False)
class Kept:
    """A session, when it was used last, from where on it may be undone (its last answer), and whether it is in use.

    `is_answering`: it is in use and has absorbed its prompt, so that others can part from it there.
    """

    session: Session
    used: int = 0
    answer_at: int = 0
    busy: bool = False
    is_answering: bool = False
    hint: str | None = None


class Sessions:
    """Used by the thread that runs the model.

    Args:
        make: a new session.
        count: how many may be kept, at least 1.
        max_bytes: what those that are not in use may hold together.
    """

    def __init__(self, make: Callable[[], Session], count: int, max_bytes: int):
        self._make, self._count, self._max_bytes = make, count, max_bytes
        self._kept: list[Kept] = []
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What those hold that are not in use."""
        return sum(kept.session.nbytes for kept in self._kept if not kept.busy)

    def known(self, tokens: Sequence[int]) -> int:
        """How many tokens need no computing."""
        return max((self._knows(kept, tokens) for kept in self._kept), default=0)

    def take(self, tokens: Sequence[int], hint: str | None = None) -> Kept:
        """The session to go on with; `give_back` it. `hint` decides between those that know equally much."""
        known = {kept: self._knows(kept, tokens) for kept in self._kept}
        best = max(known, key=lambda kept: (known[kept], not kept.busy, kept.hint == hint, kept.used), default=None)
        if best is None or not known[best]:
            chosen = self._new(self._make)
        elif not best.busy and (known[best] >= best.answer_at or self._count == 1):
            chosen = best
        elif known[best] < WORTH_COPYING:
            chosen = self._new(self._make)
        else:
            session, length = best.session, known[best]
            best.used = next(self._clock)
            chosen = self._new(lambda: session.fork(length))
        chosen.busy, chosen.is_answering, chosen.hint, chosen.used = True, False, hint, next(self._clock)
        return chosen

    def give_back(self, kept: Kept, answer_at: int) -> None:
        """It is no longer in use; from `answer_at` tokens on nobody is likely to come back to what it knows."""
        kept.busy, kept.is_answering, kept.answer_at = False, False, min(answer_at, len(kept.session.tokens))
        while self.nbytes > self._max_bytes and self._drop_oldest(besides=kept):
            pass

    def _knows(self, kept: Kept, tokens: Sequence[int]) -> int:
        """How many tokens `kept` spares: one that is answering, all but its last, which it may not have absorbed."""
        if kept.busy and not kept.is_answering:
            return 0
        return kept.session.known(tokens[: len(kept.session.tokens)] if kept.busy else tokens)

    def _new(self, make: Callable[[], Session]) -> Kept:
        made = Kept(make())
        while len(self._kept) >= self._count and self._drop_oldest():
            pass
        self._kept.append(made)
        return made

    def _drop_oldest(self, besides: Kept | None = None) -> bool:
        idle = [kept for kept in self._kept if not kept.busy and kept is not besides]
        if not idle:
            return False
        self._kept.remove(min(idle, key=lambda kept: (len(kept.session.tokens) > SMALL, kept.used)))
        return True
