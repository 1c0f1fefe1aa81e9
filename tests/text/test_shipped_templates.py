"""Templates that come with the package, compared with the programs that they replace, and their use."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from styles import TEMPLATES as FIXTURES

from moeflux_mlx.errors import TokenizerError
from moeflux_mlx.text.calls.invoke import DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V41
from moeflux_mlx.text.calls.reader import AnswerReader
from moeflux_mlx.text.channels import SPANS
from moeflux_mlx.text.chat_template import TEMPLATES, ChatTemplate, find_templates
from moeflux_mlx.text.events import CallEnd, Reasoning, Text
from moeflux_mlx.text.switches import switches

theirs = pytest.importorskip("mlx_lm.chat_templates.deepseek_v32", reason="mlx-lm is for Python 3.11 and newer")
TEMPLATE = ChatTemplate({"default": (TEMPLATES / "deepseek_v32.jinja").read_text("utf-8")})
K3 = ChatTemplate({"default": (TEMPLATES / "kimi_k3.jinja").read_text("utf-8")})
V4 = ChatTemplate({"default": (TEMPLATES / "deepseek_v4.jinja").read_text("utf-8")})
V4_CASES = json.loads((FIXTURES / "deepseek_v4.json").read_text("utf-8"))
V41 = ChatTemplate({"default": (TEMPLATES / "deepseek_v41.jinja").read_text("utf-8")})
V41_CASES = json.loads((FIXTURES / "deepseek_v41.json").read_text("utf-8"))
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
TEXT = st.sampled_from(["", "Hello", " two\n\nlines ", "é <｜User｜> 'q'"])
VALUES = st.sampled_from(['q"<', "3", 3, 2.5, True, [1, {"é": None}], {"a": "b"}])
CALLS = st.dictionaries(st.sampled_from(["x", "y", "long name"]), VALUES, max_size=3)


@st.composite
def turns(draw):
    """Draws a user's message, and perhaps calls with their results, and an answer."""
    messages = [{"role": "user", "content": draw(TEXT)}]
    for calls in draw(st.lists(st.lists(CALLS, min_size=1, max_size=2), max_size=2)):
        functions = [{"name": "f", "arguments": arguments} for arguments in calls]
        called = [{"id": "1", "type": "function", "function": function} for function in functions]
        reasons = {"reasoning_content": draw(TEXT)}
        messages.append({"role": "assistant", "content": draw(TEXT), "tool_calls": called, **reasons})
        messages += [{"role": "tool", "content": draw(TEXT)} for _ in calls]
    return messages


def as_text(message):
    """Converts arguments to JSON text, which their program expects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


@given(
    system=TEXT,
    chat=st.lists(turns(), min_size=1, max_size=3),
    answer=st.just("Said.") | TEXT.filter(bool),
    tools=st.sampled_from([None, TOOLS]),
    thinks=st.booleans(),
)
def test_deepseek_v32_is_written_as_mlx_lm_writes_it(system, chat, answer, tools, thinks):
    messages = [{"role": "system", "content": system}]
    for turn in chat[:-1]:
        messages += [*turn, {"role": "assistant", "content": answer, "reasoning_content": "why"}]
    messages += chat[-1]
    expected = theirs.apply_chat_template(
        [as_text(message) for message in messages], tools=tools, enable_thinking=thinks, add_generation_prompt=True
    )
    assert TEMPLATE.render(messages, tools=tools, variables={"enable_thinking": thinks}) == expected


@pytest.mark.parametrize("case", V4_CASES, ids=lambda case: case["name"])
def test_deepseek_v4_is_written_as_its_own_program_writes_it(case):
    """The prompts were made by encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash."""
    tools = TOOLS if case["tools"] else None
    assert V4.render(case["messages"], tools=tools, variables=case["variables"]) == case["prompt"]


@pytest.mark.parametrize("case", V41_CASES, ids=lambda case: case["name"])
def test_deepseek_v41_is_written_as_its_own_program_writes_it(case):
    """The prompts were made by what encoding/encoding.py of deepseek-ai/DeepSeek-V4.1-Flash does with text."""
    tools = TOOLS if case["tools"] else None
    assert V41.render(case["messages"], tools=tools, variables=case["variables"]) == case["prompt"]


@pytest.mark.parametrize("effort, budget", [("minimal", 50), ("medium", 75), ("xhigh", 100), (None, 75)])
def test_efforts_of_requests_are_those_of_deepseek_v41(effort, budget):
    source = (TEMPLATES / "deepseek_v41.jinja").read_text("utf-8")
    prompt = V41.render([{"role": "user", "content": "Hi"}], variables=switches(source, True, effort))
    assert f"Reasoning Effort: {budget} (range" in prompt


@pytest.mark.parametrize("effort", [0, 101, "much"])
def test_deepseek_v41_refuses_other_efforts(effort):
    with pytest.raises(TokenizerError, match="a number from 1 to 100"):
        V41.render([{"role": "user", "content": "Hi"}], variables={"reasoning_effort": effort})


def test_a_developer_is_the_system_of_deepseek_v41():
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert V41.render([{**chat[0], "role": "developer"}, chat[1]]) == V41.render(chat)


@given(
    system=TEXT,
    chat=st.lists(turns(), min_size=1, max_size=3),
    tools=st.sampled_from([None, TOOLS]),
    thinks=st.booleans(),
    effort=st.sampled_from(["low", "high", "max", None]),
)
def test_kimi_k3_is_written_as_its_own_program_writes_it(system, chat, tools, thinks, effort):
    k3 = pytest.importorskip("mlx_vlm.models.kimi_k3.encoding_k3", reason="mlx-vlm is for Python 3.11 and newer")
    messages = [{"role": "system", "content": system}, *(message for turn in chat for message in turn)]
    given = {"thinking": thinks, "thinking_effort": effort or "max"}
    expected = "".join(one.text for one in k3.build_chat_segments(messages, tools, **given))
    variables = {"enable_thinking": thinks} | ({"reasoning_effort": effort} if effort else {})
    assert K3.render(messages, tools=tools, variables=variables) == expected


@pytest.mark.parametrize("thinks", [True, False])
def test_spans_of_kimi_k3_are_no_text(thinks):
    """The prompt has opened the first span."""
    answer = "<|open|>response<|sep|>" * thinks + "Oslo\n<|close|>response<|sep|><|close|>message<|sep|>"
    reader = AnswerReader(None, inside_reasoning=thinks, channels=SPANS)
    events = [*reader.feed("why<|close|>think<|sep|>" * thinks + answer), *reader.finish()]
    assert events == [Reasoning("why")] * thinks + [Text("Oslo\n")]


@pytest.mark.parametrize("template", [TEMPLATE, V4, V41])
def test_tools_are_described_without_a_system_message_too(template):
    assert "## Tools" in template.render([{"role": "user", "content": "Hi"}], tools=TOOLS)


@pytest.mark.parametrize(
    "config, tokenizer_config, found",
    [
        ({"model_type": "deepseek_v32"}, {}, True),
        ({"model_type": "deepseek_v4"}, {}, True),
        ({"model_type": "deepseek_v41"}, {}, True),
        ({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}, {}, True),
        ({"model_type": "other"}, {"chat_template_type": "deepseek_v32"}, True),
        ({"model_type": "deepseek_v32"}, {"chat_template": "its own"}, False),
        ({"model_type": "other"}, {"chat_template_type": "../deepseek_v32"}, False),
        (None, {}, False),
    ],
)
def test_a_shipped_template_is_used_if_the_checkpoint_has_none(tmp_path, config, tokenizer_config, found):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    templates = find_templates(tmp_path, tokenizer_config)
    source = templates.get("default", "")
    assert ("｜DSML｜" in source or "<|open|>call" in source) == found


@pytest.mark.parametrize("dialect", [DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "kind, text, value", [("true", "3", "3"), ("false", "3", 3), ("false", "null", None), ("true", "null", "null")]
)
def test_a_value_is_what_it_says_it_is(dialect, kind, text, value):
    """The type does not depend on whether a tool's schema names the parameter."""
    (key, key_end), (_, value_end) = dialect.tags.key, dialect.tags.value
    call = f'{dialect.opening}f">\n{key}x{key_end}{kind}">{text}{value_end}\n{dialect.close}'
    reader = AnswerReader(dialect, TOOLS)
    ends = [event for event in [*reader.feed(call), *reader.finish()] if isinstance(event, CallEnd)]
    assert [json.loads(end.arguments) for end in ends] == [{"x": value}]
