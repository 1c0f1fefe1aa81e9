"""Converts messages of any API to the form that templates take."""

import json
import re
from collections.abc import Iterable, Sequence

from ...errors import BadRequestError, RequestError
from ...files import JsonDict, JsonValue
from ...text.results import Message, in_order
from .settings import Body, check

# Lines that agents change in the system prompt at each request; with them no prompt would share its beginning with
# another.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*")
_TOTAL_TOKENS = re.compile(r"\n{0,2}<total_tokens>\d+ tokens left</total_tokens>")


def system_text(texts: Iterable[str]) -> str:
    """The texts of a system message joined, without the lines that change at each request."""
    kept = [_TOTAL_TOKENS.sub("", _BILLING.sub("", text)) for text in texts]
    return "\n".join(text for text in kept if text)


def assistant(text: str, reasoning: str | None = None, calls: list[Message] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call(name: str, arguments: JsonDict, id: str | None) -> Message:
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, id: str | None, name: str | None = None) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": id or "", "name": name or ""}


def arguments(fields: Body, key: str) -> JsonDict:
    """A call's arguments, given as an object or as its JSON text.

    A text that is not an object comes from an answer that was cut short. It is kept under "input", because refusing it
    would end the conversation.
    """
    value = fields.get(key)
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = _read(value)
    return dict(Body(value, fields.name(key)).data)


def _read(text: str) -> JsonValue:
    try:
        value = json.loads(text)
        check(value)
    except (ValueError, RecursionError):
        return {"input": text}
    return value


def paired(messages: Sequence[Message], param: str) -> list[Message]:
    """The messages with each result behind its call, as `in_order` has them; `param` is the body's field of both."""
    try:
        return in_order(messages)
    except RequestError as error:
        raise BadRequestError(str(error), param) from error
