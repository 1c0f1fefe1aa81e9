"""Counts each request for the metrics and logs one line for it, without any of its text."""

import time
from collections import Counter
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .reply import EVENTS, Events
from .request import Failed, Finish

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
