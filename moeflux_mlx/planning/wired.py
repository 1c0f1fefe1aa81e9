"""MLX's limit of wired memory (Metal), which all models of the process share. It knows only numbers of bytes.

While the limit leaves room, MLX puts each new allocation into a residency set and takes it out when it is freed, and
each time it commits the set. Several streams that do so have made macOS restart (mlx#3186). What is in no set is made
resident by each command buffer, which is many times slower for a pool of experts. When the limit rises, MLX adds what
fits, in any order. So by default only what lasts lies in sets (`wire_lasting`): once a model is loaded, the limit rises
to what is in memory, and what is left of it is filled, so that nothing which comes later finds room. Nothing of this
has run on an Apple GPU.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..experts.memory import adopted_pages

MODES = ("pool", "all", "off")  # what may lie in residency sets: what lasts, everything that runs on the GPU, nothing
PAGE = 16384  # bytes of a Mac's page; an allocation takes whole pages of a set
SLACK = 32 << 20  # more than MLX's heap, and what it rounds up for about 2,000 arrays of a model


class WiredLimit:
    """MLX's limit, divided among models."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside may release another model's share
        self._shares: dict[object, int] = {}
        self._most, self._rests = 0, False
        self._filling: list[tuple[np.ndarray, mx.array]] = []

    def wire(self, nbytes: int, at_most: int) -> Callable[[], None]:
        """Raises the limit by `nbytes`, up to `at_most` in total; the returned function takes the share back, once."""
        share = object()

        def release() -> None:
            with self._lock:
                if self._shares.pop(share, None) is not None:
                    self._set()
                if not self._shares:
                    self._filling.clear()

        with self._lock:
            self._shares[share], self._most = nbytes, at_most
            try:
                self._set()
            except BaseException:
                del self._shares[share]
                raise
        return release

    def wire_lasting(self, at_most: int) -> Callable[[], None]:
        """As `wire`, for all that is in memory now, and leaves no room for what comes later."""
        with self._lock:
            release = self.wire(max(_needed() - sum(self._shares.values()), 0), at_most)
            self._fill()
            return release

    def rest(self) -> None:
        """Takes everything out of residency sets until `wake`: other programs may have the memory, and the machine may
        sleep.
        """
        with self._lock:
            if self._shares and not self._rests:
                self._rests = True
                mx.set_wired_limit(0)

    def wake(self) -> None:
        """Ends `rest`. Whatever is in memory then goes back, kept prompts too: otherwise they might take the room of
        experts.
        """
        with self._lock:
            if self._rests:
                self._rests = False
                self._filling.clear()
                needed = _needed() if self._shares else 0
                mx.set_wired_limit(min(max(needed, sum(self._shares.values())), self._most))
                self._fill()

    def _set(self) -> None:
        total = None
        while total != sum(self._shares.values()):  # repeat until no share was released meanwhile
            total = sum(self._shares.values())
            mx.set_wired_limit(0 if self._rests else min(total, self._most))

    def _fill(self) -> None:
        """Fills the room that the limit leaves, if it is less than SLACK, to less than a page. What Metal refuses stays
        room for others.
        """
        nbytes = SLACK // 2
        with suppress(ExpertIOError):
            while nbytes >= PAGE:  # each one lies in a set if there is room for it
                self._filling.append(adopted_pages(1, nbytes // 4))
                nbytes //= 2


def _needed() -> int:
    """The limit with which all that is in memory fits into residency sets."""
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory() + SLACK


_limit = WiredLimit()
wire, wire_lasting, rest, wake = _limit.wire, _limit.wire_lasting, _limit.rest, _limit.wake
