"""Says which requests may wait, and which one begins next: clients take turns, and the caches must fit in memory.

It neither computes nor waits. Requests of one client begin in order of arrival.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from weakref import WeakKeyDictionary

from ..errors import BadRequestError
from ..planning.machine import in_gb
from .prepare import PreparedRequest
from .running import Job, Running, SharedPrompt
from .wire.replies import queue_full

AHEAD = 1024  # memory is reserved for this many tokens of an answer at a time
LENGTHS = 64  # sizes to cache: waiting requests are checked at every step


class Place:
    """The place of one waiting request. Made by `Places.take`."""

    def __init__(self, places: "Places", client: str):
        self.client, self._places = client, places

    def leave(self) -> None:
        """The request waits no more; may be called again."""
        self._places.remove(self)


class Places:
    """The places of the requests that wait, for any model: until it is loaded, and then for their turn. May be used in
    any thread.

    Args:
        limit: the number of places. A client that has none gets one even if all are taken, until twice as many are.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._taken: set[Place] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def take(self, client: str) -> Iterator[Place]:
        """A context manager with a place, which is left at the end or before.

        Raises:
            BadRequestError: there is none for this client.
        """
        place = Place(self, client)
        with self._lock:
            is_among = any(one.client == client for one in self._taken)
            if len(self) >= (self._limit if is_among else 2 * self._limit):
                raise queue_full(len(self), self._limit)
            self._taken.add(place)
        try:
            yield place
        finally:
            place.leave()

    def remove(self, place: Place) -> None:
        with self._lock:
            self._taken.discard(place)


class Admission:
    """Args:
    parallel: the most requests that run at once.
    nbytes: bytes that their caches may take together.
    needs: returns the bytes of a sequence of a number of tokens.
    """

    def __init__(self, parallel: int, nbytes: int, needs: Callable[[int], int]):
        self.parallel, self.nbytes = parallel, nbytes
        self.needs = lru_cache(LENGTHS)(needs)
        self._shared: WeakKeyDictionary[SharedPrompt, int] = WeakKeyDictionary()  # tokens, until all jobs are gone

    def choose(self, waiting: Sequence[Job], running: Sequence[Running]) -> Job | None:
        """The request that begins next, or None: the oldest one of the client with the fewest running requests. If
        there is no room for it, no other request overtakes it.
        """
        if len(running) >= self.parallel or not waiting:
            return None
        counts = Counter(one.job.client for one in running)
        job = min(waiting, key=lambda job: counts[job.client])
        return job if self._fits(job, running) else None

    def begin(self, one: Running) -> None:
        """Reserves memory for the prompt and the beginning of the answer."""
        one.set_aside = self._first_length(one.job.prepared)
        if one.job.shared is not None:
            self._shared[one.job.shared] = len(one.job.prepared.tokens)

    def may_step(self, answering: Sequence[Running], running: Sequence[Running]) -> list[Running]:
        """The requests whose next token has room. An answer that outgrows its reserved memory gets more, or waits until
        others have ended; the first of them never waits.
        """
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
        need = self.needs(self._first_length(job.prepared))
        if job.shared is not None and job.shared not in self._shared:
            need += self.needs(len(job.prepared.tokens))
        return not running or self._taken(running) + need <= self.nbytes

    def check(self, prepared: PreparedRequest, answers: int) -> None:
        """Raises BadRequestError: there is no room for an answer beside the prompt that others begin from."""
        need = self.needs(len(prepared.tokens)) + self.needs(self._first_length(prepared))
        if answers > 1 and need > self.nbytes:
            raise BadRequestError(
                f"n is {answers}; this prompt beside an answer takes {in_gb(need)}, and {in_gb(self.nbytes)} are "
                "planned for all answers: send n as 1, or a shorter prompt",
                "n",
            )

    def _taken(self, running: Sequence[Running]) -> int:
        """The reserved memory, with that of prompts from which further answers begin."""
        ends = sum(self.needs(tokens) for shared, tokens in self._shared.items() if shared.waiting)
        return sum(self.needs(one.set_aside) for one in running) + ends

    def _first_length(self, prepared: PreparedRequest) -> int:
        return len(prepared.tokens) + min(prepared.max_tokens, AHEAD)
