"""Reads a body of /v1/messages: turns Anthropic's blocks into messages, with tool results first."""

from collections.abc import Mapping

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject
from ...text.results import Message
from ..request import Request
from . import conversation, settings, tools
from .fields import Body, check, shown
from .images import without_images
from .parts import text_of, texts, unserved
from .replies import NO_THREADS

MOST_NAMED = 8  # tools, in the message that refuses them
# Blocks of a server's own tools, or that only their author can read; they are left out.
_DROPPED = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")


def read(body: JsonObject) -> Request:
    """The request that a body makes, also one for count_tokens."""
    check(body)
    body, images = without_images(body, "messages")
    fields = Body(body)
    _refuse_threads(fields)
    variables = settings.template_variables(fields)
    offered, choice = tools.chosen(_tools(fields), tools.anthropic_choice(fields))
    picked, config = fields.object("tool_choice"), fields.object("output_config")
    return Request(
        api="messages",
        model=fields.text("model") or "",
        messages=_messages(fields),
        tools=offered,
        tool_choice=choice,
        parallel_tool_calls=not (picked and picked.flag("disable_parallel_tool_use")),
        max_tokens=settings.token_limit(fields),
        stop=settings.stops(fields, "stop_sequences"),
        sampling=settings.sampling(fields),
        template_variables=variables,
        thinking=settings.thinking(fields, variables),
        effort=settings.effort(config, "effort"),
        schema=settings.structure(_format(fields)),
        images=images,
        stream=fields.flag("stream"),
    )


def _refuse_threads(fields: Body) -> None:
    """Refuses threads; clients then send the whole conversation."""
    if fields.get("thread") is not None:
        message = "this server keeps no conversations; leave thread out, and send all messages"
        raise BadRequestError(message, "thread", code=NO_THREADS)


def _format(fields: Body) -> Body | None:
    """The required form of the answer, under its current or its former name."""
    config = fields.object("output_config")
    return (config and config.object("format")) or fields.object("output_format")


def _tools(fields: Body) -> list[tools.Tool]:
    """The client's own tools. Tools with a type of Anthropic's run on its servers or have a schema that only its models
    know.
    """
    items = list(fields.objects("tools"))
    others = [shown(kind) for item in items if (kind := item.text("type") or "custom") != "custom"]
    if others:
        names = ", ".join(others[:MOST_NAMED])
        message = f"this server has no tools of its own: leave out those of type {names}, or send an input_schema"
        raise BadRequestError(message, "tools")
    return [tools.tool(item, "input_schema") for item in items]


def _messages(fields: Body) -> list[Message]:
    system = conversation.system_text(texts(fields, "system"))
    messages = [{"role": "system", "content": system}] if system else []
    items = list(fields.objects("messages"))
    if not items:
        raise fields.wrong("messages", "at least one message")
    for item in items:
        messages += _message(item)
    if not messages:
        raise BadRequestError("messages hold nothing that a model can read; send a text", "messages")
    return conversation.paired(messages, "messages")


def _message(item: Body) -> list[Message]:
    role = item.required_text("role")
    if role == "user":
        return _User().messages(item)
    if role == "assistant":
        return _Assistant().messages(item)
    if role in ("system", "developer"):
        text = conversation.system_text(texts(item, "content"))
        return [{"role": "system", "content": text}] if text else []
    raise item.wrong("role", "user, assistant or system")


def _passed_over(part: Body) -> None:
    return None


def _others(item: Body) -> JsonDict:
    """Readers of the blocks that are left out, such as results of a server's tools."""
    value = item.get("content")
    kinds = (
        [part.get("type") for part in value if isinstance(part, Mapping)] if isinstance(value, (list, tuple)) else []
    )
    results = (kind for kind in kinds if isinstance(kind, str) and kind.endswith("_tool_result"))
    return dict.fromkeys([*_DROPPED, *results], _passed_over)


class _User:
    """Reads a user's message, which holds results of tools too."""

    def __init__(self) -> None:
        self.results: list[Message] = []

    def messages(self, item: Body) -> list[Message]:
        readers = {**_others(item), "tool_result": self._result, "document": _document}
        said = "\n".join(texts(item, "content", readers))
        # A message with only results adds no user message; an empty one still does.
        return [*self.results, *([{"role": "user", "content": said}] if said or not self.results else [])]

    def _result(self, part: Body) -> None:
        readers = {"document": _document, "tool_reference": lambda part: part.text("tool_name")}
        text = "\n".join(texts(part, "content", readers))
        if part.flag("is_error") and "error" not in text.lower():
            text = f"Error: {text}"
        self.results.append(conversation.result(text, part.text("tool_use_id")))


class _Assistant:
    """Reads an assistant's message: thoughts, text and calls, in any order."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.calls: list[Message] = []

    def messages(self, item: Body) -> list[Message]:
        readers = {**_others(item), "thinking": self._thought, "tool_use": self._call}
        said = "\n".join(texts(item, "content", readers))
        return [conversation.assistant(said, "\n".join(self.thoughts), self.calls)]

    def _thought(self, part: Body) -> None:
        if text := part.text("thinking"):
            self.thoughts.append(text)

    def _call(self, part: Body) -> None:
        arguments = conversation.arguments(part, "input")
        self.calls.append(conversation.call(part.required_text("name"), arguments, part.text("id")))


def _document(part: Body) -> str | None:
    source = part.object("source")
    if source is None or source.text("type") not in ("text", "content"):
        raise unserved(part, "document")
    return source.text("data") if source.text("type") == "text" else text_of(source, "content")
