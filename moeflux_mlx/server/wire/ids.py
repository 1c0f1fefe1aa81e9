"""Makes the ids and the time of one reply; tests can fix both."""

import secrets
import time
from collections.abc import Callable


class Ids:
    """Ids of one reply.

    `index` is the number of the reply's choice that they belong to. `calls` maps the index of each call of a tool to
    the id that the client was given for it, which is what a client names in its next request.

    Args:
        random: makes the part behind the prefix.
        clock: seconds since 1970.
    """

    def __init__(
        self, random: Callable[[], str] = lambda: secrets.token_hex(12), clock: Callable[[], float] = time.time
    ):
        self._random, self._clock = random, clock
        self.calls: dict[int, str] = {}
        self.index, self._reply = 0, dict[str, str]()

    def of_choice(self, index: int) -> "Ids":
        """Ids of another choice of the same reply."""
        other = Ids(self._random, self._clock)
        other.index, other._reply = index, self._reply
        return other

    def reply(self, prefix: str) -> str:
        """The id of the reply, the same for all of its choices."""
        return self._reply.setdefault(prefix, self.make(prefix))

    def make(self, prefix: str) -> str:
        return prefix + self._random()

    def call(self, index: int, prefix: str) -> str:
        """The id of the call `index`, always the same one."""
        if index not in self.calls:
            self.calls[index] = self.make(prefix)
        return self.calls[index]

    def now(self) -> int:
        return int(self._clock())
