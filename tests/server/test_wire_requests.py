"""Each API's body becomes a `Request`, and anything that cannot be served is a 400 that names it."""

import copy
import json

import pytest
from bodies import CHAT, COMPLETIONS, MESSAGES, READ_TOOL, RESPONSES
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.errors import BadRequestError, RequestError
from moeflux_mlx.server.request import Request, Sampling
from moeflux_mlx.server.wire import chat, completions, messages, responses, tokenize
from moeflux_mlx.server.wire.fields import DEEPEST, parse
from moeflux_mlx.server.wire.responses_request import sealed

HI = [{"role": "user", "content": "hi"}]
READ = {"type": "function", "function": READ_TOOL}


def of_chat(**fields):
    return chat.read({"messages": HI, **fields})


def of_messages(*said, **fields):
    return messages.read({"messages": said or HI, **fields})


def of_input(*items, **fields):
    return responses.read({"input": list(items) or "hi", **fields})


def call(name, arguments, id):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, id, name):
    return {"role": "tool", "content": text, "tool_call_id": id, "name": name}


def test_chat():
    request = chat.read(CHAT)
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read\nit"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I must read.",
            "tool_calls": [call("Read", {"path": "a"}, "call_1"), call("Read", {}, "call_2")],
        },
        result("A", "call_1", "Read"),
        result("B", "call_2", "Read"),
        {"role": "system", "content": "Hurry."},
        {"role": "user", "content": "Well?"},
    ]
    assert request.tools == [{"type": "function", "function": {**READ_TOOL, "strict": True}}]
    assert (request.tool_choice, request.parallel_tool_calls, request.max_tokens) == (["Read"], False, 7)
    assert request.sampling == Sampling(0.5, 0.9, 40, 0.1, None, 1.0, -1.0, {17: -100.0}, 2**64 - 1, 2)
    assert (request.template_variables, request.effort) == ({"preserve_thinking": True}, "low")
    assert (request.thinking, request.schema, request.stop) == (True, {"type": "object"}, ("END",))
    assert (request.model, request.stream, request.session) == ("gpt-x", True, "k")
    assert request.extra == {"include_usage": True, "return_progress": False}


def test_completions():
    request = completions.read(COMPLETIONS)
    assert (request.prompt, request.max_tokens, request.stop) == ("def f(", None, ("\n",))
    assert request.sampling.top_logprobs == 3 and not request.stream
    assert completions.read({"prompt": [1, 2]}).prompt == [1, 2]
    assert completions.read({"prompt": [[1, 2]]}).prompt == [1, 2]
    assert completions.read({"prompt": ["a"]}).prompt == "a"


def test_messages():
    request = messages.read(MESSAGES)
    assert request.messages == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Read it"},
        {
            "role": "assistant",
            "content": "Reading.",
            "reasoning_content": "I must.",
            "tool_calls": [call("Read", {"path": "a"}, "toolu_1"), call("Read", {"path": "b"}, "toolu_2")],
        },
        result("A", "toolu_1", "Read"),
        result("Error: no such file", "toolu_2", "Read"),
        {"role": "user", "content": "Note this."},
        {"role": "system", "content": "Hurry."},
    ]
    assert request.tools == [READ]
    assert (request.tool_choice, request.parallel_tool_calls, request.thinking) == ("required", False, True)
    assert (request.stop, request.max_tokens, request.stream) == (("END",), 100, True)


def test_responses():
    request = responses.read(RESPONSES)
    assert request.messages == [
        {"role": "system", "content": "You are Codex."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Patch it"},
        {
            "role": "assistant",
            "content": "Patching.",
            "reasoning_content": "I must.",
            "tool_calls": [
                call("apply_patch", {"input": "*** Begin"}, "call_1"),
                call("mcp__x__find", {}, "call_2"),
            ],
        },
        result("done", "call_1", "apply_patch"),
        result("found", "call_2", "mcp__x__find"),
    ]
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["Read", "apply_patch", "mcp__x__find"]
    patch = request.tools[1]["function"]
    assert patch["parameters"]["required"] == ["input"] and "lark grammar:\nstart: x" in patch["description"]
    assert request.sampling.top_logprobs == 0 and request.thinking is True
    assert (request.max_tokens, request.schema, request.session) == (9, {"type": "object"}, "k")
    assert (request.template_variables, request.effort) == ({}, "medium")


def test_agent_headers_may_be_anywhere():
    text = "x-anthropic-billing-header: a; cch=1;\nYou are.\n<total_tokens>5 tokens left</total_tokens>"
    said = [{"role": "system", "content": text}, *HI]
    assert of_chat(messages=said).messages[0]["content"] == "You are."
    assert of_chat(messages=[{"role": "user", "content": text}]).messages[0]["content"] == text
    assert of_input(instructions=text).messages[0]["content"] == "You are."


def test_null_is_the_default_and_unknown_fields_are_ignored():
    for read, body in ((chat.read, CHAT), (messages.read, MESSAGES), (responses.read, RESPONSES)):
        needed = ("messages", "input")
        assert read({key: value if key in needed else None for key, value in body.items()}) == read(
            {"new": [1], **{key: body[key] for key in needed if key in body}}
        )


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_output_tokens": 5}, 5),
        ({"n_predict": 6.0}, 6),
        ({"max_tokens": -1}, None),
    ],
)
def test_token_limits(fields, limit):
    assert of_chat(**fields).max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_thinking(fields, thinking):
    assert of_chat(**fields).thinking is thinking
    assert of_messages(**fields).thinking is thinking


def test_effort_of_responses():
    assert of_input(reasoning={"effort": "none"}).thinking is False
    assert of_input(reasoning=None).thinking is None
    assert of_input(reasoning={"effort": None}).thinking is None


@pytest.mark.parametrize(
    ("choice", "wanted", "left"),
    [
        ("auto", "auto", 2),
        ("none", "none", 2),
        ("required", "required", 2),
        ("any", "required", 2),
        ({"type": "function", "function": {"name": "Read"}}, ["Read"], 2),
        ({"type": "function", "name": "Read"}, ["Read"], 2),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "Read"}]}, "auto", 1),
        ({"type": "allowed_tools", "tools": [{"type": "mcp"}, {"type": "custom", "name": "Read"}]}, "auto", 1),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [READ]}}, "required", 1),
    ],
)
def test_tool_choice(choice, wanted, left):
    tools = [READ, {"type": "function", "function": {"name": "other"}}]
    for request in (of_chat(tools=tools, tool_choice=choice), of_input(tools=tools, tool_choice=choice)):
        assert (request.tool_choice, len(request.tools)) == (wanted, left)


def test_a_choice_of_a_servers_tool_means_none():
    for tools in ([], [{"type": "function", "name": "Read"}, {"type": "web_search"}]):
        assert of_input(tools=tools, tool_choice={"type": "web_search"}).tool_choice == "auto"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [({"type": "auto"}, "auto"), ({"type": "none"}, "none"), ({"type": "tool", "name": "Read"}, ["Read"])],
)
def test_anthropic_choice(choice, wanted):
    request = of_messages(tools=[{"name": "Read", "input_schema": {}}], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (wanted, True)


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, True),
        ({"type": "json_object", "schema": {"type": "array"}}, {"type": "array"}),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, {}),
    ],
)
def test_structure(form, schema):
    assert of_chat(response_format=form).schema == schema
    assert of_input(text={"format": form}).schema == schema
    if form.get("json_schema") is None:
        request = of_messages(output_config={"effort": "low", "format": form})
        assert (request.schema, request.effort, request.thinking) == (schema, "low", None)
        assert of_messages(output_config={}, output_format=form).schema == schema


def test_a_cut_call_in_a_history_is_kept():
    said = [{"role": "assistant", "tool_calls": [call("Read", '{"path": "a', "call_1")]}]
    assert of_chat(messages=said).messages[0]["tool_calls"][0]["function"]["arguments"] == {"input": '{"path": "a'}


def test_results_without_ids_follow_the_calls():
    called = {"role": "assistant", "tool_calls": [call("a", {}, "1"), call("b", {}, "2")]}
    said = [called, {"role": "tool", "content": "A"}, {"role": "tool", "content": "B"}]
    assert of_chat(messages=said).messages[1:] == [result("A", "1", "a"), result("B", "2", "b")]


def test_items_of_one_turn_and_of_two():
    calls = [{"type": "function_call", "call_id": i, "name": f"f{i}", "arguments": "{}"} for i in "ab"]
    outputs = [{"type": "function_call_output", "call_id": i, "output": f"result {i}"} for i in "ab"]
    one = of_input(*calls, {"role": "developer", "content": "Hurry."}, *reversed(outputs)).messages
    two = of_input(calls[0], outputs[0], {"type": "reasoning"}, calls[1], outputs[1]).messages
    assert [message["role"] for message in one] == ["assistant", "tool", "tool", "system"]
    assert [message["role"] for message in two] == ["assistant", "tool", "assistant", "tool"]
    for said in (one, two):
        results = [message for message in said if message["role"] == "tool"]
        assert results == [result("result a", "a", "fa"), result("result b", "b", "fb")]


def test_a_shell_call_is_passed_over_with_its_output():
    shell = [
        {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": {"type": "exec", "command": []}},
        {"type": "function_call_output", "call_id": "s", "output": "files"},
    ]
    user = {"role": "user", "content": "hi"}
    assert of_input(user, *shell, user).messages == [user, user]


@pytest.mark.parametrize("namespace", ["mcp__x", "mcp__x__"])
def test_tools_of_a_namespace(namespace):
    inner = {"type": "function", "name": "find"}
    request = of_input(tools=[{"type": "namespace", "name": namespace, "tools": [inner]}, inner])
    assert [tool["function"]["name"] for tool in request.tools] == ["mcp__x__find", "find"]
    assert request.extra["known"]["mcp__x__find"].namespace == namespace


def test_instructions_alone_can_be_answered():
    assert responses.read({"input": [], "instructions": "Hi"}).messages == [{"role": "system", "content": "Hi"}]


def test_encrypted_reasoning_comes_back():
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("Grüße")},
        {"role": "user", "content": ""},
    ]
    turn = {"role": "assistant", "content": "", "reasoning_content": "Grüße"}
    assert of_input(items[0]).messages == [turn]
    other = {**items[0], "encrypted_content": "gAAAA", "summary": [{"type": "summary_text", "text": "short"}]}
    assert of_input(other, {"type": "function_call", "name": "f"}).messages[0]["reasoning_content"] == "short"


IMAGE = {"type": "image_url", "image_url": {"detail": "low"}}
REFUSED = [
    (chat.read, {}, "messages"),
    (chat.read, {"messages": []}, "messages"),
    (chat.read, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url"),
    (chat.read, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    (chat.read, {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
    (chat.read, {"messages": [{"role": "critic", "content": ""}]}, "messages[0].role"),
    (chat.read, {"messages": HI, "n": 65}, "n"),
    (messages.read, {"messages": HI, "n": 2}, "n"),
    (chat.read, {"messages": HI, "modalities": ["text", "audio"]}, "modalities"),
    (chat.read, {"messages": HI, "chat_template": "{{ x }}"}, "chat_template"),
    (chat.read, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (chat.read, {"messages": HI, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
    (chat.read, {"messages": HI, "chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
    (chat.read, {"messages": HI, "temperature": "hot"}, "temperature"),
    (chat.read, {"messages": HI, "temperature": True}, "temperature"),
    (chat.read, {"messages": HI, "top_p": 1.1}, "top_p"),
    (chat.read, {"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    (chat.read, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    (chat.read, {"messages": HI, "logit_bias": {"1": 101}}, "logit_bias.1"),
    (chat.read, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (chat.read, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (chat.read, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (chat.read, {"messages": HI, "stop": [1]}, "stop"),
    (chat.read, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (chat.read, {"messages": HI, "tool_choice": "sometimes"}, "tool_choice"),
    (chat.read, {"messages": HI, "tools": [READ], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    (chat.read, {"messages": HI, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    (chat.read, {"messages": HI, "reasoning_effort": "super"}, "reasoning_effort"),
    (chat.read, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    (chat.read, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.schema"),
    (completions.read, {}, "prompt"),
    (completions.read, {"prompt": ["a", []]}, "prompt"),
    (completions.read, {"prompt": ["a"] * 9, "n": 8}, "prompt"),
    (completions.read, {"prompt": [-1]}, "prompt"),
    (completions.read, {"prompt": "a", "best_of": 2}, "best_of"),
    (completions.read, {"prompt": [1], "suffix": "b"}, "suffix"),
    (completions.read, {"prompt": "a", "echo": True}, "echo"),
    (messages.read, {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    (messages.read, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
    (messages.read, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    (messages.read, {"messages": HI, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    (messages.read, {"messages": HI, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    (messages.read, {"messages": HI, "thread": {"type": "create"}}, "thread"),
    (messages.read, {"messages": HI, "output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    (messages.read, {"messages": HI, "output_config": {"effort": "super"}}, "output_config.effort"),
    (responses.read, {}, "input"),
    (responses.read, {"input": []}, "input"),
    (responses.read, {"input": [{"type": "web_search_call"}]}, "input"),
    (responses.read, {"input": "hi", "response_format": {"type": "json_object"}}, "response_format"),
    (responses.read, {"input": "hi", "reasoning": {"effort": "super"}}, "reasoning.effort"),
    (responses.read, {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    (responses.read, {"input": "hi", "conversation": "c"}, "conversation"),
    (responses.read, {"input": "hi", "background": True}, "background"),
    (responses.read, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        responses.read,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url",
    ),
    (responses.read, {"input": "hi", "tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
    (tokenize.read, {}, "content"),
]


@pytest.mark.parametrize(("read", "body", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(read, body, param):
    with pytest.raises(BadRequestError) as caught:
        read(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    leaf = param.split(".")[-1].split("[")[0]
    assert leaf in str(caught.value) or param.split(".")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tools_of_others_are_named():
    tools = [{"type": kind, "name": "x"} for kind in ("web_search_20250305", "bash_20250124")]
    with pytest.raises(BadRequestError, match="of type 'web_search_20250305', 'bash_20250124', or"):
        of_messages(tools=[{"name": "Read", "input_schema": {}}, *tools])


def nested(levels):
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "finite"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b"\xff{}", "UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (nested(DEEPEST + 1), "levels deep"),
        (nested(100_000), "levels deep"),
    ],
)
def test_invalid_bodies(data, words):
    with pytest.raises(BadRequestError, match=words):
        parse(data)


def test_valid_bodies():
    assert parse('{"a": "ü😀", "b": [null]}'.encode()) == {"a": "ü😀", "b": [None]}
    assert parse(nested(DEEPEST - 1))


APIS = [(chat, CHAT), (completions, COMPLETIONS), (messages, MESSAGES), (responses, RESPONSES)]


def words_of(value):
    """Returns all keys and short texts of a body."""
    if isinstance(value, dict):
        return {*value, *(word for inner in value.values() for word in words_of(inner))}
    if isinstance(value, list):
        return {word for inner in value for word in words_of(inner)}
    return {value} if isinstance(value, str) else set()


WORDS = st.sampled_from(sorted(words_of([body for _, body in APIS]) | {"image", "audio", "type", "schema", "item_id"}))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=8))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=20,
)


def places(value, path=()):
    """Yields the path of everything inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(body, path, value):
    body = copy.deepcopy(body)
    inside = body
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return body


def attempt(api, body):
    """Returns a request whose parts are JSON again, or a refusal of one line."""
    try:
        request = api.read(body)
    except RequestError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 400
        message.encode()
        return
    assert isinstance(request, Request)
    for message in request.messages:
        assert isinstance(message["content"], str) and message["role"] in ("system", "user", "assistant", "tool")
        assert all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", ()))
    json.dumps([request.messages, request.tools, dict(request.template_variables)], allow_nan=False).encode()


@pytest.mark.parametrize(("api", "body"), APIS, ids=["chat", "completions", "messages", "responses"])
def test_one_value_is_wrong(api, body):
    where = st.sampled_from(list(places(body)))

    @settings(max_examples=examples(125))
    @given(where, JSON)
    def check(path, value):
        attempt(api, changed(body, path, value))

    check()


@pytest.mark.parametrize(("api", "body"), APIS, ids=["chat", "completions", "messages", "responses"])
def test_every_place_gets_every_type(api, body):
    for path in places(body):
        for value in (None, True, 5, -0.5, "x", "", [], [5], ["x"], [[]], {}, {"x": 5}, [{"type": "x"}], {"type": "x"}):
            attempt(api, changed(body, path, value))


@settings(max_examples=examples(125))
@given(st.sampled_from([api for api, _ in APIS]), JSON)
def test_everything_is_wrong(api, body):
    attempt(api, body)
