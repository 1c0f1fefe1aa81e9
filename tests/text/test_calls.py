"""Answers with tool calls: every dialect, every kind of error, and any cut of the text."""

import json

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from styles import BETWEEN, written

from moeflux_mlx.text.calls.deepseek import DEEPSEEK_V3
from moeflux_mlx.text.calls.gemma import GEMMA
from moeflux_mlx.text.calls.harmony import GPT_OSS
from moeflux_mlx.text.calls.hunyuan import K2_HORIZON, hunyuan, hunyuan4
from moeflux_mlx.text.calls.inkling import INKLING_JSON
from moeflux_mlx.text.calls.invoke import DOTS, MINIMAX
from moeflux_mlx.text.calls.kimi import KIMI
from moeflux_mlx.text.calls.kimi_k3 import KIMI_K3
from moeflux_mlx.text.calls.listed import COHERE_ACTION, HUNYUAN_A13B
from moeflux_mlx.text.calls.llama4 import LLAMA4
from moeflux_mlx.text.calls.minimax_m3 import MARK, MINIMAX_M3
from moeflux_mlx.text.calls.muse import MUSE_SPARK
from moeflux_mlx.text.calls.reader import HEADERS, AnswerReader, merged
from moeflux_mlx.text.calls.registry import DIALECTS, dialect_of
from moeflux_mlx.text.calls.solar import SOLAR_OPEN
from moeflux_mlx.text.calls.tool_call import EXAONE, GLM, QWEN_JSON, QWEN_XML
from moeflux_mlx.text.channels import COHERE, HARMONY, INKLING, MUSE, SOLAR, THINK, Channels, channels_of
from moeflux_mlx.text.channels import GEMMA as GEMMAS
from moeflux_mlx.text.channels import LLAMA4 as LLAMAS
from moeflux_mlx.text.channels import MINIMAX as MINIMAXES
from moeflux_mlx.text.events import CallDelta, CallEnd, CallStart, Reasoning, Text

PARAMETERS = {
    "type": "object",
    "$defs": {"flag": {"type": ["boolean", "null"]}},
    "properties": {
        "city": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
        "flag": {"$ref": "#/$defs/flag"},
        "where": {"type": "object"},
        "mixed": {"type": ["string", "array"]},
        "unit": {"enum": ["C", "F"]},
        "all": {"allOf": [{"description": "x"}, {"type": "number"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
NASTY = [
    "</tool_call>", "<tool_call>", "<function=get_weather>", "<parameter=city>", "</parameter>", "</parameter>\n",
    "</think>", "<think>", '"', "\\", "\n", "{", "}", "```", "é", "🦊", "\u2028", "<｜tool▁call▁end｜>", "\t", "<", " ",
    "<｜tool▁calls▁begin｜>",
    "</arg_value>", "<arg_key>", "<|tool_call_end|>", "[TOOL_CALLS]", "</parameter></invoke>",
    "x", "null", "3", '\\"', "</", "<tool_c",
]  # fmt: skip


def read(text, dialect, cuts=(), cut=False, **options):
    """Returns all events of `text`, which is given in pieces, put together."""
    options = {
        "channels": {one.name: kind for kind, one in HEADERS.items()}.get(dialect and dialect.name, THINK)
    } | options
    reader = AnswerReader(dialect, options.pop("tools", TOOLS), **options)
    edges = [0, *sorted(cuts), len(text)]
    events = [event for a, b in zip(edges, edges[1:], strict=False) for event in reader.feed(text[a:b])]
    return merged(events + reader.finish(cut))


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def calls_of(events):
    """Returns (name, arguments) of the complete calls, after checking the order of their events."""
    for end in (event for event in events if isinstance(event, CallEnd)):
        own = [event for event in events if getattr(event, "index", None) == end.index]
        assert own[0] == CallStart(end.index, end.name) and own[-1] is end
        assert "".join(event.text for event in own if isinstance(event, CallDelta)) == end.arguments
    return [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEnd)]


json_call, xml_call, deepseek_call = (written(dialect) for dialect in (QWEN_JSON, QWEN_XML, DEEPSEEK_V3))
FORMS = [(dialect, written(dialect)) for dialect in DIALECTS]
TAGGED = [form for form in FORMS if form[0] not in HEADERS.values()]  # those whose answers are not messages
EVERY_FORM = pytest.mark.parametrize("dialect, write", FORMS, ids=[form[0].name for form in FORMS])
EVERY_TAGGED_FORM = pytest.mark.parametrize("dialect, write", TAGGED, ids=[form[0].name for form in TAGGED])


@EVERY_TAGGED_FORM
def test_reasoning_text_and_calls(dialect, write):
    first, second = write({"city": "Paris", "days": 3}), write({}, "get_time")
    events = read(f"<think>\nwhy\n</think>\n\nLet me see.\n\n{first}\n{second}", dialect)
    assert events[:2] == [Reasoning("why"), Text("Let me see.")]
    assert calls_of(events) == [("get_weather", {"city": "Paris", "days": 3}), ("get_time", {})]
    assert [event.index for event in events if isinstance(event, CallStart)] == [0, 1]
    raws = [event.raw for event in events if isinstance(event, CallEnd)]
    assert raws[0].startswith(first) and raws[1] == second


@EVERY_TAGGED_FORM
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_cut_changes_the_events(dialect, write, data):
    nasty = st.lists(st.sampled_from(NASTY), max_size=6).map("".join)
    value = data.draw(nasty)
    text = data.draw(nasty) + write({"city": value, "days": 2}) + data.draw(nasty)
    text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    options = {"inside_reasoning": data.draw(st.booleans()), "cut": data.draw(st.booleans())}
    whole = read(text, dialect, **options)
    assert read(text, dialect, cuts, **options) == whole
    assert read(text, dialect, range(len(text)), **options) == whole
    calls_of(whole)


@EVERY_TAGGED_FORM
@settings(max_examples=examples(60), deadline=None)
@given(value=st.lists(st.sampled_from(NASTY) | st.text(max_size=3), max_size=8).map("".join))
def test_any_string_arrives_as_it_was_written(dialect, write, value):
    followers = () if dialect.tags is None else (dialect.tags.key[0], *dialect.tags.ends)
    closing = "" if dialect.tags is None else dialect.tags.value[1]
    ended = any("".join(value.split()).find(closing + "".join(tag.split())) >= 0 for tag in followers)
    surrogates = any("\ud800" <= char <= "\udfff" for char in value)
    if not ended and not surrogates and "\r" not in value:
        assert calls_of(read(write({"city": value}), dialect)) == [("get_weather", {"city": value})]


@settings(max_examples=examples(80), deadline=None)
@given(text=st.lists(st.sampled_from(NASTY), max_size=12).map("".join), inside=st.booleans())
def test_without_tools_only_reasoning_is_separated(text, inside):
    events = read(text, QWEN_XML, tools=(), inside_reasoning=inside)
    pieces, rest = {Text: "", Reasoning: ""}, text
    while rest:
        piece, _, rest = rest.partition("</think>" if inside else "<think>")
        pieces[Reasoning if inside else Text] += piece
        inside = not inside
    for kind, expected in pieces.items():
        assert "".join("".join(e.text for e in events if isinstance(e, kind)).split()) == "".join(expected.split())


@EVERY_TAGGED_FORM
def test_an_unknown_tool_stays_text(dialect, write):
    text = "So: " + write({"city": "Oslo"}, "unheard_of")
    assert read(text, dialect) == [Text(text)]
    assert read(text, None) == [Text(text)]


@EVERY_TAGGED_FORM
def test_a_call_in_reasoning_counts(dialect, write):
    events = read("I call it.\n" + write({"city": "Oslo"}), dialect, inside_reasoning=True)
    assert events[0] == Reasoning("I call it.") and calls_of(events) == [("get_weather", {"city": "Oslo"})]


@EVERY_TAGGED_FORM
def test_a_call_that_the_limit_cuts_is_not_a_call(dialect, write):
    text = write({"city": "Oslo"})
    for length in range(1, len(text) - 40):
        events = read(text[:length], dialect, cut=True)
        announced = any(isinstance(event, CallStart) for event in events)
        assert not calls_of(events) and text_of(events) == ("" if announced else text[:length])


@EVERY_TAGGED_FORM
def test_a_call_that_breaks_off_comes_back_as_text(dialect, write):
    text = write({"city": "Oslo"})
    for length in range(1, len(text) - 40):
        events = read(text[:length], dialect)
        assert not calls_of(events) and text_of(events) == text[:length]


@EVERY_TAGGED_FORM
def test_only_one_call_if_parallel_calls_are_forbidden(dialect, write):
    reader = AnswerReader(dialect, TOOLS, parallel=False)
    events = reader.feed(write({"city": "A"}) + "\n" + write({"city": "B"}) + "more")
    assert reader.done and reader.calls == 1
    assert calls_of(events + reader.finish()) == [("get_weather", {"city": "A"})]


@EVERY_TAGGED_FORM
def test_a_prompt_can_begin_the_call(dialect, write):
    text = write({"city": "Oslo"})
    named = dialect.prefix("get_weather")
    assert text.startswith(named) and named.startswith(dialect.prefix())
    reader = AnswerReader(dialect, TOOLS, inside_reasoning=True)
    events = reader.feed(dialect.prefix("get_weather", inside_reasoning=True)) + reader.feed(text[len(named) :])
    assert calls_of(events + reader.finish()) == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "get_weather", "arguments": {"city": "A"',
        '{"name": "get_weather", "arguments": {"city": A}}',
        '{"name": "get_weather", "arguments": {"city": NaN}}',
        '{"name": "get_weather", "arguments": {"city" "A"}}',
        '{"name": "get_weather", "arguments": ["A"]}',
        '{"name": "get_weather", "arguments": "A"}',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {"city": "A"}}',
        '{"name": "get_weather", "name": "get_time"}',
        '{"name": "get_weather", "arguments": {}, "arguments": {}}',
        '{"name": "get_weather", "arguments": ' + '{"a":' * 20000 + "1" + "}" * 20001,
        "{{",
        "{name}",
        "<function=get_weather><parameter=city>A",
        "<function=get_weather>city",
        "<function=get\nweather>",
        "<functio>",
        "what is this?",
        "",
    ],
)
def test_a_malformed_call_comes_back_as_text(body):
    text = f"a <tool_call>\n{body}</tool_call> b"
    events = read(text, QWEN_XML)
    assert not calls_of(events) and text_of(events) == text


def test_a_second_call_survives_a_malformed_one():
    text = '<tool_call>\n<tool_call>\n{"name": "get_time"}\n</tool_call>'
    events = read(text, QWEN_JSON)
    assert text_of(events) == "<tool_call>" and calls_of(events) == [("get_time", {})]


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('<tool_call>{"name": "get_weather"}</tool_call>', {}),
        ('<tool_call>{"name": "get_weather", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "get_weather", "arguments": ""}</tool_call>', {}),
        ("<tool_call>get_weather</tool_call>", {}),
        ("<tool_call>\nget_weather\n</tool_call>", {}),
        ("<tool_call><function=get_weather></function></tool_call>", {}),
        ('<tool_call>{"arguments": {"city": "A"}, "name": "get_weather"}</tool_call>', {"city": "A"}),
        ('<tool_call>{"id": 1, "name": "get_weather", "parameters": {"days": [1, {}]}}', {"days": [1, {}]}),
        ('<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 1}"}</tool_call>', {"days": 1}),
        ('<tool_call>{"name": "get_weather", "arguments": {"days": 1}</tool_call>', {"days": 1}),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>', {"city": "a\nb"}),
        ("<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>", {"city": "A"}),
        ("<tool_call><function=get_weather><parameter=city>A</parameter></tool_call>", {"city": "A"}),
        ("<tool_call><function=get_weather><parameter=city>A</parameter></function>", {"city": "A"}),
    ],
)
def test_accepted_spellings(text, arguments):
    events = read(text, QWEN_XML)
    assert calls_of(events) == [("get_weather", arguments)] and text_of(events) == ""


def test_forms_of_deepseek_without_arguments():
    for body in ("function<｜tool▁sep｜>get_time\n```json\n```", "get_time<｜tool▁sep｜>", "get_time<｜tool▁sep｜>{}"):
        text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"
        assert calls_of(read(text, DEEPSEEK_V3)) == [("get_time", {})]


def test_a_bare_function_counts_only_where_the_tool_is_declared_and_outside_reasoning():
    text = "<function=get_time>\n</function>"
    assert calls_of(read(text, QWEN_XML)) == [("get_time", {})]
    assert read(text, QWEN_JSON) == [Text(text)]
    assert read(text, QWEN_XML, inside_reasoning=True) == [Reasoning(text)]
    other = "Write <function=NAME> first."
    assert read(other, QWEN_XML) == [Text(other)]


def test_what_follows_a_call_is_read():
    events = read(xml_call({"city": "A"}) + "\n\nDone. " + json_call({}, "get_time") + "\n", QWEN_XML)
    assert text_of(events) == "\n\nDone." and len(calls_of(events)) == 2


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("city", "null", "null"),
        ("city", "  indented\n", "  indented\n"),
        ("note", "null", None),
        ("note", "2024", "2024"),
        ("unit", "3", "3"),
        ("unknown", "3", "3"),
        ("days", "3", 3),
        ("days", " 3 ", 3),
        ("days", "null", "null"),
        ("days", "three", "three"),
        ("days", "NaN", "NaN"),
        ("days", "'3'", "'3'"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "None", None),
        ("flag", "null", None),
        ("where", "{'a': True}", {"a": True}),
        ("where", '{"a": [1]}', {"a": [1]}),
        ("where", "{1, 2}", "{1, 2}"),
        ("mixed", '["a"]', ["a"]),
        ("mixed", "2024", "2024"),
        ("all", "1.50", 1.5),
    ],
)
def test_parameters_have_the_types_of_the_schema(key, text, value):
    ((_, arguments),) = calls_of(read(xml_call({key: text}), QWEN_XML))
    assert arguments == {key: value} and type(arguments[key]) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": []},
        {"properties": {"a": True}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"$ref": 7}}},
        {"properties": {"a": {"type": {}}}},
        {"properties": {"a": {"anyOf": [7]}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 20}}},  # 20 ** 8 parts
    ],
)
def test_a_parameter_without_a_schema_is_a_string(schema):
    tools = [{"function": {"name": "f", "parameters": schema}}]
    assert calls_of(read(xml_call({"a": "3"}, "f"), QWEN_XML, tools=tools)) == [("f", {"a": "3"})]


def test_numbers_pass_as_they_are_written():
    events = read(xml_call({"all": "1.10"}), QWEN_XML)
    assert [event.arguments for event in events if isinstance(event, CallEnd)] == ['{"all": 1.10}']


def test_arguments_come_while_they_are_written():
    reader = AnswerReader(QWEN_XML, TOOLS)
    assert reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\nline") == [
        CallStart(0, "get_weather"),
        CallDelta(0, '{"city": "line 1\\nline'),
    ]
    reader = AnswerReader(MINIMAX_M3, TOOLS)
    assert reader.feed(marked('<tool_call>@<invoke name="get_weather">@<city> line 1\nline@<'))[1] == CallDelta(
        0, '{"city": " line 1\\nline'
    )
    reader = AnswerReader(QWEN_JSON, TOOLS)
    assert reader.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "line')[1] == CallDelta(
        0, '{"city": "line'
    )


def test_dialects_are_recognised_by_what_their_templates_write():
    for dialect, write in FORMS:
        head = "<|header_start|>" if dialect is LLAMA4 else ""  # its calls have nothing else of their own
        assert dialect_of(head + write({"city": "Oslo"})) is dialect
    assert dialect_of("<tool_calls:v2>\n<tool_call:v2>f<tool_sep:v2>") is hunyuan(":v2")
    assert dialect_of("<tool_calls>\n<tool_call>f<tool_sep>") is hunyuan("")
    assert dialect_of("<tool_calls>\n<tool_call>") is QWEN_JSON
    assert dialect_of("<tool_calls><tool_call>f<arg_key>") is hunyuan4("")
    assert dialect_of("<|header_start|>[f(city='Oslo')]") is None, "a template of calls as in Python"
    assert dialect_of("{{ messages }}") is None and dialect_of("") is None
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)


def marked(text):
    """Returns a call of MiniMax-M3 in which "@" stands for the mark. The mark at the beginning is left out."""
    return MARK + text.replace("@", MARK)


@pytest.mark.parametrize(
    "dialect, text, arguments",
    [
        (EXAONE, '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3}}\n</tool_call>', {"days": 3}),
        (GLM, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>A</arg_value></tool_call>", {"city": "A"}),
        (GLM, "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value></tool_call>", {"days": 3}),
        (GLM, "<tool_call>get_weather</tool_call>", {}),
        (KIMI, f"<|tool_call_begin|>get_weather{BETWEEN['kimi'][1:]} {{}} <|tool_call_end|>", {}),
        (KIMI, "<|tool_call_begin|>functions.get_weather:12<|tool_call_argument_begin|><|tool_call_end|>", {}),
        (
            MINIMAX,
            '<invoke name="get_weather"><parameter name="city">\nA\n</parameter></invoke>\n</minimax:tool_call>',
            {"city": "\nA\n"},
        ),
        (
            hunyuan(""),
            '<tool_call>get_weather<tool_sep>{"city": "A"}<end_of_tool_call>',
            {"city": "A"},
        ),
        (
            hunyuan(""),
            "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call></tool_calls>",
            {"days": 3},
        ),
        (hunyuan(""), "<tool_calls>\n<tool_call>get_weather<tool_sep>\n</tool_call>\n</tool_calls>", {}),
        (
            GEMMA,
            '<|tool_call>call:get_weather{ where : {<|"|>a<|"|>:[1,-2.5 , [] , {}],b:None} , flag:True,"city": "A"}',
            {"where": {"a": [1, -2.5, [], {}], "b": None}, "flag": True, "city": "A"},
        ),
        (
            GEMMA,
            '<|tool_call>call:get_weather{city:<|"|>a, b} "c"\n<|"|>,unit:C}<tool_call|>',
            {"city": 'a, b} "c"\n', "unit": "C"},
        ),
        (
            MINIMAX_M3,
            marked('<invoke name="get_weather"> @<city> a @x </city>@</city> @<days>3@</days>@</invoke>'),
            {"city": " a ]<]minimax[>[x </city>", "days": 3},
        ),
        (
            MINIMAX_M3,
            marked(
                '<invoke name="get_weather">@<where>\n@<item>@<n>1@</n>@</item>@<b>@</b>\n@</where>@<flag>null@</flag>'
                "@<mixed>@<item>a@</item>@<item>@<k>@<item>b@</item>@</k>@</item>@</mixed>@<unknown>@<k>3@</k>@</unknown>"
                "@</invoke>@</tool_call>"
            ),
            {
                "where": {"item": {"n": "1"}, "b": ""},
                "flag": None,
                "mixed": ["a", {"k": ["b"]}],
                "unknown": {"k": "3"},
            },
        ),
    ],
)
def test_other_spellings_of_newer_dialects(dialect, text, arguments):
    events = read(text, dialect)
    assert calls_of(events) == [("get_weather", arguments)] and text_of(events) == ""


def test_names_of_kimi_k3_are_escaped():
    """In its values nothing is; a key is found behind a value that is not closed too."""
    properties = {'a"&': {"type": "string"}, "b&quot;": {"type": "string"}}
    tools = [{"function": {"name": "R&D", "parameters": {"properties": properties}}}]
    begin = '<|open|>tools<|sep|><|open|>call tool="R&amp;D" index="1"<|sep|>'
    first, second = (
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}'
        for key, value in (("a&quot;&amp;", "x&amp;"), ("b&amp;quot;", '"y&'))
    )
    assert KIMI_K3.prefix("R&D").endswith(begin)
    for end in ("<|close|>argument<|sep|>", "\n"):
        text = f"{begin}{first}{end}{second}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
        assert calls_of(read(text, KIMI_K3, tools=tools)) == [("R&D", {'a"&': "x&amp;", "b&quot;": '"y&'})]


def test_calls_in_a_list():
    """As vLLM's parser of Hunyuan-A13B takes them; a list may have any spaces, and its end may be missing."""
    one, other = '{"name": "get_weather", "arguments": {"city": "Oslo"}}', '{"name": "get_time", "arguments": {}}'
    wanted = [("get_weather", {"city": "Oslo"}), ("get_time", {})]
    for before, between, after in (("[", ", ", "]"), ("\n[\n", ",\n", "\n]\n"), (" [ ", " , ", "")):
        text = f"Let me see.<tool_calls>{before}{one}{between}{other}{after}</tool_calls>"
        for cuts in ((), range(len(text))):
            events = read(text, HUNYUAN_A13B, cuts)
            assert text_of(events).strip() == "Let me see." and calls_of(events) == wanted
    assert calls_of(read(f"<tool_calls>[{one}", HUNYUAN_A13B)) == wanted[:1]


def test_calls_of_k2_horizon_in_json():
    """As vLLM's `k2_horizon_tool_parser.py` takes them."""
    one = '<ifm|tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</ifm|tool_call>\n'
    other = '<ifm|tool_call>{"name": "get_time", "arguments": {}}</ifm|tool_call>'
    for text in (f"A<ifm|tool_calls>\n{one}{other}\n</ifm|tool_calls>", f"A{one}{other}"):
        for cuts in ((), range(len(text))):
            events = read(text, K2_HORIZON, cuts)
            assert text_of(events) == "A"
            assert calls_of(events) == [("get_weather", {"city": "Oslo"}), ("get_time", {})]


def test_calls_of_dots_in_json():
    """As vLLM's `dots_tool_parser.py` takes them."""
    text = 'A<dots_function_call>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}\n</dots_function_call>'
    for cuts in ((), range(len(text))):
        events = read(text, DOTS, cuts)
        assert text_of(events) == "A" and calls_of(events) == [("get_weather", {"city": "Oslo"})]


def test_several_calls_in_one_section():
    one = '<invoke name="get_weather">\n<parameter name="city">A</parameter>\n</invoke>\n'
    events = read(f"Look:\n<minimax:tool_call>\n{one}{one}</minimax:tool_call>", MINIMAX)
    assert len(calls_of(events)) == 2 and text_of(events) == "Look:"
    call = f"<|tool_call_begin|>functions.get_weather:{BETWEEN['kimi']}{{}}<|tool_call_end|>"
    one = written(MINIMAX_M3)({"city": "A"}).removesuffix(MINIMAX_M3.section[1])
    two = one.removeprefix(MINIMAX_M3.section[0])
    events = read(f"Look:{one}{two}\n{MINIMAX_M3.section[1]}", MINIMAX_M3)
    assert len(calls_of(events)) == 2 and text_of(events) == "Look:"
    events = read(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>", KIMI)
    assert len(calls_of(events)) == 2 and text_of(events) == ""


def test_nested_values_of_minimax_are_typed():
    item = {"type": "object", "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}}}
    fields = {
        "rows": {"type": "array", "items": item},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
        "none": {"type": "array"},
        "some": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "item": {"$ref": "#/$defs/item"},
    }
    parameters = {"type": "object", "properties": fields, "$defs": {"item": item}}
    arguments = {
        "rows": [{"n": 1, "on": True}, {}, {"n": -2}],
        "map": {"item": 1.5, "b": 2},
        "none": [],
        "some": [3],
        "item": {"n": 4},
    }
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    for text in (
        written(MINIMAX_M3)(arguments, "f"),
        written(MINIMAX_M3)(arguments, "f").replace(f">{MARK}<", f">\n{MARK}<"),
    ):
        assert calls_of(read(text, MINIMAX_M3, tools=tools)) == [("f", arguments)]
        assert read(text, MINIMAX_M3, range(len(text)), tools=tools) == read(text, MINIMAX_M3, tools=tools)


@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_call>call:get_weather{{{'where:{' * 3000}",
        marked('<invoke name="get_weather">' + "@<where>" * 3000),
        marked('<invoke name="get_weather">@<where>@<a>1@</b>'),
        marked('<invoke name="get_weather">@<where>@<a>1@</a>@</city>@</invoke>'),
    ],
)
def test_values_that_are_too_deep_or_not_closed_make_no_call(text):
    events = read(text, MINIMAX_M3 if MARK in text else GEMMA)
    assert not calls_of(events) and text_of(events) == text


# Tags of each effort: vLLM's `k2_horizon_reasoning_parser.py`.
EFFORTS = Channels(
    "<ifm|think>",
    "</ifm|think>",
    others=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
)


@pytest.mark.parametrize("effort", ["", "_fast", "_faster"])
@pytest.mark.parametrize("ending", ["", "_fast", "_faster"])
def test_reasoning_of_any_effort_ends_with_the_tag_of_any(effort, ending):
    """K2 Horizon's prompts begin it; after a result of a tool the model may end it with the tag of another effort."""
    begun, said = f"<ifm|think{effort}>\n", f"why\n</ifm|think{ending}>\nA"
    assert EFFORTS.opens(f"<user>{begun}") and not EFFORTS.opens(f"<user>{begun}</ifm|think{ending}>")
    for text, inside in ((begun + said, False), (said, True)):
        for cuts in ((), range(len(text))):
            assert read(text, None, cuts, channels=EFFORTS, inside_reasoning=inside) == [Reasoning("why"), Text("A")]
    assert EFFORTS.opened_by(f"<user>{begun}") == begun and EFFORTS.visible(begun, said) == "A"
    assert EFFORTS.visible(begun, "why") is None
    assert EFFORTS.begin_of(f"<user>\n{begun}why", len(f"<user>\n{begun}")) == len("<user>")
    assert EFFORTS.past(said.encode()) == b"\nA" and EFFORTS.past(b"why</ifm|think_f") is None


def test_reasoning_has_the_tags_of_the_vocabulary():
    assert channels_of(frozenset({"<think>", "</think>"})) == channels_of(frozenset()) == THINK
    suffixed = channels_of(frozenset({"<think:opensource>", "</think:opensource>"}))
    assert suffixed == Channels("<think:opensource>", "</think:opensource>")
    assert channels_of(frozenset({"<longcat_think>"})) == Channels("<longcat_think>", "</longcat_think>")
    assert channels_of(frozenset({"<think>", "[THINK]"})) == Channels("[THINK]", "[/THINK]")
    for channels in (HARMONY, SOLAR, INKLING, MUSE, GEMMAS, MINIMAXES, COHERE):
        assert channels_of(channels.tags) is channels
    assert channels_of(EFFORTS.tags) == EFFORTS
    thought = "<|channel>thought\nwhy\n<channel|>A"
    assert read(thought, None, channels=GEMMAS) == [Reasoning("why"), Text("A")]
    assert read("<|channel>thought\n<channel|>A", None, channels=GEMMAS) == [Text("A")]
    for begun, inside in (("<mm:think>", False), ("", True)):
        assert read(f"{begun}why</mm:think>A </think>", None, channels=MINIMAXES, inside_reasoning=inside) == [
            Reasoning("why"),
            Text("A </think>"),
        ]
    assert read("</mm:think>A", None, channels=MINIMAXES) == [Text("A")]
    assert read("A </think>", None) == [Text("A </think>")]
    assert read("[THINK]why[/THINK]A <think>", None, channels=Channels("[THINK]", "[/THINK]")) == [
        Reasoning("why"),
        Text("A <think>"),
    ]


CHANNEL_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
HARMONY_ANSWERS = {
    "<|channel|>final<|message|>Hi.": [Text("Hi.")],
    "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi": [
        Reasoning("why"),
        Text("Hi"),
    ],
    "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>Hi": [
        Text("Plan.\n\nHi")
    ],
    "<|channel|>final<|message|>a < b <|x|>": [Text("a < b <|x|>")],
    "<|channel|>analysis<|message|>why": [Reasoning("why")],
    "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|chan": [Reasoning("why")],
    "<|channel|>fin": [],
    "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>": [("get_time", {})],
    CHANNEL_CALL: [("get_weather", {"city": "Oslo"})],
    f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{CHANNEL_CALL}": [
        Reasoning("why"),
        ("get_weather", {"city": "Oslo"}),
    ],
    "<|channel|>commentary to=functions.unheard_of<|message|>{}": [
        Text("<|channel|>commentary to=functions.unheard_of<|message|>{}")
    ],
}
SOLAR_CALL = (
    '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Oslo"}<|tool_call:end|>'
)
SOLAR_ANSWERS = {
    "<|content|>Hi.": [Text("Hi.")],
    "<|think|>why\n<|end|><|begin|>assistant<|content|>Hi": [Reasoning("why"), Text("Hi")],
    "<|content|>Plan.<|end|><|begin|>assistant<|content|>Hi": [Text("Plan.\n\nHi")],
    "<|content|>a < b <|x|>": [Text("a < b <|x|>")],
    "<|think|>why<|content|>Hi": [Reasoning("why"), Text("Hi")],
    "<|think|>why<|end|><|begin|>assis": [Reasoning("why")],
    SOLAR_CALL: [("get_weather", {"city": "Oslo"})],
    f"<|tool_calls|>{SOLAR_CALL}{SOLAR_CALL}<|calls|>": [("get_weather", {"city": "Oslo"})] * 2,
    f"<|think|>why<|end|><|begin|>assistant<|tool_calls|>{SOLAR_CALL}": [
        Reasoning("why"),
        ("get_weather", {"city": "Oslo"}),
    ],
    "<|content|>Look.<|end|><|begin|>assistant<|tool_calls|>\n"
    "<|tool_call:begin|><|tool_call:name|>get_time<|tool_call:args|><|tool_call:end|>": [
        Text("Look."),
        ("get_time", {}),
    ],
    "<|tool_call:begin|>1<|tool_call:name|>unheard_of<|tool_call:args|>{}": [
        Text("<|tool_call:begin|>1<|tool_call:name|>unheard_of<|tool_call:args|>{}")
    ],
}
COHERE_CALL = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo, {"}}'
COHERE_ANSWERS = {
    "<|START_TEXT|>Hi.<|END_TEXT|>": [Text("Hi.")],
    "<|START_THINKING|>why<|END_THINKING|><|START_TEXT|>Hi, you<|END_TEXT|>": [Reasoning("why"), Text("Hi, you")],
    "<|START_THINKING|>why<|START_TEXT|>Hi": [Reasoning("why"), Text("Hi")],
    "<|START_THINKING|>why<|END_THINKING|><|STA": [Reasoning("why"), Text("<|STA")],
    f"<|START_ACTION|>[\n    {COHERE_CALL}\n]<|END_ACTION|>": [("get_weather", {"city": "Oslo, {"})],
    f"<|START_THINKING|>why<|END_THINKING|><|START_ACTION|>[{COHERE_CALL},\n {COHERE_CALL} , {COHERE_CALL}\n]": [
        Reasoning("why"),
        *[("get_weather", {"city": "Oslo, {"})] * 3,
    ],
    f"<|START_ACTION|>{COHERE_CALL}<|END_ACTION|> A, {COHERE_CALL}": [
        Text(f" A, {COHERE_CALL}"),
        ("get_weather", {"city": "Oslo, {"}),
    ],
    f'<|START_ACTION|>[{COHERE_CALL}, {{"tool_name": "unheard_of", "parameters": {{}}}}]': [
        Text(', {"tool_name": "unheard_of", "parameters": {}}]'),
        ("get_weather", {"city": "Oslo, {"}),
    ],
}
LLAMA4_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
LLAMA4_ANSWERS = {
    "Hi.": [Text("Hi.")],
    '<|python_start|>I look.<|python_end|>{"name": "un': [Text('I look.{"name": "un')],
    f"<|python_start|>I look.<|python_end|>{LLAMA4_CALL}": [Text("I look."), ("get_weather", {"city": "Oslo"})],
    f"<|python_start|>{LLAMA4_CALL}\n{LLAMA4_CALL}<|python_end|>": [("get_weather", {"city": "Oslo"})] * 2,
    f"I look.\n\n{LLAMA4_CALL}}}": [Text("I look."), ("get_weather", {"city": "Oslo"})],
    '{"name": "Oslo", "parameters": []}': [Text('{"name": "Oslo", "parameters": []}')],
}
# As vLLM's `parser/inkling.py` reads them; `tml_renderers` 0.2.1 writes past answers so.
INKLING_CALL = 'get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Oslo"}}<|end_message|>'
NEXT = "<|message_model|>"
INKLING_ANSWERS = {
    "<|content_text|>Hi.": [Text("Hi.")],
    "Hi.": [Text("Hi.")],
    "Hi,\nyou": [Text("Hi,\nyou")],
    f"Hi.<|end_message|>{NEXT}<|content_text|>You.": [Text("Hi.\n\nYou.")],
    f"<|content_thinking|>why\n<|end_message|>{NEXT}<|content_text|>Hi": [Reasoning("why"), Text("Hi")],
    f"{NEXT}<|content_thinking|>why<|end_message|>{NEXT}<|content_text|>Hi": [Reasoning("why"), Text("Hi")],
    f"<|content_text|>Plan.<|end_message|>{NEXT}<|content_text|>Hi": [Text("Plan.\n\nHi")],
    "<|content_text|>a < b <|x|>": [Text("a < b <|x|>")],
    f"<|content_thinking|>why<|end_message|>{NEXT}get_we": [Reasoning("why")],
    INKLING_CALL: [("get_weather", {"city": "Oslo"})],
    f"{INKLING_CALL}{NEXT}{INKLING_CALL}": [("get_weather", {"city": "Oslo"})] * 2,
    f"<|content_thinking|>why<|end_message|>{NEXT}{INKLING_CALL}": [
        Reasoning("why"),
        ("get_weather", {"city": "Oslo"}),
    ],
    f'<|content_text|>Look.<|end_message|>{NEXT}<|content_invoke_tool_json|>\n{{"args": {{}}, "name": "get_time"}}': [
        Text("Look."),
        ("get_time", {}),
    ],
    f'{NEXT}f<|content_invoke_tool_json|>{{"name": "unheard_of", "args": {{}}}}': [
        Text(f'{NEXT}f<|content_invoke_tool_json|>{{"name": "unheard_of", "args": {{}}}}')
    ],
}
# As vLLM's `muse_tool_parser.py` and `muse_reasoning_parser.py` read them.
TURN = "<|eom|><|start|>assistant"
ATEM = (
    "<atem:function_calls>\n"
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
MUSE_ANSWERS = {
    " to=user<|message|>Hi.": [Text("Hi.")],
    "Hi.": [Text("Hi.")],
    "<|message|>why": [Reasoning("why")],
    f" to=self<|message|>why{TURN} to=user<|message|>Hi": [Reasoning("why"), Text("Hi")],
    f" to=commentary<|message|>Plan.{TURN} to=user<|message|>Hi": [Text("Plan.\n\nHi")],
    " to=self<|message|>why to=user<|message|>Hi": [Reasoning("why"), Text("Hi")],
    " to=user<|message|>a < b <|x|>": [Text("a < b <|x|>")],
    f" to=self<|message|>why{TURN} to=us": [Reasoning("why")],
    f" to=get_weather<|message|>{ATEM}": [("get_weather", {"city": "Oslo"})],
    f" to=get_weather.get_weather<|message|>{ATEM.replace('get_weather', 'get_weather.get_weather')}": [
        ("get_weather", {"city": "Oslo"})
    ],
    f" to=self<|message|>why{TURN} to=get_weather<|message|>{ATEM}{TURN} to=get_weather<|message|>{ATEM}": [
        Reasoning("why"),
        *[("get_weather", {"city": "Oslo"})] * 2,
    ],
    f" to=self<|message|>I may write {ATEM} there{TURN} to=user<|message|>Hi": [
        Reasoning(f"I may write {ATEM} there"),
        Text("Hi"),
    ],
    f" to=f<|message|>{ATEM.replace('get_weather', 'unheard_of')}": [Text(ATEM.replace("get_weather", "unheard_of"))],
}
MESSAGES = [(GPT_OSS, HARMONY, HARMONY_ANSWERS), (SOLAR_OPEN, SOLAR, SOLAR_ANSWERS)]
MESSAGES += [(COHERE_ACTION, COHERE, COHERE_ANSWERS), (INKLING_JSON, INKLING, INKLING_ANSWERS)]
MESSAGES += [(MUSE_SPARK, MUSE, MUSE_ANSWERS)]
KINDS, NAMES = "dialect, channels, answers", ["harmony", "solar", "cohere", "inkling", "muse"]
EVERY_KIND = pytest.mark.parametrize(KINDS, MESSAGES, ids=NAMES)
OF_LLAMA4 = pytest.param(LLAMA4, LLAMAS, LLAMA4_ANSWERS, id="llama4")
EVERY_ANSWER = pytest.mark.parametrize(KINDS, [*MESSAGES, OF_LLAMA4], ids=[*NAMES, None])


@EVERY_ANSWER
def test_answers_of_messages(dialect, channels, answers):
    for text, expected in answers.items():
        events = read(text, dialect, channels=channels)
        found = [event for event in events if isinstance(event, (Reasoning, Text))] + calls_of(events)
        assert found == expected
        assert read(text, dialect, range(len(text)), channels=channels) == events
        if not calls_of(events):
            assert read(text, None, channels=channels) == events


@EVERY_ANSWER
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_no_cut_changes_the_events_of_messages(dialect, channels, answers, data):
    tags = [*sorted(dialect.markers), *answers, "analysis", "to=functions.get_time", "assistant", "<|", *NASTY]
    text = "".join(data.draw(st.lists(st.sampled_from(tags), max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    whole = read(text, dialect, channels=channels)
    for pieces in (cuts, range(len(text))):
        assert read(text, dialect, pieces, channels=channels) == whole


@EVERY_KIND
def test_a_prompt_can_begin_a_message_with_a_call(dialect, channels, answers):
    for inside in (False, True):
        prefix = dialect.prefix("get_weather", inside, channels)
        assert prefix.startswith(channels.end + channels.header) == inside and channels.lead not in prefix
        events = read(prefix + '{"city": "Oslo"}' + dialect.close, dialect, inside_reasoning=inside, channels=channels)
        assert calls_of(events) == [("get_weather", {"city": "Oslo"})]
    assert dialect.prefix("get_weather").startswith(dialect.prefix())
