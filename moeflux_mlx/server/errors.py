"""The error that a client gets if it cannot be served, in the form of its API."""

import json

from ..files import JsonDict
from .wire import messages, ollama
from .wire.replies import error_headers, openai_error


def error_body(path: str, status: int, code: str | None, message: str, param: str | None = None) -> JsonDict:
    """The body of an error for a request of `path`."""
    shapes = {"/v1/messages": messages.error, "/api/": ollama.error}
    shape = next((shape for start, shape in shapes.items() if path.startswith(start)), openai_error)
    return shape(status, code, message, param)


def error_reply(
    path: str, status: int, code: str | None, message: str, param: str | None = None
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body."""
    body = json.dumps(error_body(path, status, code, message, param)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error_headers(status)}
    return status, [(name.lower().encode(), value.encode()) for name, value in headers.items()], body
