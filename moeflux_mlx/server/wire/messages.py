"""/v1/messages and count_tokens: Anthropic's messages, as consecutive blocks.

Anthropic's blocks are turned into messages, with tool results first.
"""

import json
from collections.abc import Iterable, Mapping

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject
from ...text.results import Message
from ..request import Accepted, Finish, Request, ServerEvent
from . import parts, settings
from .answer import Block, BlockStep, WireAnswer
from .parts import text_of, texts, unserved, without_images
from .replies import NO_THREADS, Ids, Reply, anthropic_error, encode, failure, folded
from .settings import Body, shown

MOST_NAMED = 8  # tools, in the message that refuses them
# Blocks of a server's own tools, or that only their author can read; they are left out.
_DROPPED = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")


def read(body: JsonObject) -> Request:
    """The request that a body makes, also one for count_tokens."""
    body, images = without_images(body, "messages")
    fields = Body(body)
    _refuse_threads(fields)
    variables = settings.template_variables(fields)
    offered, choice = parts.chosen(_tools(fields), parts.anthropic_choice(fields))
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


def _tools(fields: Body) -> list[parts.Tool]:
    """The client's own tools. Tools with a type of Anthropic's run on its servers or have a schema that only its models
    know.
    """
    items = list(fields.objects("tools"))
    others = [shown(kind) for item in items if (kind := item.text("type") or "custom") != "custom"]
    if others:
        names = ", ".join(others[:MOST_NAMED])
        message = f"this server has no tools of its own: leave out those of type {names}, or send an input_schema"
        raise BadRequestError(message, "tools")
    return [parts.tool(item, "input_schema") for item in items]


def _messages(fields: Body) -> list[Message]:
    system = parts.system_text(texts(fields, "system"))
    messages = [{"role": "system", "content": system}] if system else []
    items = list(fields.objects("messages"))
    if not items:
        raise fields.wrong("messages", "at least one message")
    for item in items:
        messages += _message(item)
    if not messages:
        raise BadRequestError("messages hold nothing that a model can read; send a text", "messages")
    return parts.paired(messages, "messages")


def _message(item: Body) -> list[Message]:
    role = item.required_text("role")
    if role == "user":
        return _User().messages(item)
    if role == "assistant":
        return _Assistant().messages(item)
    if role in ("system", "developer"):
        text = parts.system_text(texts(item, "content"))
        return [{"role": "system", "content": text}] if text else []
    raise item.wrong("role", "user, assistant or system")


def _others(item: Body) -> JsonDict:
    """Readers of the blocks that are left out, such as results of a server's tools."""
    value = item.get("content")
    kinds = (
        [part.get("type") for part in value if isinstance(part, Mapping)] if isinstance(value, (list, tuple)) else []
    )
    results = (kind for kind in kinds if isinstance(kind, str) and kind.endswith("_tool_result"))
    return dict.fromkeys([*_DROPPED, *results], lambda part: None)


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
        self.results.append(parts.result(text, part.text("tool_use_id")))


class _Assistant:
    """Reads an assistant's message: thoughts, text and calls, in any order."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.calls: list[Message] = []

    def messages(self, item: Body) -> list[Message]:
        readers = {**_others(item), "thinking": self._thought, "tool_use": self._call}
        said = "\n".join(texts(item, "content", readers))
        return [parts.assistant(said, "\n".join(self.thoughts), self.calls)]

    def _thought(self, part: Body) -> None:
        if text := part.text("thinking"):
            self.thoughts.append(text)

    def _call(self, part: Body) -> None:
        arguments = parts.arguments(part, "input")
        self.calls.append(parts.call(part.required_text("name"), arguments, part.text("id")))


def _document(part: Body) -> str | None:
    source = part.object("source")
    if source is None or source.text("type") not in ("text", "content"):
        raise unserved(part, "document")
    return source.text("data") if source.text("type") == "text" else text_of(source, "content")


_STOP = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
# Clients return it with a thought; this server does not need it.
_SIGNATURE = "moeflux"


def count(tokens: int) -> dict[str, int]:
    """The reply of count_tokens."""
    return {"input_tokens": tokens}


def whole(request: Request, events: Iterable[ServerEvent], ids: Ids | None = None) -> JsonDict:
    """The reply that does not stream; an error where the events end in one."""
    ids, answer = ids or Ids(), folded(events)
    if answer.finish is None:
        return failure(answer, anthropic_error)
    blocks = [block for block in answer.blocks if block.kind != "call" or block.whole]
    return {
        "id": ids.make("msg_"),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [_block(block, ids) for block in blocks],
        **_stopped(answer),
        "usage": _finished(answer.finish),
    }


def _block(block: Block, ids: Ids) -> JsonDict:
    if block.kind == "call":
        return {**_call(block, ids), "input": json.loads(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
    return {"type": "text", "text": block.text}


def _empty(block: Block, ids: Ids) -> JsonDict:
    if block.kind == "call":
        return _call(block, ids)
    return (
        {"type": "thinking", "thinking": "", "signature": ""}
        if block.kind == "reasoning"
        else {"type": "text", "text": ""}
    )


def _call(block: Block, ids: Ids) -> JsonDict:
    return {"type": "tool_use", "id": ids.call(block.call, "toolu_"), "name": block.name, "input": {}}


def _stopped(answer: WireAnswer) -> JsonDict:
    assert answer.finish is not None
    reason = _STOP[answer.reason()]
    return {"stop_reason": reason, "stop_sequence": answer.finish.stop_sequence if reason == "stop_sequence" else None}


def _usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> JsonDict:
    """The three counts of the prompt do not overlap: their sum is the prompt."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion_tokens,
    }


def _finished(finish: Finish) -> JsonDict:
    usage = _usage(finish.prompt_tokens, finish.cached_tokens, finish.completion_tokens)
    return {**usage, "output_tokens_details": {"thinking_tokens": finish.reasoning_tokens}}


class MessageReply(Reply):
    """Events from `message_start` to `message_stop`, or to `error`."""

    def __init__(self, request: Request, ids: Ids):
        super().__init__(request, ids)
        self._id = ids.make("msg_")
        self._begun = False

    def waiting(self) -> bytes:
        return _event("ping")

    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        # The counts of the prompt are known with the first event; until then there are pings.
        if self._begun or self.answer.failed:
            return
        self._begun = True
        known = self.answer.accepted or self.answer.finish or Accepted(0, 0)
        message: JsonDict = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(known.prompt_tokens, known.cached_tokens, 0),
        }
        yield _event("message_start", message=message)

    def step(self, step: BlockStep) -> Iterable[bytes]:
        block = step.block
        if step.what == "open":
            yield _event("content_block_start", index=block.index, content_block=_empty(block, self.ids))
        elif step.what == "grow":
            kind, key = _DELTAS[block.kind]
            yield _event("content_block_delta", index=block.index, delta={"type": kind, key: step.text})
        else:
            if block.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": _SIGNATURE}
                yield _event("content_block_delta", index=block.index, delta=signature)
            yield _event("content_block_stop", index=block.index)

    def closing(self, event: ServerEvent) -> Iterable[bytes]:
        if self.answer.failed:
            yield encode(failure(self.answer, anthropic_error), "error")
        if self.answer.finish:
            yield _event("message_delta", delta=_stopped(self.answer), usage=_finished(self.answer.finish))
            yield _event("message_stop")


def _event(kind: str, **data: object) -> bytes:
    return encode({"type": kind, **data}, kind)


stream = MessageReply
