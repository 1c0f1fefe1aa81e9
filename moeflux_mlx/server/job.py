"""One request on its way: what was asked for, who hears of it, and whether anybody still does."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from .prepare import Prepared
from .request import ServerEvent


@dataclass(eq=False)
class Job:
    """Args:
    prepared: the request.
    emit: takes the events, in any thread.
    client: who asks; clients have turns, however many jobs each of them has.
    """

    prepared: Prepared
    emit: Callable[[ServerEvent], None]
    client: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    raw: str = ""  # what the model wrote, once the last event is told

    def cancel(self) -> None:
        """Nobody listens any more: the work ends within a token, a wave of experts or a block of a mixer."""
        self.cancelled.set()
