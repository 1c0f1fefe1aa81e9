"""Chooses the waiting request that begins next: clients take turns, and the caches must fit in memory.

It neither computes nor waits. Requests of one client begin in the order in which they came.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from .job import Job
from .running import Running

AHEAD = 1024  # tokens of an answer that memory is set aside for at a time
LENGTHS = 64  # whose bytes are remembered: those who wait are asked about at every step


class Admission:
    """Args:
    parallel: requests that may run at a time.
    nbytes: what their caches may have together.
    needs: the bytes of a sequence of so many tokens.
    """

    def __init__(self, parallel: int, nbytes: int, needs: Callable[[int], int]):
        self.parallel, self.nbytes = parallel, nbytes
        self.needs = lru_cache(LENGTHS)(needs)

    def choose(self, waiting: Sequence[Job], running: Sequence[Running]) -> Job | None:
        """The one that begins next, if any may: of the client of whom the fewest run, the one that came first.

        If there is no room for that one, nobody passes it by.
        """
        if len(running) >= self.parallel or not waiting:
            return None
        counts = Counter(one.job.client for one in running)
        job = min(waiting, key=lambda job: counts[job.client])
        return job if self._fits(job, running) else None

    def begin(self, one: Running) -> None:
        """Sets memory aside for the prompt and the beginning of the answer."""
        one.set_aside = self._first_length(one.job)

    def may_step(self, answering: Sequence[Running], running: Sequence[Running]) -> list[Running]:
        """Those whose next token has room. An answer that outgrows what was set aside gets more, or waits until others
        have ended; the first of them never waits."""
        return [
            one for i, one in enumerate(answering) if one.length < one.set_aside or self._grows(one, running, i == 0)
        ]

    def _grows(self, one: Running, running: Sequence[Running], always: bool) -> bool:
        wanted = one.length + AHEAD
        if always or self._taken(running) - self.needs(one.set_aside) + self.needs(wanted) <= self.nbytes:
            one.set_aside = wanted
            return True
        return False

    def _fits(self, job: Job, running: Sequence[Running]) -> bool:
        return not running or self._taken(running) + self.needs(self._first_length(job)) <= self.nbytes

    def _taken(self, running: Sequence[Running]) -> int:
        return sum(self.needs(one.set_aside) for one in running)

    def _first_length(self, job: Job) -> int:
        return len(job.prepared.tokens) + min(job.prepared.max_tokens, AHEAD)
