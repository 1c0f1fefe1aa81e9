"""The routes: they read and prepare requests, and write replies in the form of each API.

The event loop never computes: reading, rendering and tokenising run in separate threads, the model in the worker's. A
request that cannot be served is refused before the headers of an answer are sent.

`RequestLog` counts each request for the metrics and logs one line for it, without any of its text.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BadRequestError
from ..files import JsonDict
from . import about, page
from .faults import report
from .guard import BodyError, Guard, Rules
from .live import EVERY, Watch
from .prepare import Preparer
from .reply import EVENTS, Choice, Events, EventStream, Served, client_of, collect, unless_gone, until_gone
from .request import Failed, Finish, Request, ServerEvent
from .wire import chat, completions, embeddings, messages, ollama
from .wire.embeddings import EmbeddingRequest
from .wire.replies import Ids, Reply, error_body, error_headers, with_all_choices
from .wire.responses import StoredResponses
from .wire.settings import Body, parse


class Wire(Protocol):
    """An API: how its bodies are read and its answers written. It is a module of `wire`, or an object if the API needs
    state.
    """

    def read(self, body: JsonDict) -> Request: ...
    def stream(self, request: Request, ids: Ids) -> Reply: ...
    def whole(self, request: Request, events: list[ServerEvent], ids: Ids) -> JsonDict: ...


# Headers in which agents name a conversation if their API has no field for it.
SESSION_HEADERS = ("x-claude-code-session-id", "session_id", "x-session-id")


def make_app(served: Served, rules: Rules) -> ASGIApp:
    """The application, guarded."""
    apis: dict[str, Wire] = {
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        "/v1/messages": messages,
        "/v1/responses": StoredResponses(),
        "/api/chat": ollama.Ollama(chats=True),
        "/api/generate": ollama.Ollama(chats=False),
    }
    routes = [Route(path, _bound(partial(_answer, wire=wire), served), methods=["POST"]) for path, wire in apis.items()]
    for path, method, handle in (
        ("/", "GET", _page),
        ("/v1/messages/count_tokens", "POST", _count_tokens),
        ("/v1/models", "GET", about.list_models),
        ("/v1/models/{name:path}", "GET", about.show_model),
        ("/health", "GET", about.tell_health),
        ("/metrics", "GET", about.tell_metrics),
        ("/v1/embeddings", "POST", partial(_embeddings, read=embeddings.read, reply=embeddings.whole)),
        ("/api/embed", "POST", partial(_embeddings, read=ollama.read_embed, reply=ollama.embedded)),
        ("/tokenize", "POST", _tokenize),
        ("/api/tags", "GET", about.list_tags),
        ("/api/show", "POST", about.show_tag),
        ("/api/version", "GET", about.tell_version),
        ("/live", "GET", _live),
    ):
        routes.append(Route(path, _bound(handle, served), methods=[method]))
    handlers = {HTTPException: _http_error, BodyError: _body_error, ClientDisconnect: _left, Exception: _fault}
    app = Starlette(routes=routes, exception_handlers=handlers)
    paths = {route.path for route in routes}
    return RequestLog(Guard(app, rules), paths, served.requests, served.log)


def _bound(
    handle: Callable[[Served, HttpRequest], Awaitable[Response]], served: Served
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handler(request: HttpRequest) -> Response:
        try:
            return await handle(served, request)
        except BadRequestError as error:
            return _refused(request.url.path, error)

    return handler


async def _answer(served: Served, http: HttpRequest, wire: Wire) -> Any:
    def read(data: bytes) -> Request:
        asked = wire.read(parse(data))
        named = next((http.headers[name] for name in SESSION_HEADERS if name in http.headers), None)
        return replace(asked, session=asked.session or named)

    asked = await served.read(http, read)
    asked = replace(asked, model=asked.model or served.models.find("").name)
    if asked.only is not None:
        await _change(served, http, asked)
        return JSONResponse(wire.whole(asked, [Finish(asked.only, 0, 0, 0)], Ids()))
    preparer = await served.models.preparer(asked.model)
    prepared = None if preparer is None else await served.prepare(http, preparer, asked)  # a refusal loads no model
    async with contextlib.AsyncExitStack() as held:
        place = held.enter_context(served.models.places.take(asked.session or client_of(http)))
        loaded = await held.enter_async_context(served.model(http, asked.model))
        if preparer is None or prepared is None or loaded.preparer.files != preparer.files:
            prepared = await served.prepare(http, loaded.preparer, asked)
        else:
            prepared = [loaded.preparer.fitted(one) for one in prepared]
        if (admission := loaded.worker.admission) is not None:
            for one in prepared:
                admission.check(one, asked.answers)
        asked = prepared[0].request
        events = Events(loaded.worker, prepared, place)
        http.scope["state"][EVENTS] = events

        def over(choice: Choice) -> None:
            loaded.preparer.answers.keep(choice.written())

        if asked.stream:
            return EventStream(events, partial(wire.stream, asked), over, held.pop_all(), served.keepalive)
        return await _whole(wire, http, asked, events, over)


async def _change(served: Served, http: HttpRequest, asked: Request) -> None:
    """Loads the model, or lets it go."""
    if asked.only == "unload":
        served.models.release(asked.model)
        return
    served.models.recall(asked.model)
    with served.models.places.take(client_of(http)):
        async with served.model(http, asked.model):
            pass


async def _whole(
    wire: Wire, http: HttpRequest, asked: Request, events: Events, over: Callable[[Choice], None]
) -> Response:
    collected = await until_gone(http.receive, collect(events), events.cancel)
    last = events.last
    if collected is None or last is None:
        return await _left()
    if isinstance(last, Failed):
        failed = next(choice for choice in collected if choice.last is last)
        body = wire.whole(asked, collected[failed], failed.ids)
        return JSONResponse(body, last.status, error_headers(last.status))
    bodies = [wire.whole(asked, events, choice.ids) for choice, events in collected.items()]  # names the calls
    for choice in collected:
        over(choice)
    return JSONResponse(bodies[0] if len(bodies) == 1 else with_all_choices(bodies, last))


async def _count_tokens(served: Served, http: HttpRequest) -> Response:
    def count(preparer: Preparer, body: JsonDict) -> int | Callable[[], int]:
        asked = messages.read(body)
        return partial(preparer.count, asked) if asked.images.sources else preparer.count(asked)

    counted = await served.count(http, count)
    return JSONResponse(messages.count(counted if isinstance(counted, int) else await served.images.run(counted)))


class LongReply(JSONResponse):
    """JSON that Python writes, so that other threads go on meanwhile; C would hold the interpreter for seconds."""

    def render(self, content: object) -> bytes:
        return "".join(json.JSONEncoder(allow_nan=False, separators=(",", ":")).iterencode(content)).encode("ascii")


async def _embeddings(
    served: Served,
    http: HttpRequest,
    read: Callable[[JsonDict], EmbeddingRequest],
    reply: Callable[[EmbeddingRequest, str, np.ndarray, int], JsonDict],
) -> Response:
    embedder = served.embedder
    if embedder is None:
        message = "this server has no embedding model; start it with --embedding-model ORG/NAME"
        raise BadRequestError(message, "model", 404, "model_not_found")
    asked = await served.read(http, lambda data: read(parse(data)))
    work = embedder(asked.inputs, truncate=asked.truncate, dimensions=asked.dimensions)
    vectors, tokens = await unless_gone(http, work)
    return await asyncio.to_thread(lambda: LongReply(reply(asked, embedder.name, vectors, tokens)))


async def _tokenize(served: Served, http: HttpRequest) -> Response:
    """The token ids of a text, as llama.cpp replies."""

    def reply(preparer: Preparer, body: JsonDict) -> Response:
        fields = Body(body)
        content = fields.text("content")
        if content is None:
            raise fields.wrong("content", "a text")
        return JSONResponse({"tokens": preparer.encode(content, fields.flag("add_special"))})

    return await served.count(http, reply)


async def _page(served: Served, http: HttpRequest) -> Response:
    headers = {"Content-Security-Policy": page.csp(), "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return HTMLResponse(page.content(), headers=headers)


async def _live(served: Served, http: HttpRequest) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        with served.models.watched() as watch:
            while True:
                await asyncio.sleep(EVERY)
                if (picture := _picture(served, watch)) is not None:
                    yield f"data: {json.dumps(picture)}\n\n".encode()

    if http.method == "HEAD":
        return Response(media_type="text/event-stream")
    return StreamingResponse(pieces(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _picture(served: Served, watch: Watch) -> JsonDict | None:
    """The latest picture for the page, if there is one."""
    switch = served.models
    embedding = served.embedder and served.embedder.status
    if switch.loaded is None:
        loading = switch.loading.name if switch.loading else None
        return {"loading": loading, "queue": switch.queue, "failures": switch.failures, "embedding": embedding}
    loaded, forecast = switch.loaded, switch.loaded.forecast and asdict(switch.loaded.forecast)
    more = {"model": loaded.choice.name, "embedding": embedding, "forecast": forecast}
    return watch.latest and {**watch.latest, **more}


def _refused(path: str, error: BadRequestError) -> Response:
    body = error_body(path, error.status, error.code, str(error), error.param)
    return JSONResponse(body, error.status, error_headers(error.status))


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    says = {404: f"there is no {request.url.path[:100]} here", 405: f"{request.method} is not for this path"}
    message = says.get(error.status_code, error.detail)
    return JSONResponse(
        error_body(request.url.path, error.status_code, None, message), error.status_code, error.headers
    )


async def _body_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BodyError)
    # The rest of the body is not read, so the connection cannot be reused.
    headers = {**error_headers(error.status), "Connection": "close"}
    return JSONResponse(error_body(request.url.path, error.status, None, str(error)), error.status, headers)


async def _left(*_: Any) -> Response:
    """The reply that the metrics count for a disconnected client; nobody reads it."""
    return Response(status_code=LEFT)


async def _fault(request: HttpRequest, error: Exception) -> Response:
    report("a request failed", error)
    message = f"the server has a fault ({type(error).__name__}); look at its log"
    return JSONResponse(error_body(request.url.path, 500, "server_error", message), 500)


LEFT = 499  # the status of a disconnected client, as in nginx
LONGEST = 100  # shown characters of an unknown path


class RequestLog:
    """Args:
    app: the application.
    paths: the paths that are served.
    counts: (path, status) -> number of answers.
    write: called with a line for each request that asks for something, and for each refusal; None: nothing is logged.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        counts: Counter[tuple[str, int]],
        write: Callable[[str], None] | None = None,
    ):
        self.app = app
        self._paths, self._counts, self._write = paths, counts, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), LEFT

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._counts[scope["path"] if scope["path"] in self._paths else "other", status] += 1
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            if self._write and (scope["method"] == "POST" or (status >= 400 and scope["path"] != "/health")):
                self._write(_line(scope["path"], status, scope["state"].get(EVENTS), time.monotonic() - began))


def _line(path: str, status: int, events: Events | None, seconds: float) -> str:
    last = events.last if events else None
    if events and not isinstance(last, Finish):
        status = last.status if isinstance(last, Failed) else LEFT
    parts = [f"{seconds:.1f} s"]
    if isinstance(last, Finish):
        counts = (last.prompt_tokens, "tokens in"), (last.cached_tokens, "cached"), (last.completion_tokens, "out")
        parts = [*(f"{count} {what}" for count, what in counts), *parts]
    written = path if path.isprintable() and path.isascii() else ascii(path)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {written[:LONGEST]} {status}: {', '.join(parts)}"
