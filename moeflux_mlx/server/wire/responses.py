"""/v1/responses: a response as items, each added, filled and done. Codex acts on `output_item.done`.

`StoredResponses` keeps its latest items in memory: clients of OpenAI's API, which stores responses by default, refer
to earlier items by id instead of repeating them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from ...text.replay import Latest
from ..request import Finish, Request, Sampling, ServerEvent
from .answer import Block, BlockStep, WireAnswer
from .replies import Ids, Reply, dumps, encode, failure, folded, logprob
from .responses_request import Known, input_of, read, sealed
from .settings import Body, shown

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_", "custom": "ctc_"}
# What is the same in every response: no response is kept whole, and there is one tier of service.
_FIXED = {
    "previous_response_id": None,
    "store": False,  # unless its items are kept
    "background": False,
    "service_tier": "default",
    "max_tool_calls": None,
    "safety_identifier": None,
    "user": None,
}
# The type of a block's one part; the events of the part and of its text; the key of its place.
_PARTS = {
    "reasoning": ("reasoning_text", "content_part", "reasoning_text", "content_index"),
    "summary": ("summary_text", "reasoning_summary_part", "reasoning_summary_text", "summary_index"),
    "text": ("output_text", "content_part", "output_text", "content_index"),
}


def whole(request: Request, events: Iterable[ServerEvent], ids: Ids | None = None) -> JsonDict:
    """The reply that does not stream; an error where the events end in one."""
    ids, answer = ids or Ids(), folded(events)
    if answer.finish is None:
        return failure(answer)
    id, items, now = ids.make("resp_"), Items(request, ids), ids.now()
    response = _response(request, id, now, _status(answer), answer)
    return {
        **response,
        "output": [items.done(block) for block in answer.blocks],
        "completed_at": _completed(answer, now),
    }


def _completed(answer: WireAnswer, now: int) -> int | None:
    """When it was completed, if it was."""
    return now if _status(answer) == "completed" else None


def _status(answer: WireAnswer) -> str:
    if answer.over:
        return "failed" if answer.failed else "incomplete" if answer.reason() == "length" else "completed"
    return "in_progress"


def _response(request: Request, id: str, created: int, status: str, answer: WireAnswer) -> JsonDict:
    """All of a response but its output, in the order in which people read it."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": status,
        "error": answer.failed and {"code": answer.failed.code, "message": answer.failed.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": request.model,
        "output": [],
        "usage": _usage(answer.finish) if answer.finish else None,
        "parallel_tool_calls": request.parallel_tool_calls,
        **request.extra.get("echo", {}),
        **_used(request.sampling),
        **_FIXED,
        "store": request.extra.get("store", False),
    }


def _used(sampling: Sampling) -> dict[str, float]:
    """The settings that were used, whether or not the request had them."""
    used = {"top_p": sampling.top_p, "temperature": sampling.temperature}
    return {name: value for name, value in used.items() if value is not None}


def _usage(finish: Finish) -> JsonDict:
    return {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finish.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }


class Items:
    """Blocks as items of a response's output, each with one id for all its events."""

    def __init__(self, request: Request, ids: Ids):
        self._request, self._ids = request, ids
        self._made: dict[int, str] = {}

    def kind(self, block: Block) -> str:
        return "custom" if block.kind == "call" and self._known(block).custom else block.kind

    def id(self, block: Block) -> str:
        if block.index not in self._made:
            self._made[block.index] = self._ids.make(_PREFIXES[self.kind(block)])
        return self._made[block.index]

    def added(self, block: Block) -> JsonDict:
        return self._item(Block(block.kind, block.index, block.call, block.name), "in_progress")

    def done(self, block: Block) -> JsonDict:
        return self._item(block, "completed" if block.whole else "incomplete")

    def part(self, block: Block) -> JsonDict:
        """The one part of a message or of a thought."""
        part: JsonDict = {"type": _PARTS[self.form(block)][0], "text": block.text}
        if block.kind == "reasoning":
            return part
        return {**part, "annotations": [], "logprobs": [logprob(token) for token in block.logprobs]}

    def form(self, block: Block) -> str:
        """Its key in `_PARTS`. A client that asks for a summary shows nothing else, so it gets the whole reasoning as
        the summary.
        """
        return "summary" if block.kind == "reasoning" and self._request.extra.get("summarised") else block.kind

    def _known(self, block: Block) -> Known:
        known: Mapping[str, Known] = self._request.extra.get("known", {})
        return known.get(block.name) or Known(block.name)

    def _item(self, block: Block, status: str) -> JsonDict:
        head = {"id": self.id(block), "status": status}
        if block.kind == "call":
            return {**head, **self._call(block)}
        content = [self.part(block)] if block.text else []
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        item: JsonDict = {**head, "type": "reasoning", "summary": [], "content": []}
        item["summary" if self.form(block) == "summary" else "content"] = content
        if self._request.extra.get("sealed"):
            item["encrypted_content"] = sealed(block.text) if block.text else None
        return item

    def _call(self, block: Block) -> JsonDict:
        known = self._known(block)
        call: JsonDict = {"call_id": self._ids.call(block.call, "call_"), "name": known.name}
        if known.namespace:
            call["namespace"] = known.namespace
        if known.custom:
            return {"type": "custom_tool_call", **call, "input": input_of(block.text) if block.whole else ""}
        return {"type": "function_call", **call, "arguments": block.text}


class ResponseReply(Reply):
    """Events from `response.created` to completed, incomplete or failed, numbered from 0.

    Args:
        keep: takes the items once all are done, before the client hears of it.
    """

    def __init__(self, request: Request, ids: Ids, keep: Callable[[list[JsonDict]], None] | None = None):
        super().__init__(request, ids)
        self._keep = keep
        self._id = ids.make("resp_")
        self._items = Items(request, ids)
        self._number = 0

    def waiting(self) -> bytes:
        return b"".join([*self._begin(), self._state("response.in_progress", "in_progress")])

    def opening(self, event: ServerEvent) -> Iterable[bytes]:
        begun = self._begin()
        if begun:
            yield from begun
            yield self._state("response.in_progress", "in_progress")

    def _begin(self) -> list[bytes]:
        """The first event, if it has not been sent."""
        return [] if self._number else [self._state("response.created", "in_progress")]

    def step(self, step: BlockStep) -> Iterable[bytes]:
        block = step.block
        if self.answer.failed:
            return  # a client keeps what is done, and asks again: it would have it twice
        if step.what == "open":
            yield self._event("response.output_item.added", output_index=block.index, item=self._items.added(block))
        if block.kind == "call":
            yield from self._call_step(step)
        else:
            yield from self._part_step(step)
        # Codex runs every call that is done, so an incomplete one appears only in the last event.
        if step.what == "close" and (block.whole or block.kind != "call"):
            yield self._event("response.output_item.done", output_index=block.index, item=self._items.done(block))

    def _part_step(self, step: BlockStep) -> Iterable[bytes]:
        block = step.block
        _, part_event, text_event, place = _PARTS[self._items.form(block)]
        parts, texts, where = f"response.{part_event}", f"response.{text_event}", {place: 0}
        logprobs = {"logprobs": [logprob(token) for token in step.logprobs]} if block.kind == "text" else {}
        if step.what == "open":
            part = self._items.part(Block(block.kind, block.index))
            yield self._inside(block, f"{parts}.added", **where, part=part)
        elif step.what == "grow":
            yield self._inside(block, f"{texts}.delta", **where, delta=step.text, **logprobs)
        else:
            part = self._items.part(block)
            logprobs = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            yield self._inside(block, f"{texts}.done", **where, text=block.text, **logprobs)
            yield self._inside(block, f"{parts}.done", **where, part=part)

    def _call_step(self, step: BlockStep) -> Iterable[bytes]:
        block = step.block
        if self._items.kind(block) == "custom":
            # The text is inside a JSON string, so it is sent when that has ended.
            if step.what == "close" and block.whole:
                text = input_of(block.text)
                yield self._inside(block, "response.custom_tool_call_input.delta", delta=text)
                yield self._inside(block, "response.custom_tool_call_input.done", input=text)
        elif step.what == "grow":
            yield self._inside(block, "response.function_call_arguments.delta", delta=step.text)
        elif step.what == "close" and block.whole:
            yield self._inside(block, "response.function_call_arguments.done", arguments=block.text)

    def closing(self, event: ServerEvent) -> Iterable[bytes]:
        if self.answer.over:
            status = _status(self.answer)
            yield self._state(f"response.{status}", status)

    def _state(self, kind: str, status: str) -> bytes:
        response = _response(self.request, self._id, self.created, status, self.answer)
        if kind == "response.in_progress":
            # Agents send long instructions and tools: what only keeps a client waiting does not repeat them.
            response.update(instructions=None, tools=[])
        if self.answer.over:
            response["output"] = [self._items.done(block) for block in self.answer.blocks]
            response["completed_at"] = _completed(self.answer, self.ids.now())
        if self.answer.finish and self._keep:
            self._keep(response["output"])
        return self._event(kind, response=response)

    def _inside(self, block: Block, kind: str, **data: object) -> bytes:
        return self._event(kind, item_id=self._items.id(block), output_index=block.index, **data)

    def _event(self, kind: str, **data: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return encode({"type": kind, "sequence_number": number, **data}, kind)


stream = ResponseReply
Item = JsonObject
REFERENCE = "item_reference"  # its type, which may be left out


class StoredResponses:
    """Reads and writes as the module `responses` does."""

    def __init__(self) -> None:
        self._items: Latest[str, Item] = Latest()

    def read(self, body: JsonObject) -> Request:
        """The request that a body makes.

        Raises:
            BadRequestError: as the module's, or it names an item that is not here, or one twice.
        """
        said, named = body.get("input"), set[str]()
        if isinstance(said, list):
            body = {**body, "input": [self._item(item, f"input[{n}]", named) for n, item in enumerate(said)]}
        return read(body)

    def stream(self, request: Request, ids: Ids) -> ResponseReply:
        return ResponseReply(request, ids, self._keep if request.extra["store"] else None)

    def whole(self, request: Request, events: Iterable[ServerEvent], ids: Ids) -> JsonDict:
        body = whole(request, events, ids)
        if request.extra["store"]:
            self._keep(body.get("output", ()))
        return body

    def _keep(self, items: Sequence[Item]) -> None:
        for item in items:
            self._items.keep(item["id"], item, len(dumps(item)))

    def _item(self, item: object, path: str, named: set[str]) -> JsonValue:
        """An item of the input, or the one that it refers to; `named` are those that others referred to."""
        if not isinstance(item, Mapping) or (item.get("type") != REFERENCE and set(item) != {"id"}):
            return item
        id = Body(item, path).required_text("id")
        if id in named:  # a short body could ask for more text than memory holds
            raise BadRequestError(f"Duplicate item found with id {shown(id)}. Name each item once", "input")
        named.add(id)
        stored = self._items.find(id)
        if stored is None:
            message = (
                f"Item with id {shown(id)} not found. This server keeps the latest items in memory only; "
                "send the item itself, as clients do with store set to false"
            )
            raise BadRequestError(message, "input", 404, "not_found")
        return stored
