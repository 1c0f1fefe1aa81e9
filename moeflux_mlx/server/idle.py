"""What happens to the machine while a server computes nothing. It knows no requests."""

import time
from collections.abc import Callable

from ..planning.awake import Awake
from ..planning.wired import rest, wake

REST_SECONDS = 180.0  # after so long, memory leaves Metal's residency sets; going back takes less than loading


class Idle:
    """Lets the machine sleep while there is no request, and wired memory go after some minutes of that. It belongs to
    the model's thread.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._since: float | None = None
        self._awake = Awake()

    def patience(self, other: float | None) -> float | None:
        """Seconds to wait for a request: until something is due here, or `other`."""
        if self._since is None:
            self._since = self._clock()
            self._awake.__exit__()
        left = self._since + REST_SECONDS - self._clock()
        due = [seconds for seconds in (other, left if left > 0 else None) if seconds is not None]
        return min(due, default=None)

    def look(self) -> None:
        """Lets memory go if it is due."""
        if self._since is not None and self._clock() - self._since >= REST_SECONDS:
            rest()

    def end(self) -> None:
        """Something is computed from here on."""
        self._since = None
        self._awake.__enter__()
        wake()
