"""The routes: they read and prepare requests, and write replies in the form of each API.

The event loop never computes: reading, rendering and tokenising run in separate threads, the model in the worker's. A
request that cannot be served is refused before the headers of an answer are sent.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import BadRequestError
from ..files import JsonDict
from ..planning.machine import used_memory
from . import page
from .errors import error_body
from .faults import report
from .guard import BUSY, MAX_BODY, BodyError, Guard, Rules
from .image_pool import ImagePool
from .live import EVERY, Watch
from .log import LEFT, RequestLog
from .prepare import PreparedRequest, Preparer
from .reply import EVENTS, KEEPALIVE, Events, EventStream, disconnected, whole
from .request import Failed, Request, ServerEvent
from .switch import Loaded, ModelSwitch
from .wire import chat, completions, health, messages, metrics, models, tokenize
from .wire.fields import Body, parse
from .wire.ids import Ids
from .wire.replies import Reply, error_headers
from .wire.responses_items import StoredResponses


class Wire(Protocol):
    """An API: how its bodies are read and its answers written. It is a module of `wire`, or an object if the API needs
    state.
    """

    def read(self, body: JsonDict) -> Request: ...
    def stream(self, request: Request, ids: Ids) -> Reply: ...
    def whole(self, request: Request, events: list[ServerEvent], ids: Ids) -> JsonDict: ...


# Headers in which agents name a conversation if their API has no field for it.
SESSION_HEADERS = ("x-claude-code-session-id", "session_id", "x-session-id")
T = TypeVar("T")
LARGE_BODY = 4 << 20  # bytes; larger bodies are parsed one after the other, because parsed JSON needs more memory


@dataclass
class Served:
    """The objects that the routes use.

    Args:
        models: loads and runs the models.
        keepalive: seconds without an event after which a client gets a sign of life.
        log: called with a line for each request; None: nothing is logged.
    """

    models: ModelSwitch
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

    async def prepare(self, http: HttpRequest, preparer: Preparer, asked: Request) -> PreparedRequest:
        """Prepares a request in a separate thread. Raises BadRequestError: as `Preparer` and `ImagePool.run`."""
        if asked.images.sources:
            return await self.images.run(lambda: preparer(asked))
        return await self.read(http, lambda _: preparer(asked))

    @contextlib.asynccontextmanager
    async def model(self, http: HttpRequest, name: str) -> AsyncIterator[Loaded]:
        """A context manager with the model of that name, which it loads and keeps loaded.

        Raises:
            BadRequestError: the model cannot be loaded.
            ClientDisconnect: the client has gone.
        """
        taking = asyncio.ensure_future(self.models.take(name))
        gone = asyncio.ensure_future(disconnected(http.receive))
        try:
            await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (taking, gone):
                task.cancel()
            await asyncio.gather(taking, gone, return_exceptions=True)
        if taking.cancelled():
            raise ClientDisconnect
        loaded = taking.result()
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
            with self.models.places.take(_client(http)):
                async with self.model(http, name) as loaded:
                    return await loop.run_in_executor(self._counter, make, loaded.preparer, body)
        finally:
            self._counting -= len(data)


def make_app(served: Served, rules: Rules) -> ASGIApp:
    """The application, guarded."""
    apis: dict[str, Wire] = {
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        "/v1/messages": messages,
        "/v1/responses": StoredResponses(),
    }
    routes = [Route(path, _answering(served, path, wire), methods=["POST"]) for path, wire in apis.items()]
    for path, method, handle in (
        ("/", "GET", _page),
        ("/v1/messages/count_tokens", "POST", _count_tokens),
        ("/v1/models", "GET", _models),
        ("/v1/models/{name:path}", "GET", _model),
        ("/health", "GET", _health),
        ("/metrics", "GET", _metrics),
        ("/tokenize", "POST", _tokenize),
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


def _answering(served: Served, path: str, wire: Wire) -> Callable[[HttpRequest], Awaitable[Any]]:
    async def handler(request: HttpRequest) -> Any:
        try:
            return await _answer(served, wire, request)
        except BadRequestError as error:
            return _refused(path, error)

    return handler


async def _answer(served: Served, wire: Wire, http: HttpRequest) -> Any:
    def read(data: bytes) -> Request:
        asked = wire.read(parse(data))
        named = next((http.headers[name] for name in SESSION_HEADERS if name in http.headers), None)
        return replace(asked, session=asked.session or named)

    asked = await served.read(http, read)
    asked = replace(asked, model=asked.model or served.models.find("").name)
    preparer = await served.models.preparer(asked.model)
    prepared = None if preparer is None else await served.prepare(http, preparer, asked)  # a refusal loads no model
    async with contextlib.AsyncExitStack() as held:
        place = held.enter_context(served.models.places.take(asked.session or _client(http)))
        loaded = await held.enter_async_context(served.model(http, asked.model))
        if preparer is None or prepared is None or loaded.preparer.files != preparer.files:
            prepared = await served.prepare(http, loaded.preparer, asked)
        else:
            prepared = loaded.preparer.fitted(prepared)
        asked = prepared.request
        events, ids = Events(loaded.worker, prepared, place), Ids()
        http.scope["state"][EVENTS] = events

        def over() -> None:
            loaded.preparer.remember(prepared, events.written(ids))

        if asked.stream:
            return EventStream(events, wire.stream(asked, ids), over, held.pop_all(), served.keepalive)
        return await _whole(wire, http, asked, events, ids, over)


def _client(http: HttpRequest) -> str:
    """The client, as far as the connection identifies it."""
    return f"{http.client.host if http.client else ''} {http.headers.get('user-agent', '')}"


async def _whole(
    wire: Wire, http: HttpRequest, asked: Request, events: Events, ids: Ids, over: Callable[[], None]
) -> Response:
    collected = await whole(events, http.receive)
    if collected is None:
        return await _left()
    last = collected[-1]
    status = last.status if isinstance(last, Failed) else 200
    body = wire.whole(asked, collected, ids)  # names the calls
    if status == 200:
        over()
    return JSONResponse(body, status, error_headers(status))


async def _count_tokens(served: Served, http: HttpRequest) -> Response:
    def count(preparer: Preparer, body: JsonDict) -> int | Callable[[], int]:
        asked = messages.read(body)
        return partial(preparer.count, asked) if asked.images.sources else preparer.count(asked)

    counted = await served.count(http, count)
    return JSONResponse(messages.count(counted if isinstance(counted, int) else await served.images.run(counted)))


async def _tokenize(served: Served, http: HttpRequest) -> Response:
    def reply(preparer: Preparer, body: JsonDict) -> Response:
        asked = tokenize.read(body)
        tokens, spelt = preparer.encode(asked.content, asked.add_special), preparer.tokenizer.token_bytes
        pieces = [spelt(token).decode(errors="replace") for token in tokens] if asked.with_pieces else None
        return JSONResponse(tokenize.whole(tokens, pieces))

    return await served.count(http, reply)


def _description(served: Served, name: str) -> JsonDict:
    switch = served.models
    described, context = switch.descriptions.get(name), switch.choices[name].context
    features = asdict(described.features) if described else None
    context = described.preparer.context if described else context
    return models.model(name, served.started, context, switch.status(name), features)


async def _models(served: Served, http: HttpRequest) -> Response:
    return JSONResponse(models.listing([_description(served, name) for name in served.models.choices]))


async def _model(served: Served, http: HttpRequest) -> Response:
    asked = http.path_params["name"]
    if not asked:
        return await _models(served, http)
    return JSONResponse({**_description(served, served.models.find(asked).name), "id": asked})


async def _health(served: Served, http: HttpRequest) -> Response:
    status, body = health.health(served.models.ready)
    return JSONResponse(body, status, error_headers(status))


async def _metrics(served: Served, http: HttpRequest) -> Response:
    switch, totals = served.models, served.models.totals
    loaded = switch.loaded
    running = loaded.worker.state.running if loaded else []
    values: JsonDict = {
        "requests_total": {
            (("path", path), ("status", str(status))): n for (path, status), n in served.requests.items()
        },
        "requests_running": len(running),
        "requests_in_prompt": sum(one.in_prompt for one in running),
        "requests_waiting": switch.queue,
        "requests_cancelled_total": totals.cancelled,
        "requests_failed_total": totals.failed,
        "prompt_tokens_total": totals.prompt_tokens,
        "prompt_tokens_cached_total": totals.cached_tokens,
        "prompt_seconds_total": totals.prompt_seconds,
        "tokens_generated_total": totals.generated_tokens,
        "generation_seconds_total": totals.answer_seconds,
        "steps_total": totals.steps,
        "model_loaded": {(("model", name),): int(switch.status(name)["value"] == "loaded") for name in switch.choices},
        "memory_used_bytes": used_memory(),
    }
    if loaded is not None:
        stats, plan, experts = loaded.engine.experts.stats, loaded.engine.plan, loaded.engine.experts
        drafting = loaded.engine.model.drafting
        values |= {
            "draft_steps_total": {(("drafts", str(i)),): n for i, n in enumerate(drafting.steps)},
            "drafts_checked_total": drafting.checked,
            "drafts_taken_total": drafting.taken,
            "memory_planned_bytes": plan.total,
            "expert_pool_bytes": experts.pool_bytes,
            "expert_bytes_given_back_total": stats.given_back,
            "expert_host_bytes": experts.host_bytes,
            "expert_hits_total": stats.hits,
            "expert_host_hits_total": stats.host_hits,
            "expert_bytes_copied_total": stats.host_bytes,
            "expert_misses_total": stats.misses,
            "expert_bytes_read_total": stats.bytes_read,
            "experts_warmed_total": stats.warmed,
            "experts_warmed_used_total": stats.warm_hits,
            "expert_wait_seconds_total": stats.wait_seconds,
        }
    return PlainTextResponse(metrics.text(values, metrics.HELP), media_type=metrics.CONTENT_TYPE)


async def _page(served: Served, http: HttpRequest) -> Response:
    headers = {"Content-Security-Policy": page.csp(), "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return HTMLResponse(page.content(), headers=headers)


async def _live(served: Served, http: HttpRequest) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        with served.models.watched() as watch:
            while True:
                await asyncio.sleep(EVERY)
                if (picture := _picture(served.models, watch)) is not None:
                    yield f"data: {json.dumps(picture)}\n\n".encode()

    if http.method == "HEAD":
        return Response(media_type="text/event-stream")
    return StreamingResponse(pieces(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _picture(switch: ModelSwitch, watch: Watch) -> JsonDict | None:
    """The latest picture for the page, if there is one."""
    if switch.loaded is None:
        loading = switch.loading.name if switch.loading else None
        return {"loading": loading, "queue": switch.queue, "failures": switch.failures}
    return watch.latest and {**watch.latest, "model": switch.loaded.choice.name}


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
