"""/v1/chat/completions: OpenAI's chat, with the reasoning under `reasoning_content`."""

from collections.abc import Iterable

from ...files import JsonDict, JsonObject
from ...text.results import Message
from ..request import Finish, Request, ServerEvent
from . import parts, settings
from .answer import Block, BlockStep, WireAnswer
from .parts import text_of, texts, unserved, without_images
from .replies import Chunks, Ids, counts, failure, folded, logprob
from .settings import Body, wrong

_REASONING = ("reasoning_content", "thinking", "reasoning")
_FINISH = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}


def read(body: JsonObject) -> Request:
    """The request that a body makes."""
    body, images = without_images(body, "messages")
    fields = Body(body)
    _text_only(fields)
    variables = settings.template_variables(fields)
    offered, choice = parts.chosen([_tool(item) for item in fields.objects("tools")], parts.choice(fields))
    return Request(
        api="chat",
        model=fields.text("model") or "",
        messages=_messages(fields),
        tools=offered,
        tool_choice=choice,
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        max_tokens=settings.token_limit(fields),
        stop=settings.stops(fields),
        sampling=settings.sampling(fields, settings.logprobs(fields), settings.ANSWERS),
        template_variables=variables,
        thinking=settings.thinking(fields, variables),
        effort=settings.effort(fields, "reasoning_effort"),
        schema=settings.structure(fields.object("response_format")),
        images=images,
        answers=settings.answers(fields),
        stream=fields.flag("stream"),
        session=fields.text("prompt_cache_key"),
        extra=settings.stream_options(fields),
    )


def _text_only(fields: Body) -> None:
    for kind in fields.list("modalities"):
        if kind != "text":
            raise wrong("modalities", kind, "text: this model makes no audio or images")


def _tool(item: Body) -> parts.Tool:
    if (item.text("type") or "function") != "function":
        raise item.wrong("type", "function")
    return parts.tool(item.object("function") or item)


def _messages(fields: Body) -> list[Message]:
    messages = [_message(item) for item in fields.objects("messages")]
    if not messages:
        raise fields.wrong("messages", "at least one message")
    return parts.paired(messages, "messages")


def _message(item: Body) -> Message:
    role = item.required_text("role")
    if role in ("system", "developer"):
        return {"role": "system", "content": parts.system_text(texts(item, "content"))}
    if role == "user":
        return {"role": "user", "content": text_of(item, "content")}
    if role == "assistant":
        return _assistant(item)
    if role == "tool":
        return parts.result(text_of(item, "content"), item.text("tool_call_id"), item.text("name"))
    raise item.wrong("role", "system, developer, user, assistant or tool")


def _assistant(item: Body) -> Message:
    if item.get("audio") is not None:
        raise unserved(Body({"type": "audio"}, item.name("audio")), "audio")
    reasoning = next((value for key in _REASONING if isinstance(value := item.get(key), str) and value), None)
    return parts.assistant(text_of(item, "content"), reasoning, [_call(call) for call in item.objects("tool_calls")])


def _call(item: Body) -> Message:
    function = item.object("function")
    if function is None:
        raise item.wrong("function", "a name and arguments")
    arguments = parts.arguments(function, "arguments")
    return parts.call(function.required_text("name"), arguments, item.text("id"))


def whole(request: Request, events: Iterable[ServerEvent], ids: Ids | None = None) -> JsonDict:
    """The reply that does not stream; an error where the events end in one."""
    ids, answer = ids or Ids(), folded(events)
    if answer.finish is None:
        return failure(answer)
    head = ChatReply.head(request, ids)
    choice = {"index": ids.index, "message": _reply(answer, ids), "finish_reason": _FINISH[answer.reason()]}
    if request.sampling.top_logprobs is not None:
        choice["logprobs"] = {"content": [logprob(token) for token in answer.logprobs()], "refusal": None}
    return {**head, "choices": [choice], **counts(answer.finish)}


def _reply(answer: WireAnswer, ids: Ids) -> JsonDict:
    calls = [_called(block, ids) for block in answer.calls()]
    message: JsonDict = {"role": "assistant", "content": answer.text("text") or (None if calls else "")}
    if reasoning := answer.text("reasoning"):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _called(block: Block, ids: Ids) -> JsonDict:
    function = {"name": block.name, "arguments": block.text}
    return {"id": ids.call(block.call, "call_"), "type": "function", "function": function}


class ChatReply(Chunks):
    """Chunks of `chat.completion.chunk`; the role stands in the first one only."""

    prefix, kind, chunk = "chatcmpl-", "chat.completion", ".chunk"
    _begun = False

    def waiting(self) -> bytes:
        return b"".join(self._begin()) or self._delta({})

    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        if self.answer.failed is None:
            yield from self._begin()
        yield from self.told(event)

    def _begin(self) -> list[bytes]:
        """The chunk with the role, if it has not been sent."""
        begun, self._begun = self._begun, True
        return [] if begun else [self._delta({"role": "assistant", "content": None})]

    def step(self, step: BlockStep) -> Iterable[bytes]:
        if step.block.kind == "call":
            yield from self._call_step(step)
        elif step.what == "grow" and step.block.kind == "reasoning":
            yield self._delta({"reasoning_content": step.text})
        elif step.what == "grow":
            choice = self._choice({"content": step.text})
            if step.logprobs:
                choice["logprobs"] = {"content": [logprob(token) for token in step.logprobs], "refusal": None}
            yield self.chunk_of([choice])

    def _call_step(self, step: BlockStep) -> Iterable[bytes]:
        # Indices count the calls that the client sees.
        index = self.answer.of("call").index(step.block)
        if step.what == "open":
            function = {"name": step.block.name, "arguments": ""}
            head = {"index": index, "id": self.ids.call(step.block.call, "call_"), "type": "function"}
            yield self._delta({"tool_calls": [{**head, "function": function}]})
        elif step.what == "grow":
            yield self._delta({"tool_calls": [{"index": index, "function": {"arguments": step.text}}]})

    def empty(self, finish: Finish | None = None) -> JsonDict:
        return self._choice({}, None if finish is None else _FINISH[self.answer.reason()])

    def _delta(self, delta: JsonObject) -> bytes:
        return self.chunk_of([self._choice(delta)])

    def _choice(self, delta: JsonObject, reason: str | None = None) -> JsonDict:
        return {"index": self.ids.index, "delta": delta, "finish_reason": reason}


stream = ChatReply
