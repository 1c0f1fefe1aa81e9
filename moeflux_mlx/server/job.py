"""One request in the queue or in progress: its content, its client, and whether it is cancelled."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..driving.session import PromptEnd
from ..ops.interrupt import leave
from .prepare import PreparedRequest
from .request import ServerEvent


@dataclass(eq=False)
class SharedPrompt:
    """A prompt that several jobs answer, and that is computed for the first of them.

    Args:
        waiting: how many of the jobs have not begun.
        end: what the others begin from, once it is computed.
    """

    waiting: int
    end: PromptEnd | None = None

    def begin(self) -> PromptEnd | None:
        """One of the jobs begins: where its answer begins, or None if it is to compute the prompt."""
        self.waiting -= 1
        end = self.end
        if not self.waiting:
            self.end = None
        return end


@dataclass(eq=False)
class Job:
    """Args:
    prepared: the request.
    emit: takes the events; may be called in any thread.
    client: the client; clients take turns, regardless of the number of their jobs.
    on_begin: called when the job begins, in any thread.
    shared: its prompt, if other jobs answer the same one.
    """

    prepared: PreparedRequest
    emit: Callable[[ServerEvent], None]
    client: str = ""
    on_begin: Callable[[], None] = lambda: None
    shared: SharedPrompt | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    raw: str = ""  # what the model wrote, set before the last event
    thread: int | None = None  # the one that computes its prompt at the moment, by its identifier

    def cancel(self) -> None:
        """Cancels the job; its work ends within a token, a wave of experts or a block of a mixer, on the CPU
        within a piece of these.
        """
        self.cancelled.set()
        if (thread := self.thread) is not None:
            leave(thread)
