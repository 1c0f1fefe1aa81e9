"""Streams: exact bytes of a few, order and fields of any, and the same content as the reply that does not stream.

Run as a program, it writes the golden files anew; then read their diff.
"""

import json
from itertools import product
from pathlib import Path

import jsonschema
import pytest
import wire_schemas
from bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_events import APIS, SCENES, decoded, fixed_ids, rows, sent

from moeflux_mlx.server.request import Failed
from moeflux_mlx.server.wire import chat, completions, messages, responses

GOLDEN = Path(__file__).parent / "golden"
REQUESTS = {
    "chat": chat.read({**CHAT, "n": None}),
    "completions": completions.read({**COMPLETIONS, "stream_options": {"include_usage": True}}),
    "messages": messages.read(MESSAGES),
    "responses": responses.read({**RESPONSES, "tool_choice": None}),
}


def scene_of(name, scene):
    """Returns the bytes of a scene, and the file that has them."""
    return sent(APIS[name], REQUESTS[name], SCENES[scene], waits=(0, 2)), GOLDEN / f"{name}-{scene}.txt"


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", APIS)
def test_golden(name, scene):
    stream, file = scene_of(name, scene)
    assert stream == file.read_bytes()


VALIDATORS = {}  # by identity; the schemas live as long as their module


def valid(data, schema):
    if id(schema) not in VALIDATORS:
        VALIDATORS[id(schema)] = jsonschema.Draft202012Validator(schema)
    VALIDATORS[id(schema)].validate(data)


def calls_of(events):
    ends = {event.index: event for event in events if type(event).__name__ == "CallEnd"}
    started = sum(type(event).__name__ == "CallStart" for event in events)
    return list(ends.values()), started


def spoken(events, kind):
    return "".join(event.text for event in events if type(event).__name__ == kind)


def reason_of(events):
    """Returns the finish reason by a rule that is written differently from the code's."""
    ended, started = calls_of(events)
    if started:
        return "tool_calls" if len(ended) == started else "length"
    return {"tool_calls": "stop"}.get(events[-1].reason, events[-1].reason)


@settings(max_examples=examples(60))
@given(rows(), st.sets(st.integers(0, 8)))
def test_chat_stream(events, waits):
    request = REQUESTS["chat"]
    *chunks, done = [data for _, data in decoded(sent(chat, request, events, waits=waits))]
    assert done == "[DONE]"
    if isinstance(events[-1], Failed):
        valid(chunks.pop(), wire_schemas.OPENAI_ERROR)
        assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
        return
    for chunk in chunks:
        valid(chunk, wire_schemas.CHAT_CHUNK)
    *chunks, last, usage = chunks
    assert len({chunk["id"] for chunk in [*chunks, last, usage]}) == 1
    assert usage["choices"] == [] and usage["usage"] and all(chunk["usage"] is None for chunk in [*chunks, last])
    assert last["choices"][0]["finish_reason"] == reason_of(events).replace("_sequence", "")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert sum("role" in delta for delta in deltas) == 1
    assert "".join(delta.get("content") or "" for delta in deltas) == spoken(events, "Text")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == spoken(events, "Reasoning")
    told = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    ended, started = calls_of(events)
    assert sorted({call["index"] for call in told}) == list(range(started))
    for end in ended:
        pieces = [call for call in told if call["index"] == end.index]
        assert "id" in pieces[0] and pieces[0]["function"]["name"] == end.name
        assert "".join(call["function"]["arguments"] for call in pieces) == end.arguments


@settings(max_examples=examples(30))
@given(rows(), st.sets(st.integers(0, 8)))
def test_completion_stream(events, waits):
    *chunks, done = [data for _, data in decoded(sent(completions, REQUESTS["completions"], events, waits=waits))]
    assert done == "[DONE]"
    if isinstance(events[-1], Failed):
        valid(chunks.pop(), wire_schemas.OPENAI_ERROR)
    for chunk in chunks:
        valid(chunk, wire_schemas.COMPLETION_CHUNK)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == spoken(events, "Text")


@settings(max_examples=examples(60))
@given(rows(), st.sets(st.integers(0, 8)))
def test_message_stream(events, waits):
    told = list(decoded(sent(messages, REQUESTS["messages"], events, waits=waits)))
    for name, data in told:
        assert name == data["type"]
        valid(data, wire_schemas.MESSAGE_EVENTS[name])
    data = [data for name, data in told if name != "ping"]
    kinds = [event["type"] for event in data]
    end = ["error"] if isinstance(events[-1], Failed) else ["message_delta", "message_stop"]
    assert kinds[0] == "message_start" and kinds[-len(end) :] == end
    blocks, open_now = 0, None
    for event in data[1 : -len(end)]:
        if event["type"] == "content_block_start":
            assert open_now is None and event["index"] == blocks
            open_now, blocks = blocks, blocks + 1
        else:
            assert event["index"] == open_now
            open_now = None if event["type"] == "content_block_stop" else open_now
    assert open_now is None
    usage = data[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 9


@settings(max_examples=examples(60))
@given(rows(), st.sets(st.integers(0, 8)), st.sampled_from([None, "auto"]))
def test_response_stream(events, waits, summary):
    request = responses.read({**RESPONSES, "tool_choice": None, "reasoning": {"summary": summary}})
    told = list(decoded(sent(responses, request, events, waits=waits)))
    for place, (name, data) in enumerate(told):
        assert (name, place) == (data["type"], data["sequence_number"])
        valid(data, wire_schemas.RESPONSE_EVENTS[name])
    kinds = [name for name, _ in told]
    final = told[-1][1]["response"]
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert kinds[-1] == f"response.{final['status']}"
    added = [data for name, data in told if name == "response.output_item.added"]
    done = [data for name, data in told if name == "response.output_item.done"]
    assert [item["output_index"] for item in added] == list(range(len(added)))
    assert [item["item"]["id"] for item in added] == [item["id"] for item in final["output"]]
    assert all(item["item"] == final["output"][item["output_index"]] for item in done)
    ended, started = calls_of(events)
    calls = [item["item"] for item in done if item["item"]["type"].endswith("_call")]
    cut = started - len(ended)
    if isinstance(events[-1], Failed):  # neither is what was said last
        cut = sum(not item["item"]["type"].endswith("_call") for item in added[-1:])
    assert len(calls) == len(ended) and len(done) == len(added) - cut
    for call, end in zip(calls, ended, strict=True):
        known = {"apply_patch": ("apply_patch", None), "mcp__x__find": ("find", "mcp__x")}.get(
            end.name, (end.name, None)
        )
        assert (call["name"], call.get("namespace")) == known
        assert call["type"] == ("custom_tool_call" if end.name == "apply_patch" else "function_call")


@settings(max_examples=examples(60))
@given(rows(), st.sampled_from(sorted(APIS)))
def test_whole(events, name):
    """The reply without streaming fits its schema and has the same content as the stream."""
    request, ids = REQUESTS[name], fixed_ids()
    reply = APIS[name].whole(request, events, ids)
    if isinstance(events[-1], Failed):
        valid(reply, wire_schemas.ANTHROPIC_ERROR if name == "messages" else wire_schemas.OPENAI_ERROR)
        return
    schemas = {"chat": "CHAT", "completions": "COMPLETION", "messages": "MESSAGE_WHOLE", "responses": "RESPONSE"}
    valid(reply, getattr(wire_schemas, schemas[name]))
    told = [data for _, data in decoded(sent(APIS[name], request, events))]
    if name == "responses":
        assert reply == told[-1]["response"]
    elif name == "messages":
        assert {key: reply[key] for key in ("stop_reason", "stop_sequence")} == told[-2]["delta"]
        assert reply["usage"] == told[-2]["usage"]
    else:
        assert reply["usage"] == told[-2]["usage"]
        assert reply["choices"][0]["finish_reason"] == told[-3]["choices"][0]["finish_reason"]


def test_ids_of_calls_are_known():
    for name in ("chat", "messages", "responses"):
        ids = fixed_ids()
        APIS[name].whole(REQUESTS[name], SCENES["calls"], ids)
        assert sorted(ids.calls) == [0, 1, 2] and len(set(ids.calls.values())) == 3
        again = fixed_ids()
        sent(APIS[name], REQUESTS[name], SCENES["calls"], again)
        assert again.calls == ids.calls


@pytest.mark.parametrize("name", APIS)
def test_an_answer_without_an_end_has_failed(name):
    reply = APIS[name].stream(REQUESTS[name], fixed_ids())
    reply.events(SCENES["calls"][0])
    assert b"before it was finished" in reply.end()
    assert b"before it was finished" not in reply.end()
    assert "before it was finished" in json.dumps(APIS[name].whole(REQUESTS[name], SCENES["calls"][:3]))
    assert reply.events(SCENES["calls"][2]) == [] and reply.keepalive() == b""


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_progress_and_logprobs_if_requested(name):
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "return_progress": True}
    told = [data for _, data in decoded(sent(APIS[name], APIS[name].read(body), SCENES["calls"]))]
    assert [data["prompt_progress"] for data in told if "prompt_progress" in data] == [
        {"total": 9, "cache": 4, "processed": 5}
    ]
    assert all("usage" not in data for data in told[:-1])


if __name__ == "__main__":
    for name, scene in product(APIS, SCENES):
        stream, file = scene_of(name, scene)
        file.write_bytes(stream)
