"""Reads a body of /v1/responses: turns a list of items into messages.

Converts tools of /v1/responses to functions and back: a custom tool takes one text, a namespace contains several
tools.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject
from ...text.results import Message
from ..request import Request
from . import parts, settings
from .parts import text_of, texts, without_images
from .settings import Body

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class Known:
    """A tool as the client names it; the model gets its flat name."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat(name: str, namespace: str | None) -> str:
    """One name for a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def offered(body: Body) -> tuple[list[parts.Tool], dict[str, Known]]:
    """The functions, and a dict from flat name to the client's tool; tools that OpenAI's server would run are left
    out.
    """
    functions: list[parts.Tool] = []
    known: dict[str, Known] = {}
    for item in body.objects("tools"):
        _add(item, None, functions, known)
    return functions, known


def _add(item: Body, namespace: str | None, functions: list[parts.Tool], known: dict[str, Known]) -> None:
    kind = item.required_text("type")
    if kind == "namespace" and namespace is None:
        for inner in item.objects("tools"):
            _add(inner, item.required_text("name"), functions, known)
    if kind not in ("function", "custom"):
        return
    item = item.object(kind) or item
    name = item.required_text("name")
    unique = flat(name, namespace)
    if unique in known:
        raise BadRequestError(f"two tools are called {unique!r}; give each its own name", item.name("name"))
    known[unique] = Known(name, namespace, kind == "custom")
    functions.append(_custom(item, unique) if kind == "custom" else parts.tool(item, name=unique))


def _custom(item: Body, name: str) -> parts.Tool:
    """A function of one text; the grammar that it must follow is described in words."""
    description = item.text("description") or ""
    form = item.object("format")
    if form and (grammar := form.text("definition")):
        description = f"{description}\n\nThe input follows this {form.text('syntax') or ''} grammar:\n{grammar}"
    function = {"name": name, "description": description.strip(), "parameters": _INPUT}
    return {"type": "function", "function": function}


def input_of(arguments: str) -> str:
    """The text that a custom tool was called with."""
    value = json.loads(arguments)
    text = value.get("input") if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else arguments


_KEPT = "this server keeps no responses; send the whole conversation as input"
_SEAL = "moeflux:"


def read(body: JsonObject) -> Request:
    """The request that a body makes."""
    body, images = without_images(body, "input")
    fields = Body(body)
    _refuse_state(fields)
    variables = settings.template_variables(fields)
    functions, known = offered(fields)
    left, choice = parts.chosen(functions, _choice(fields))
    reasoning, text = fields.object("reasoning"), fields.object("text")
    effort = settings.effort(reasoning, "effort") or settings.effort(fields, "reasoning_effort")
    thinks = settings.thinking(fields, variables)
    include = fields.list("include")
    asked = fields.integer("top_logprobs", 0, 20)
    return Request(
        api="responses",
        model=fields.text("model") or "",
        messages=_messages(fields),
        tools=left,
        tool_choice=choice,
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        max_tokens=settings.token_limit(fields),
        stop=settings.stops(fields),
        sampling=settings.sampling(fields, (asked or 0) if "message.output_text.logprobs" in include else None),
        template_variables=variables,
        thinking=settings.thinking_effort(effort) if thinks is None else thinks,
        effort=effort,
        schema=settings.structure(text.object("format") if text else None),
        images=images,
        stream=fields.flag("stream"),
        session=fields.text("prompt_cache_key"),
        extra={
            "known": known,
            "sealed": "reasoning.encrypted_content" in include,
            "store": fields.flag("store", True),
            "summarised": bool(reasoning and (reasoning.text("summary") or reasoning.text("generate_summary"))),
            "echo": _echo(fields),
        },
    )


def _echo(fields: Body) -> JsonDict:
    """The fields of the request that a response repeats, with OpenAI's defaults for missing ones."""
    usual = {"truncation": "disabled", "top_p": 1.0, "temperature": 1.0, "tool_choice": "auto"}
    given = {key: fields.get(key) for key in usual}
    text, metadata = fields.object("text"), fields.object("metadata")
    return {
        **usual,
        **_not_null(given),
        "instructions": fields.get("instructions"),
        "tools": [_tool_fields(item) for item in fields.objects("tools")],
        "text": {"format": {"type": "text"}, **_not_null(text.data if text else {})},
        "metadata": metadata.data if metadata else {},
        "reasoning": fields.get("reasoning"),
        "presence_penalty": fields.get("presence_penalty") or 0.0,
        "frequency_penalty": fields.get("frequency_penalty") or 0.0,
        "top_logprobs": fields.get("top_logprobs") or 0,
        "max_output_tokens": fields.get("max_output_tokens"),
        "prompt_cache_key": fields.get("prompt_cache_key"),
    }


def _not_null(given: JsonObject) -> JsonDict:
    return {key: value for key, value in given.items() if value is not None}


def _tool_fields(item: Body) -> JsonObject:
    """A function with all of its fields; other tools as they came."""
    whole = item.get("type") == "function"
    return {**dict.fromkeys(("description", "parameters", "strict")), **item.data} if whole else item.data


def _refuse_state(fields: Body) -> None:
    if fields.get("response_format") is not None:
        raise fields.wrong("response_format", "null: this API has text.format in its place")
    for name in ("previous_response_id", "conversation", "prompt"):
        if fields.get(name) is not None:
            raise fields.wrong(name, f"null: {_KEPT}")
    if fields.flag("background"):
        raise fields.wrong("background", f"false: {_KEPT}")


def _choice(fields: Body) -> parts.ToolChoice:
    """A required tool that OpenAI's server would run is ignored here."""
    value = fields.get("tool_choice")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        return parts.ToolChoice()
    return parts.choice(fields)


def _messages(fields: Body) -> list[Message]:
    first = parts.system_text(texts(fields, "instructions"))
    messages = [{"role": "system", "content": first}] if first else []
    value = fields.get("input")
    if isinstance(value, str) and value:
        return [*messages, {"role": "user", "content": value}]
    turns = _Turns()
    for item in fields.objects("input"):
        turns.add(item)
    if not turns.done(messages) and not (first and isinstance(value, list)):  # instructions alone can be answered
        raise fields.wrong("input", "a text, or a list of at least one message, call or result")
    return parts.paired(messages, "input")


class _Turns:
    """Joins items to turns: consecutive thoughts, texts and calls of the model become one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._thoughts: list[str] = []
        self._passed_over: set[str | None] = set()  # ids of calls

    def done(self, before: list[Message]) -> bool:
        """Appends all to `before`; whether there was any."""
        if self._thoughts:
            self._turn()
        before += self._messages
        return bool(self._messages)

    def add(self, item: Body) -> None:
        kind = item.text("type") or "message"
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._thoughts.append(_thought(item))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._result(item)
        elif kind.endswith("_call"):  # a call of a server's own tool
            self._passed_over.add(item.text("call_id"))
        elif not kind.endswith("_call_output"):
            raise item.wrong("type", "message, reasoning, function_call, custom_tool_call, or an output of these")

    def _message(self, item: Body) -> None:
        role = item.required_text("role")
        if role == "assistant":
            turn, text = self._turn(), text_of(item, "content")
            turn["content"] = "\n".join(part for part in (turn["content"], text) if part)
        elif role in ("system", "developer"):
            self._messages.append({"role": "system", "content": parts.system_text(texts(item, "content"))})
        elif role == "user":
            self._messages.append({"role": "user", "content": text_of(item, "content")})
        else:
            raise item.wrong("role", "user, assistant, system or developer")

    def _call(self, item: Body, custom: bool) -> None:
        name = flat(item.required_text("name"), item.text("namespace"))
        arguments = {"input": item.text("input") or ""} if custom else parts.arguments(item, "arguments")
        self._turn().setdefault("tool_calls", []).append(parts.call(name, arguments, item.text("call_id")))

    def _result(self, item: Body) -> None:
        id = item.text("call_id")
        if not id or id not in self._passed_over:  # Codex sends the output of a shell's call as that of a function
            self._messages.append(parts.result(text_of(item, "output"), id))

    def _turn(self) -> Message:
        """The assistant's message that is being put together, with the thoughts before what is added now."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append(parts.assistant(""))
        turn = self._messages[-1]
        thoughts = [text for text in (turn.get("reasoning_content"), *self._thoughts) if text]
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        self._thoughts = []
        return turn


def _thought(item: Body) -> str:
    """A reasoning item's text; clients that drop it send the sealed copy back."""
    spoken = [part.text("text") or "" for part in item.objects("content")]
    sealed = item.text("encrypted_content") or ""
    summary = [part.text("text") or "" for part in item.objects("summary")]
    return "\n".join(spoken) or unsealed(sealed) or "\n".join(summary)


def sealed(text: str) -> str:
    """Reasoning for `encrypted_content`: opaque to clients, which hand it back as it is; no secret."""
    return base64.b64encode((_SEAL + text).encode()).decode()


def unsealed(text: str) -> str:
    """The reasoning; none where someone else sealed it."""
    try:
        opened = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return opened.removeprefix(_SEAL) if opened.startswith(_SEAL) else ""
