"""/v1/messages and count_tokens: Anthropic's messages, as consecutive blocks."""

import json
from collections.abc import Iterable

from ...files import JsonDict, JsonValue
from ..request import Accepted, Finish, Request, ServerEvent
from .answer import Block, BlockStep, WireAnswer
from .ids import Ids
from .messages_request import read
from .replies import Reply, anthropic_error, failure, folded
from .sse import encode

__all__ = ["count", "error", "read", "stream", "whole"]

error = anthropic_error

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


def stream(request: Request, ids: Ids) -> "MessageReply":
    return MessageReply(request, ids)


def whole(request: Request, events: Iterable[ServerEvent], ids: Ids | None = None) -> JsonDict:
    """The reply that does not stream; an error where the events end in one."""
    ids, answer = ids or Ids(), folded(events)
    if answer.finish is None:
        return failure(answer, error)
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
            yield encode(failure(self.answer, error), "error")
        if self.answer.finish:
            yield _event("message_delta", delta=_stopped(self.answer), usage=_finished(self.answer.finish))
            yield _event("message_stop")


def _event(kind: str, **data: JsonValue) -> bytes:
    return encode({"type": kind, **data}, kind)
