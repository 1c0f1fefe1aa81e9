"""Sends an answer to a client: the events from the worker's thread, until the answer ends or the client disconnects.
`Served` are the objects that the routes share: the models, what is counted, and the threads in which bodies are read.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from ..errors import BadRequestError
from ..files import JsonDict
from ..text.events import CallEnd, Text
from ..text.replay import GivenAnswer
from .admission import Place
from .choice import Loaded
from .embedder import Embedder
from .guard import BUSY, MAX_BODY
from .image_pool import ImagePool
from .listen import FILLER
from .prepare import PreparedRequest, Preparer
from .request import Failed, Finish, Request, ServerEvent, summed
from .running import Job, SharedPrompt
from .switch import ModelSwitch
from .wire.replies import Ids, Reply
from .wire.settings import Body, parse
from .worker import Worker

T = TypeVar("T")
KEEPALIVE = 8.0  # seconds without an event after which a client gets a sign of life
EVENTS = "events"  # key in a request's state: the events of its answers
MOST_UNREAD = 1 << 13  # events that may wait for a client to read
UNREAD = Failed(503, "not_read", "the answer was not read as fast as it was written, and is given up")


class Choice:
    """One of the answers of a reply, in the event loop's thread.

    Attributes:
        last: the last event taken.
    """

    def __init__(self, job: Job, ids: Ids):
        self.job, self.ids = job, ids
        self.last: ServerEvent | None = None
        self._calls: list[CallEnd] = []
        self._text: list[str] = []

    def take(self, event: ServerEvent) -> None:
        self.last = event
        self._calls += [event] if isinstance(event, CallEnd) else []
        self._text += [event.text] if isinstance(event, Text) else []

    def written(self) -> GivenAnswer:
        """The answer as the model wrote it, available after the last event."""
        named = tuple(self.ids.calls[call.index] for call in self._calls if call.index in self.ids.calls)
        calls = tuple((call.name, call.arguments) for call in self._calls)
        return GivenAnswer(named, calls, "".join(self._text), self.job.raw, self.job.prepared.opened)


class Events:
    """The events of the jobs of one request, in the event loop's thread. Making this object puts the jobs in the queue.

    Args:
        prompts: what is answered, each prompt as often as the request asks for; seeds are counted up.

    Attributes:
        choices: the answers, those to the first prompt first.
    """

    def __init__(self, worker: Worker, prompts: Sequence[PreparedRequest], place: Place):
        self._loop, self._worker = asyncio.get_running_loop(), worker
        self._queue: asyncio.Queue[tuple[Choice, ServerEvent]] = asyncio.Queue()
        self._given_up = False
        self._answers, ids = prompts[0].request.answers, Ids()
        self.choices: list[Choice] = []
        for prepared in prompts:
            shared = SharedPrompt(self._answers) if self._answers > 1 else None
            for n in range(self._answers):
                emit, own = partial(self._emit, len(self.choices)), ids.of_choice(len(self.choices))
                job = Job(_seeded(prepared, n), emit, place.client, place.leave, shared)
                self.choices.append(Choice(job, own))
        for choice in self.choices:
            worker.submit(choice.job)

    def _emit(self, index: int, event: ServerEvent) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, self.choices[index], event)

    def _put(self, choice: Choice, event: ServerEvent) -> None:
        if not self._given_up and self._queue.qsize() >= MOST_UNREAD:
            self._given_up = True
            self.cancel()
            self._queue.put_nowait((choice, UNREAD))
        elif not self._given_up:
            self._queue.put_nowait((choice, event))

    async def next(self, seconds: float | None) -> tuple[Choice, ServerEvent] | None:
        """The next event of one of the choices; None after a timeout."""
        try:
            choice, event = await asyncio.wait_for(self._queue.get(), seconds)
        except asyncio.TimeoutError:
            return None
        choice.take(event)
        return choice, event

    @property
    def last(self) -> Finish | Failed | None:
        """How the request ended: the first failure, or the counts of all answers; None while it goes on."""
        lasts = [choice.last for choice in self.choices]
        failed = next((last for last in lasts if isinstance(last, Failed)), None)
        finishes = [last for last in lasts if isinstance(last, Finish)]
        return failed or (summed(finishes, self._answers) if len(finishes) == len(lasts) else None)

    def cancel(self) -> None:
        for choice in self.choices:
            self._worker.cancel(choice.job)


def _seeded(prepared: PreparedRequest, n: int) -> PreparedRequest:
    """The request for the `n`-th answer to a prompt, whose seed is counted up."""
    sampling = prepared.request.sampling
    if sampling.seed is None or not n:
        return prepared
    seed = (sampling.seed + n) % 2**64
    return replace(prepared, request=replace(prepared.request, sampling=replace(sampling, seed=seed)))


class EventStream:
    """An ASGI response that writes a reply as it comes.

    Args:
        events: the events of the request's jobs.
        make_reply: makes what writes one choice in the API's form.
        over: called after the last event of a choice, before the client is told.
        held: resources to release when the answer has ended.
        keepalive: seconds.
    """

    def __init__(
        self,
        events: Events,
        make_reply: Callable[[Ids], Reply],
        over: Callable[[Choice], None],
        held: AsyncExitStack,
        keepalive: float = KEEPALIVE,
    ):
        self.events, self.over, self.held, self.keepalive = events, over, held, keepalive
        self.replies = {choice: make_reply(choice.ids) for choice in events.choices}

    @property
    def _open(self) -> Reply:
        """A reply that is not complete, or the one that ended the stream."""
        replies = list(self.replies.values())
        failed = [reply for reply in replies if reply.answer.failed]
        return [*failed, *(reply for reply in replies if not reply.answer.over), *replies][0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][FILLER] = lambda: self._open.keepalive()
        try:
            await until_gone(receive, self._write(send), self.events.cancel)
        except OSError:
            pass  # the client has gone
        finally:
            await self.held.aclose()

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", self._open.content_type), *HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        last = self.events.last
        total = last if isinstance(last, Finish) else None
        await send({"type": "http.response.body", "body": self._open.end(total)})

    async def _pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        written = loop.time()
        while self.events.last is None:
            got = await self.events.next(max(written + self.keepalive - loop.time(), 0.0))
            pieces = [] if got is None else self.replies[got[0]].events(got[1])
            if not pieces and loop.time() - written >= self.keepalive:
                pieces = [self._open.keepalive()]
            if got is not None and isinstance(got[1], Finish):
                self.over(got[0])
            if pieces:
                written = loop.time()
                yield b"".join(pieces)


async def collect(events: Events) -> dict[Choice, list[ServerEvent]]:
    """All events of each choice."""
    collected: dict[Choice, list[ServerEvent]] = {choice: [] for choice in events.choices}
    while events.last is None:
        if (got := await events.next(None)) is not None:
            collected[got[0]].append(got[1])
    return collected


async def until_gone(receive: Receive, work: Awaitable[T], cancel: Callable[[], None] = lambda: None) -> T | None:
    """The result of `work`; None: it was given up because the client disconnected, whose body must have been read.
    `cancel`: called at the end in any case.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None if working.cancelled() else working.result()


HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


LARGE_BODY = 4 << 20  # bytes; larger bodies are parsed one after the other, because parsed JSON needs more memory


@dataclass
class Served:
    """The objects that the routes use.

    Args:
        models: loads and runs the models.
        embedder: makes vectors of texts, if the server has a model for that.
        keepalive: seconds without an event after which a client gets a sign of life.
        log: called with a line for each request; None: nothing is logged.
    """

    models: ModelSwitch
    embedder: Embedder | None = None
    keepalive: float = KEEPALIVE
    log: Callable[[str], None] | None = None
    started: float = field(default_factory=time.time)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    images: ImagePool = field(default_factory=ImagePool)
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)
    _counter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "count"))
    _counting: int = 0  # bytes of the bodies whose tokens are counted or that wait for it

    async def read(self, http: HttpRequest, make: Callable[[bytes], T]) -> T:
        """Calls `make` with the body in a separate thread."""
        data = await http.body()
        async with self._large if len(data) > LARGE_BODY else contextlib.nullcontext():
            return await asyncio.to_thread(make, data)

    async def prepare(self, http: HttpRequest, preparer: Preparer, asked: Request) -> list[PreparedRequest]:
        """Prepares each prompt of a request in a separate thread.

        Raises:
            BadRequestError: as `Preparer` and `ImagePool.run`.
        """
        if asked.images.sources:
            return await self.images.run(lambda: preparer.each(asked))
        return await self.read(http, lambda _: preparer.each(asked))

    @contextlib.asynccontextmanager
    async def model(self, http: HttpRequest, name: str) -> AsyncIterator[Loaded]:
        """A context manager with the model of that name, which it loads and keeps loaded.

        Raises:
            BadRequestError: the model cannot be loaded.
            ClientDisconnect: the client has gone.
        """
        loaded = await unless_gone(http, self.models.take(name))
        try:
            yield loaded
        finally:
            self.models.give_back(loaded)

    async def count(self, http: HttpRequest, make: Callable[[Preparer, JsonDict], T]) -> T:
        """Calls `make` with the body's JSON in the one thread that only counts tokens: no answer waits for it, and it
        waits for none.

        Raises:
            BadRequestError: the bodies that wait for that thread are too large together, or too many requests wait for
                a model.
        """
        data = await http.body()
        if self._counting + len(data) > MAX_BODY:
            raise BadRequestError(BUSY, None, 503, "overloaded")
        self._counting += len(data)
        loop = asyncio.get_running_loop()
        try:
            body = await loop.run_in_executor(self._counter, parse, data)
            name = Body(body).text("model") or ""
            if (preparer := await self.models.preparer(name)) is not None:
                return await loop.run_in_executor(self._counter, make, preparer, body)
            with self.models.places.take(client_of(http)):
                async with self.model(http, name) as loaded:
                    return await loop.run_in_executor(self._counter, make, loaded.preparer, body)
        finally:
            self._counting -= len(data)


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientDisconnect."""
    result = await until_gone(http.receive, work)
    if result is None:
        raise ClientDisconnect
    return result


def client_of(http: HttpRequest) -> str:
    """The client, as far as the connection identifies it."""
    return f"{http.client.host if http.client else ''} {http.headers.get('user-agent', '')}"
