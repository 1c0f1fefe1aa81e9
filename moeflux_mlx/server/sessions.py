"""The sessions that a server keeps in memory, and the choice of one for a prompt.

A prompt continues in the session that knows most of it. If that would destroy a state to which another conversation
will probably return, the prompt gets a copy, so agents that share a beginning share its computation. If there are too
many sessions, or they take too much memory, the least recently used one is dropped: short ones first, then those most
of whose text is in a session that was used later. A store on disk may still have its text.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..driving.session import Session
from ..text.boundaries import shared_length

WORTH_COPYING = 64  # tokens; a shorter prefix is computed again instead of copied
SMALL = 256  # tokens; shorter texts, such as requests for titles, are dropped first


@dataclass(eq=False)
class KeptSession:
    """A session, the time of its last use, the position from which it may be overwritten (its last answer), whether it
    is in use, and whether it is one beside those that are counted.
    """

    session: Session
    used: int = 0
    answer_at: int = 0
    busy: bool = False
    hint: str | None = None
    is_extra: bool = False


class Sessions:
    """Used by the thread that runs the model.

    Args:
        make: makes a new session.
        count: the most sessions to keep, at least 1.
        max_bytes: the most bytes of all sessions that are not in use.

    Attributes:
        kept: the sessions, those in use too.
    """

    def __init__(self, make: Callable[[], Session], count: int, max_bytes: int):
        self._make, self._count, self._max_bytes = make, count, max_bytes
        self.kept: list[KeptSession] = []
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the sessions that are not in use."""
        return sum(kept.session.nbytes for kept in self.kept if not kept.busy)

    def known(self, tokens: Sequence[int]) -> int:
        """How many tokens of the prompt are already computed."""
        return max((self._knows(kept, tokens) for kept in self.kept), default=0)

    def take(self, tokens: Sequence[int], hint: str | None = None) -> KeptSession:
        """The session to continue with, to be returned with `give_back`. `hint` decides between sessions that know
        equally much.
        """
        known = {kept: self._knows(kept, tokens) for kept in self.kept}
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
        return self._in_use(chosen, hint)

    def hold(self, session: Session, hint: str | None = None) -> KeptSession:
        """A session that was made elsewhere, to be returned with `give_back`. It takes no other one's place, and is
        kept if there is one.
        """
        kept = KeptSession(session, is_extra=True)
        self.kept.append(kept)
        return self._in_use(kept, hint)

    def _in_use(self, chosen: KeptSession, hint: str | None) -> KeptSession:
        chosen.busy, chosen.hint, chosen.used = True, hint, next(self._clock)
        return chosen

    def give_back(self, kept: KeptSession, answer_at: int) -> None:
        """Marks the session as unused; the text after `answer_at` tokens will probably not be needed again."""
        kept.busy, kept.answer_at = False, min(answer_at, len(kept.session.tokens))
        if kept.is_extra and self._is_full:
            self.kept.remove(kept)
        kept.is_extra = False
        while self.nbytes > self._max_bytes and self._drop_oldest(besides=kept):
            pass

    def _knows(self, kept: KeptSession, tokens: Sequence[int]) -> int:
        """How many tokens `kept` saves. While it is in use, the last one does not count, because it may not be absorbed
        yet, nor does a half-done span.
        """
        return kept.session.known(tokens[: len(kept.session.tokens)] if kept.busy else tokens)

    def _new(self, make: Callable[[], Session]) -> KeptSession:
        made = KeptSession(make())
        while self._is_full and self._drop_oldest():
            pass
        self.kept.append(made)
        return made

    @property
    def _is_full(self) -> bool:
        return sum(not kept.is_extra for kept in self.kept) >= self._count

    def _drop_oldest(self, besides: KeptSession | None = None) -> bool:
        idle = [kept for kept in self.kept if not kept.busy and kept is not besides]
        if not idle:
            return False
        copied = self._copied()
        self.kept.remove(min(idle, key=lambda kept: (len(kept.session.tokens) > SMALL, kept not in copied, kept.used)))
        return True

    def _copied(self) -> set[KeptSession]:
        """The sessions most of whose text is in one that was used later."""
        latest = sorted(self.kept, key=lambda kept: -kept.used)
        texts = [np.array(kept.session.tokens, np.uint32) for kept in latest]
        shared = [max((shared_length(text, other) for other in texts[:i]), default=0) for i, text in enumerate(texts)]
        return {kept for kept, text, known in zip(latest, texts, shared, strict=True) if 2 * known > len(text)}
