"""Pairs the results of tools with their calls.

Templates show results in the order of the messages, and most show no ids, so the order must be that of the calls.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ..errors import RequestError
from ..files import JsonDict, JsonObject

Message = JsonDict  # of a chat, as a template takes it


def in_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with each call's result directly behind the message of the call: assistant with calls a and b, tool
    b, user, tool a becomes assistant, tool a, tool b, user.

    A result gets the id and the name of its call if it lacks them. Results without an id belong to the remaining calls
    in order. An id is known until the next turn of the assistant, so later turns may use it again. Consecutive messages
    of the assistant are one turn. Calls at the very end have no results yet.

    Raises:
        RequestError: a call has no result or two, or a result has no call.
    """
    end = len(messages)
    while end and messages[end - 1].get("tool_calls"):
        end -= 1
    return [message for turn in _turns(messages[:end]) for message in _arranged(turn)] + list(messages[end:])


def apart(message: Message) -> list[Message]:
    """The message as one message for each of its calls; text and reasoning stay with the first."""
    calls = message.get("tool_calls", ())
    if len(calls) < 2:
        return [message]
    others = ({"role": message["role"], "content": "", "tool_calls": [call]} for call in calls[1:])
    return [{**message, "tool_calls": calls[:1]}, *others]


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages, cut before each turn of the assistant."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant" and not (turns[-1] and turns[-1][-1]["role"] == "assistant"):
            turns.append([])
        turns[-1].append(message)
    return turns


def _arranged(turn: Sequence[Message]) -> Iterator[Message]:
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    results = iter(_paired(calls, [message for message in turn if message["role"] == "tool"]))
    for message in turn:
        if message["role"] != "tool":
            yield message
            yield from islice(results, len(message.get("tool_calls", ())))


def _paired(calls: Sequence[JsonObject], results: Sequence[Message]) -> list[Message]:
    """The result of each call."""
    places: dict[str, deque[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(call["id"], deque()).append(place)
    named = [result for result in results if result.get("tool_call_id")]
    placed = {_place(result, places, calls): result for result in named}
    others = iter([result for result in results if not result.get("tool_call_id")])
    paired = []
    for place, call in enumerate(calls):
        result = placed.get(place) or next(others, None)
        if result is None:
            raise RequestError(f"{_shown(call)} is not followed by its result; send one result for each call")
        name = result.get("name") or call["function"].get("name", "")
        paired.append({**result, "tool_call_id": call["id"], "name": name})
    if next(others, None) is not None:
        raise RequestError("a result without an id follows no call that needs one; send one result for each call")
    return paired


def _place(result: Message, places: Mapping[str, deque[int]], calls: Sequence[JsonObject]) -> int:
    """The place of the call that the result names; it is taken from `places`."""
    id = result["tool_call_id"]
    if id not in places:
        raise RequestError(f"a result names the call {id!r:.60}, which is not in the turn before it; send the call too")
    if not places[id]:
        call = next(call for call in calls if call["id"] == id)
        raise RequestError(f"{_shown(call)} has two results; send one result for each call")
    return places[id].popleft()


def _shown(call: JsonObject) -> str:
    return f"the call {call['id']!r:.60} of the tool {call['function'].get('name', '')!r:.60}"
