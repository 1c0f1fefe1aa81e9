"""The common part of the replies of all APIs: the object that writes a stream, and failures in each API's form.

`Ids` makes the ids and the time of one reply; tests can fix both. `encode` makes server-sent events.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from ...errors import BadRequestError, counted
from ...files import JsonDict
from ..request import Failed, Finish, PromptProgress, Request, ServerEvent, TokenLogprob
from .answer import BlockStep, WireAnswer


class Ids:
    """Ids of one reply.

    `index` is the number of the reply's choice that they belong to. `calls` maps the index of each call of a tool to
    the id that the client was given for it, which is what a client names in its next request.

    Args:
        random: makes the part behind the prefix.
        clock: seconds since 1970.
    """

    def __init__(
        self, random: Callable[[], str] = lambda: secrets.token_hex(12), clock: Callable[[], float] = time.time
    ):
        self._random, self._clock = random, clock
        self.calls: dict[int, str] = {}
        self.index, self._reply = 0, dict[str, str]()

    def of_choice(self, index: int) -> "Ids":
        """Ids of another choice of the same reply."""
        other = Ids(self._random, self._clock)
        other.index, other._reply = index, self._reply
        return other

    def reply(self, prefix: str) -> str:
        """The id of the reply, the same for all of its choices."""
        return self._reply.setdefault(prefix, self.make(prefix))

    def make(self, prefix: str) -> str:
        return prefix + self._random()

    def call(self, index: int, prefix: str) -> str:
        """The id of the call `index`, always the same one."""
        if index not in self.calls:
            self.calls[index] = self.make(prefix)
        return self.calls[index]

    def now(self) -> int:
        return int(self._clock())


DONE = b"data: [DONE]\n\n"


def encode(data: object, event: str | None = None) -> bytes:
    """One event; JSON escapes line ends, so its data is one line."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dumps(data)}\n\n".encode("ascii")


def dumps(data: object) -> str:
    """Compact JSON in ASCII: some clients end lines at U+2028 and its like, which JSON need not escape."""
    return json.dumps(data, separators=(",", ":"))


LOST = Failed(500, "server_error", "the answer ended before it was finished; see the server's log")
NO_THREADS = "thread_unsupported_request"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Reply(ABC):
    """One reply in the words of an API, event by event.

    Args:
        request: what is answered.
        ids: of this reply alone; `ids.calls` then says which id each call was given.
    """

    def __init__(self, request: Request, ids: Ids):
        self.request, self.ids = request, ids
        self.answer = WireAnswer()
        self.created = ids.now()

    def events(self, event: ServerEvent) -> list[bytes]:
        """The server-sent events for `event`; none if the API has none for it, or after the last event."""
        if self.answer.over:
            return []
        steps = self.answer.take(event)
        return [*self.opening(event), *(out for step in steps for out in self.step(step)), *self.closing(event)]

    def end(self, total: Finish | None = None) -> bytes:
        """The last bytes of the stream; an answer without a last event has failed. `total`: the counts of all of the
        reply's choices, if there are several.
        """
        pieces, total = [] if self.answer.over else self.events(LOST), total or self.answer.finish
        return b"".join([*pieces, *(self.ending(total) if total else ()), self.tail])

    tail, content_type = b"", b"text/event-stream; charset=utf-8"

    def keepalive(self) -> bytes:
        """An empty event of the API's kind; no bytes after the last event."""
        return b"" if self.answer.over else self.waiting()

    @abstractmethod
    def waiting(self) -> bytes:
        """The event that keeps a client waiting."""

    @abstractmethod
    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        """The events before an event's steps."""

    def ending(self, total: Finish) -> Iterable[bytes]:
        """What comes once, after all choices."""
        return ()

    @abstractmethod
    def step(self, step: BlockStep) -> Iterable[bytes]:
        """One step of the answer."""

    @abstractmethod
    def closing(self, event: ServerEvent) -> Iterable[bytes]:
        """The events after an event's steps."""


class Chunks(Reply):
    """The chunks of a completion of OpenAI's, of a chat or of a plain prompt.

    Attributes:
        prefix: of the reply's id.
        kind: of the object, in the reply that does not stream; a chunk's has `chunk` behind it.
    """

    tail = DONE
    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk: ClassVar[str] = ""

    def __init__(self, request: Request, ids: Ids):
        super().__init__(request, ids)
        self._head = {**self.head(request, ids), "object": self.kind + self.chunk, "created": self.created}

    @classmethod
    def head(cls, request: Request, ids: Ids) -> JsonDict:
        """How the reply that does not stream begins."""
        return {"id": ids.reply(cls.prefix), "object": cls.kind, "created": ids.now(), "model": request.model}

    @abstractmethod
    def empty(self, finish: Finish | None = None) -> JsonDict:
        """A choice without text, which `finish` may end."""

    def told(self, event: ServerEvent) -> Iterable[bytes]:
        """The chunk on the progress of a prompt, if the event is one and the client wants it."""
        if isinstance(event, PromptProgress) and self.request.extra.get("return_progress"):
            yield self.chunk_of([self.empty()], prompt_progress=progress(event, self.answer))

    def closing(self, event: ServerEvent) -> Iterable[bytes]:
        if self.answer.failed:
            yield encode(failure(self.answer))
        if finish := self.answer.finish:
            yield self.chunk_of([self.empty(finish)], timings=timings(finish))

    def ending(self, total: Finish) -> Iterable[bytes]:
        if self.request.extra.get("include_usage"):
            yield self.chunk_of([], usage=openai_usage(total))

    def chunk_of(self, choices: list[JsonDict], **more: object) -> bytes:
        usage = {"usage": None} if self.request.extra.get("include_usage") else {}
        return encode({**self._head, "choices": choices, **usage, **more})


def folded(events: Iterable[ServerEvent]) -> WireAnswer:
    """The answer that all `events` make."""
    answer = WireAnswer()
    for event in events:
        answer.take(event)
    if not answer.over:
        answer.take(LOST)
    return answer


def openai_error(status: int, code: str | None, message: str, param: str | None = None) -> JsonDict:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure(answer: WireAnswer, error: Callable[..., JsonDict] = openai_error) -> JsonDict:
    """The error that a failed answer is, in the form of an API."""
    failed = answer.failed
    assert failed is not None
    return error(failed.status, failed.code, failed.message, failed.param)


def anthropic_error(status: int, code: str | None, message: str, param: str | None = None) -> JsonDict:
    """`code` and `param` are included only where a client acts on them; messages name the field."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code, "unsupported": [param]}} if code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def ollama_error(status: int, code: str | None, message: str, param: str | None = None) -> JsonDict:
    return {"error": message}


def error_body(path: str, status: int, code: str | None, message: str, param: str | None = None) -> JsonDict:
    """The body of an error for a request of `path`."""
    shapes = {"/v1/messages": anthropic_error, "/api/": ollama_error}
    shape = next((shape for start, shape in shapes.items() if path.startswith(start)), openai_error)
    return shape(status, code, message, param)


def error_reply(
    path: str, status: int, code: str | None, message: str, param: str | None = None
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body."""
    body = json.dumps(error_body(path, status, code, message, param)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error_headers(status)}
    return status, [(name.lower().encode(), value.encode()) for name, value in headers.items()], body


def context_exceeded(prompt_tokens: int, context: int, at_least: bool = False) -> BadRequestError:
    """The message for a prompt that leaves no room to answer, with words that clients of both kinds search for.

    `at_least`: the prompt has more tokens, which were not counted.
    """
    rest = " (at least: the rest was not counted)" if at_least else ""
    message = (
        f"prompt is too long: {prompt_tokens} tokens > {context} maximum{rest}; "
        f"this model's maximum context length is {context} tokens here; shorten the prompt, or start the server with a "
        "longer --context, if the model and the memory allow it"
    )
    return BadRequestError(message, code="context_length_exceeded")


def logprob(token: TokenLogprob) -> JsonDict:
    """One token's log-probability with those of the alternatives."""
    own, *others = (
        {"token": one.token, "logprob": one.logprob, "bytes": list(one.data)} for one in (token, *token.top)
    )
    return {**own, "top_logprobs": others}


def queue_full(waiting: int, places: int) -> BadRequestError:
    waits = f"{counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'}"
    message = f"{waits} already, and --queue allows {places}; try again later"
    return BadRequestError(message, None, 429, "rate_limit_exceeded")


def error_headers(status: int) -> dict[str, str]:
    """Headers that belong to an error: when to retry, or how to authenticate."""
    if status in (429, 503):
        return {"Retry-After": "5"}
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}


def counts(finish: Finish) -> JsonDict:
    """How a completion of OpenAI's that does not stream ends."""
    return {"usage": openai_usage(finish), "timings": timings(finish)}


def openai_usage(finish: Finish) -> JsonDict:
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
    }


def with_all_choices(bodies: Sequence[JsonDict], total: Finish) -> JsonDict:
    """One body with the choices of several, and the counts of all of them."""
    choices = [choice for body in bodies for choice in body["choices"]]
    return {**bodies[0], "choices": choices, **counts(total)}


def progress(event: PromptProgress, answer: WireAnswer) -> JsonDict:
    """The progress of the prompt, in llama.cpp's form."""
    cached = answer.accepted.cached_tokens if answer.accepted else 0
    return {"total": event.total, "cache": cached, "processed": event.done}


def timings(finish: Finish) -> JsonDict:
    """The timings that llama.cpp's clients show with an answer, and, if experts are read, counts of the requested
    ones.
    """
    asked = finish.asked
    experts = {"hits": asked.hits, "misses": asked.misses, "bytes_read": round(asked.nbytes)}
    return {
        "cache_n": finish.cached_tokens,
        "prompt_n": finish.prompt_tokens - finish.cached_tokens,
        "prompt_ms": finish.prompt_seconds * 1000,
        "predicted_n": finish.completion_tokens,
        "predicted_ms": finish.completion_seconds * 1000,
        **({"experts": experts} if asked.hits or asked.misses else {}),
    }


def health(ready: bool) -> tuple[int, JsonDict]:
    """HTTP status and body."""
    if ready:
        return 200, {"status": "ok"}
    return 503, {"status": "loading", **openai_error(503, "loading", "the model is being loaded; try again later")}
