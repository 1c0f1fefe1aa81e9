"""The objects that the routes share: the models, what is counted, and the threads in which bodies are read."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ..errors import BadRequestError
from ..files import JsonDict
from .choice import Loaded
from .embedder import Embedder
from .guard import BUSY, MAX_BODY
from .image_pool import ImagePool
from .prepare import PreparedRequest, Preparer
from .reply import KEEPALIVE, until_gone
from .request import Request
from .switch import ModelSwitch
from .wire.settings import Body, parse

T = TypeVar("T")
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
