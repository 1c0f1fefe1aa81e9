"""Server-sent events as bytes."""

import json

from ...files import JsonValue

DONE = b"data: [DONE]\n\n"


def encode(data: JsonValue, event: str | None = None) -> bytes:
    """One event; JSON escapes line ends, so its data is one line."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dumps(data)}\n\n".encode("ascii")


def dumps(data: JsonValue) -> str:
    """Compact JSON in ASCII: some clients end lines at U+2028 and its like, which JSON need not escape."""
    return json.dumps(data, separators=(",", ":"))
