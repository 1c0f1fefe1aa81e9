"""Checks requests before they are read: address, origin, key and size of the body.

It is pure ASGI, so that the application learns when a client disconnects. A page of another site cannot use the server:
its requests have its Origin or a Sec-Fetch-Site header, or, if its name was bound to this machine's address (DNS
rebinding), its Host.
"""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .wire.replies import error_reply

MAX_BODY = 64 << 20
MAX_BODIES = 256 << 20
BODY_SECONDS = 60.0  # seconds in which a body must arrive
OPEN_PATHS = ("/", "/health")  # allowed without a key, because they reveal nothing
LOCAL = ("localhost", "127.0.0.1", "::1")
OWN_SITES = ("none", "same-origin")  # values that browsers send if no other site's page made the request
# A Host header: an IPv6 address in brackets or a name, and a port; no other parts of a URL.
HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[0-9a-z._-]+))(:[0-9]*)?")
BUSY = "the requests under way hold as much as may be held; try again later"


class BodyError(Exception):
    """Raised by `receive`: the body is too large or too slow, or there are too many."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Rules:
    """Args:
    hosts: allowed host names besides addresses and localhost, in lower case.
    origins: origins of other sites' pages that may use the server, in lower case; "*" allows all.
    key: the key that requests must have; None: no key.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    key: str | None = None


class Guard:
    """Args:
    app: the application to guard.
    rules: the rules to check.
    max_body: the most bytes of a body.
    body_seconds: seconds in which a body must arrive.
    max_bodies: the most bytes of the bodies of all current requests together.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: Rules,
        max_body: int = MAX_BODY,
        body_seconds: float = BODY_SECONDS,
        max_bodies: int = MAX_BODIES,
    ):
        self.app, self.rules = app, rules
        self.max_body, self.body_seconds, self.max_bodies = max_body, body_seconds, max_bodies
        self.held = 0  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        allowed = self._cors(headers.get("origin"), headers.get("access-control-request-headers", ""))
        send = _with_headers(send, allowed)
        refused = self._refusal(scope, headers, allowed)
        if refused is not None:
            await _answer(send, *error_reply(scope["path"], *refused))
        elif scope["method"] == "OPTIONS" and allowed:
            await _answer(send, 204, [], b"")
        else:
            body = _Body(receive, self)
            try:
                await self.app(scope, body, send)
            finally:
                self.held -= body.size

    def hold(self, nbytes: int) -> None:
        """Counts more bytes of a body, which is held until its request is answered.

        Raises:
            BodyError: all bodies together have become too large.
        """
        self.held += nbytes
        if self.held > self.max_bodies:
            raise BodyError(503, BUSY)

    def _refusal(
        self, scope: Scope, headers: dict[str, str], allowed: list[tuple[bytes, bytes]]
    ) -> tuple[int, str | None, str] | None:
        """Status, code and message of a refusal; None if the request may pass."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._knows(_name(host)):
            return 403, "host_not_allowed", "this Host is not served here; name it with --allowed-host"
        if origin is not None and not allowed and not _same(origin, host):
            return 403, "origin_not_allowed", "pages of this Origin may not ask; name it with --cors-origin"
        if scope["method"] == "OPTIONS" and allowed:
            return None
        if headers.get("sec-fetch-site", "none") not in OWN_SITES and not allowed and scope["path"] not in OPEN_PATHS:
            return 403, "origin_not_allowed", "pages of other sites may not ask; name theirs with --cors-origin"
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return 401, "invalid_api_key", "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return self._body_refusal(scope, headers)

    def _body_refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str | None, str] | None:
        if scope["method"] != "POST":
            return None
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return 415, "unsupported_media_type", "the Content-Type must be application/json"
        if headers.get("content-encoding", "identity").lower() != "identity":
            return 415, "unsupported_media_type", "a body that is encoded is not taken; send it as it is"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body:
            return 413, "request_too_large", f"the body may have {self.max_body} bytes"
        if length.isdecimal() and self.held + int(length) > self.max_bodies:
            return 503, "overloaded", BUSY
        return None

    def _knows(self, name: str) -> bool:
        """Whether the host is allowed. The owner of a name can bind it to any address, so names are checked and
        addresses are not.
        """
        return name in LOCAL or _is_address(name) or name in self.rules.hosts

    def _has_key(self, headers: dict[str, str]) -> bool:
        key = self.rules.key
        if key is None:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        keys = (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        return any([hmac.compare_digest(one.encode(errors="replace"), key.encode()) for one in keys])

    def _cors(self, origin: str | None, asked: str) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of `origin` read the answer; none if it may not. It may send any headers, because
        clients have many of their own.
        """
        if origin is None or not {"*", origin.lower()} & set(self.rules.origins):
            return []
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", asked.encode("latin-1") or b"authorization, content-type, x-api-key"),
            (b"vary", b"Origin"),
        ]


class _Body:
    """A `receive` that limits the bytes and the time of a body."""

    def __init__(self, receive: Receive, guard: Guard):
        self._receive, self._guard = receive, guard
        self.size, self._whole = 0, False
        self._until: float | None = None

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        seconds, most = self._guard.body_seconds, self._guard.max_body
        self._until = self._until or loop.time() + seconds
        try:
            message = await asyncio.wait_for(self._receive(), self._until - loop.time())
        except asyncio.TimeoutError:
            raise BodyError(408, f"the body did not arrive within {seconds:g} s") from None
        nbytes = len(message.get("body", b""))
        self.size += nbytes
        self._whole = not message.get("more_body", False)
        self._guard.hold(nbytes)
        if self.size > most:
            raise BodyError(413, f"the body is too large; at most {most} bytes")
        return message


def _name(host: str) -> str:
    """The host of a Host header, without port and brackets; "" if the header is invalid."""
    match = HOST.fullmatch(host.lower())
    return (match["address"] or match["name"].rstrip(".")) if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    """Whether a page of `origin` was served under this Host."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _with_headers(send: Send, added: list[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
