"""Reasoning, text and calls of every dialect through the server, and the same again when the history comes back."""

import json

import pytest
from grids import taking_turns
from near_misses import ARGUMENTS as ALL
from near_misses import EMPTY, near_misses, spare_brace
from styles import LLAMAS, STYLES, said_of, thought_of, written
from three_apis import APIS, scripted_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
FLAG = {"type": "boolean"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "properties": properties}}}
    for name, properties in (("get_weather", {**SCHEMA["properties"], "flag": FLAG}), ("get_time", {}))
]
QUESTION = [{"role": "user", "content": "How is it in Paris?"}]
ARGUMENTS = {"city": "Paris é", "days": 3}
NAMES = [name for name in STYLES if name != "text_only"]


def says(name):
    """Returns what a model of this style writes: a thought and a call, or an answer once it has the result."""
    dialect, _, channels = STYLES[name]

    def script(prompt):
        call = written(dialect)(ARGUMENTS, "weather")
        for begun in (dialect.prefix("weather"), dialect.prefix()):
            if prompt.endswith(begun):
                return call.removeprefix(begun)
        thought = "" if channels is None else thought_of(channels, prompt, "I look.")
        if "18 C" in prompt:
            return f"{thought}{'' if channels is None else channels.lead}It is 18 C."
        return f"{thought}{said_of(channels, 'Let me see.')}{call}"

    return script


@pytest.fixture(scope="module", params=NAMES)
def scripted(request, tmp_path_factory):
    """Returns the style's name, and clients of a server whose model answers as they say."""
    with scripted_server(tmp_path_factory.mktemp(request.param), request.param) as clients:
        yield request.param, clients


@pytest.fixture
def style(scripted):
    """Returns the style's name, a client, and the prompts that the model got. The model thinks and calls."""
    name, clients = scripted
    clients.answer = says(name)
    clients.prompts.clear()
    return name, clients.openai, clients.prompts


def ask(client, messages, **more):
    return client.chat.completions.create(model="m", messages=messages, tools=[TOOL], **more).choices[0]


def test_a_call_and_its_result(style):
    name, client, asked = style
    effort = {"reasoning_effort": "high"} if name == "hunyuan_style" else {}
    first = ask(client, QUESTION, **effort)
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.content == "Let me see."
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    thought = getattr(first.message, "reasoning_content", None)
    assert thought == (None if STYLES[name][2] in (None, LLAMAS) else "I look.")
    raw = asked[-1] + says(name)(asked[-1])
    said = {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]}
    more = [*QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": "18 C"}]
    second = ask(client, more, **effort)
    assert second.message.content == "It is 18 C." and second.finish_reason == "stop"
    assert asked[-1].startswith(raw)


def test_a_call_streams(style):
    _, client, _ = style
    with client.chat.completions.stream(model="m", messages=QUESTION, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert kinds.count("tool_calls.function.arguments.delta") > 3


def asked_twice(clients, api, answer):
    """Returns the answer that does not stream, after checking that the streamed one is the same."""
    clients.answer = answer
    whole, streamed = (clients.ask(api, QUESTION, TOOLS, stream=stream) for stream in (False, True))
    assert (whole.text, whole.calls, whole.finish) == (streamed.text, streamed.calls, streamed.finish)
    return whole


def test_calls_with_and_without_small_faults(scripted):
    """tests/text/test_near_misses.py reads each of them too, cut anywhere."""
    name, clients = scripted
    dialect = STYLES[name][0]
    right = written(dialect)(ALL, "get_weather")
    spare = spare_brace(dialect, right)
    faults = near_misses(dialect) if dialect.tags else [("a brace too many", spare)] * bool(spare)
    for (fault, answer), api in taking_turns([("none", right), *faults], APIS, NAMES.index(name)):
        said = asked_twice(clients, api, answer)
        assert (said.text, said.calls, said.finish) == ("", [("get_weather", ALL)], "tool_calls"), (fault, api)


def test_calls_without_arguments(scripted):
    name, clients = scripted
    for form, api in taking_turns(EMPTY[STYLES[name][0].name], APIS, NAMES.index(name)):
        said = asked_twice(clients, api, form.replace("NAME", "get_time"))
        assert (said.text, said.calls, said.finish) == ("", [("get_time", {})], "tool_calls"), (form, api)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_can_be_required(style, choice):
    name, client, asked = style
    found = ask(client, QUESTION, tool_choice=choice)
    (call,) = found.message.tool_calls
    if name == "minimax3_style":
        assert "]~b]ai\n</mm:think>]<]minimax[>[<tool_call>" in asked[-1]
    assert found.finish_reason == "tool_calls" and json.loads(call.function.arguments) == ARGUMENTS


def test_an_answer_that_has_begun_follows_its_schema(style):
    _, client, asked = style
    begun = [*QUESTION, {"role": "assistant", "content": '{"city": "Par'}]
    client.chat.completions.create(model="m", messages=begun, response_format={"type": "json_object"})
    assert asked[-1].endswith('{"city": "Par')


def test_calls_can_be_forbidden(style):
    _, client, _ = style
    found = ask(client, QUESTION, tool_choice="none")
    assert not found.message.tool_calls and found.finish_reason == "stop"
