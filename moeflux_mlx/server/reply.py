"""Sends an answer to a client: the events from the worker's thread, until the answer ends or the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import Receive, Scope, Send

from ..text.events import CallEnd, Text
from .admission import Place
from .job import Job
from .listen import FILLER
from .prepare import PreparedRequest, WrittenAnswer
from .request import Failed, Finish, ServerEvent
from .wire.ids import Ids
from .wire.replies import Reply
from .worker import Worker

KEEPALIVE = 8.0  # seconds without an event after which a client gets a sign of life
EVENTS = "events"  # key in a request's state: the events of its answers
MOST_UNREAD = 1 << 13  # events that may wait for a client to read
UNREAD = Failed(503, "not_read", "the answer was not read as fast as it was written, and is given up")


class Events:
    """The events of one job, in the event loop's thread. Making this object puts the job in the queue.

    Attributes:
        last: the last event taken.
    """

    def __init__(self, worker: Worker, prepared: PreparedRequest, place: Place):
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[ServerEvent] = asyncio.Queue()

        def emit(event: ServerEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._put, event)

        self._given_up = False
        self.last: ServerEvent | None = None
        self._calls: list[CallEnd] = []
        self._text: list[str] = []
        self._worker, self.job = worker, Job(prepared, emit, place.client, place.leave)
        worker.submit(self.job)

    def _put(self, event: ServerEvent) -> None:
        if not self._given_up and self._queue.qsize() >= MOST_UNREAD:
            self._given_up = True
            self.cancel()
            self._queue.put_nowait(UNREAD)
        elif not self._given_up:
            self._queue.put_nowait(event)

    async def next(self, seconds: float | None) -> ServerEvent | None:
        """The next event; None after a timeout."""
        try:
            event = self.last = await asyncio.wait_for(self._queue.get(), seconds)
        except asyncio.TimeoutError:
            return None
        self._calls += [event] if isinstance(event, CallEnd) else []
        self._text += [event.text] if isinstance(event, Text) else []
        return event

    def written(self, ids: Ids) -> WrittenAnswer:
        """The answer as the model wrote it, available after the last event; `ids` are the client's ids of the calls."""
        named = tuple(ids.calls[call.index] for call in self._calls if call.index in ids.calls)
        return WrittenAnswer(named, self._calls, "".join(self._text), self.job.raw)

    def cancel(self) -> None:
        self._worker.cancel(self.job)


class EventStream:
    """An ASGI response that writes a reply as it comes.

    Args:
        events: the job's events.
        reply: writes them in the API's form.
        over: called after the last event, before the client is told.
        held: resources to release when the answer has ended.
        keepalive: seconds.
    """

    def __init__(
        self,
        events: Events,
        reply: Reply,
        over: Callable[[], None],
        held: AsyncExitStack,
        keepalive: float = KEEPALIVE,
    ):
        self.events, self.reply, self.over, self.held, self.keepalive = events, reply, over, held, keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][FILLER] = self.reply.keepalive
        gone = asyncio.ensure_future(disconnected(receive))
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait((gone, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except OSError:
            pass  # the client has gone
        finally:
            self.events.cancel()
            for task in (gone, writing):
                task.cancel()
            await asyncio.gather(gone, writing, return_exceptions=True)
            await self.held.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self.reply.end()})

    async def _pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        written = loop.time()
        event: Any = None
        while not isinstance(event, (Finish, Failed)):
            event = await self.events.next(max(written + self.keepalive - loop.time(), 0.0))
            pieces = [] if event is None else self.reply.events(event)
            if not pieces and loop.time() - written >= self.keepalive:
                pieces = [self.reply.keepalive()]
            if isinstance(event, Finish):
                self.over()
            if pieces:
                written = loop.time()
                yield b"".join(pieces)


async def whole(events: Events, receive: Receive) -> list[ServerEvent] | None:
    """All events; None if the client disconnects before the last one."""
    gone = asyncio.ensure_future(disconnected(receive))
    collecting = asyncio.ensure_future(_collect(events))
    try:
        await asyncio.wait((gone, collecting), return_when=asyncio.FIRST_COMPLETED)
        return collecting.result() if collecting.done() else None
    finally:
        events.cancel()
        for task in (gone, collecting):
            task.cancel()
        await asyncio.gather(gone, collecting, return_exceptions=True)


async def _collect(events: Events) -> list[ServerEvent]:
    collected: list[ServerEvent] = []
    while not collected or not isinstance(collected[-1], (Finish, Failed)):
        event = await events.next(None)
        collected += [] if event is None else [event]
    return collected


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
