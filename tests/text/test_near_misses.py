"""Calls in tags with small faults are read as they were meant, and a call without a fault is never changed."""

import json
import re

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from near_misses import ARGUMENTS, EMPTY, TAGGED, VALUES, near_misses, spare_brace, spelt
from test_calls import EVERY_FORM, NASTY, TOOLS, calls_of, marked, read, text_of

from moeflux_mlx.text.calls.hunyuan import HUNYUAN4
from moeflux_mlx.text.calls.invoke import MINIMAX
from moeflux_mlx.text.calls.kimi_k3 import KIMI_K3
from moeflux_mlx.text.calls.minimax_m3 import MARK, MINIMAX_M3
from moeflux_mlx.text.calls.muse import MUSE_SPARK
from moeflux_mlx.text.calls.reader import AnswerReader, merged
from moeflux_mlx.text.calls.tool_call import GLM_LINE, QWEN_JSON, QWEN_XML
from moeflux_mlx.text.events import CallDelta, CallEnd, CallStart

FAULTS = [(dialect, fault, call) for dialect in TAGGED for fault, call in near_misses(dialect)]
STRING, INTEGER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "boolean"))
TYPES = {"city": STRING, "unit": STRING, "days": INTEGER, "flag": BOOLEAN}
EVERY_STYLE = pytest.mark.parametrize("dialect", TAGGED, ids=[dialect.name for dialect in TAGGED])


def tags_of(dialect):
    """Returns texts that look like tags of a call."""
    tags, line = dialect.tags, "\n" if dialect.tags.lined else ""
    kind = tags.kinds[0] if tags.kinds else tags.value[0]
    openings = [f"\n{tags.key[0]}{key}{tags.key[1]}{kind}{line}" for key in (*VALUES, "unknown")]
    return [*openings, *tags.ends, *(f"\n{end}\n" for end in tags.ends), tags.after, tags.value[1][:-1] + "/>\n"]


def contents(dialect):
    """Returns a strategy of values that hold what looks like tags."""
    tags = tags_of(dialect)
    pieces = st.sampled_from([*tags, dialect.tags.value[1], "\n  ", *NASTY]) | st.text(max_size=3)
    begun = st.sampled_from(["", "", "  ", "\t", "\n "])  # an indent, perhaps with a tag behind it
    first = st.sampled_from([*tags, *(tag.lstrip("\n") for tag in tags)])
    return st.tuples(begun, first | pieces, st.lists(pieces, max_size=5).map("".join)).map("".join)


def is_ended(dialect, value):
    """Returns whether a value holds the end of a value, so that nobody could read it whole, or the end of a call and
    the beginning of the next.
    """
    tags, joined = dialect.tags, "".join(value.split())
    closing, *followers = ("".join(tag.split()) for tag in (tags.value[1], tags.key[0], *tags.ends))
    next_call = re.search(rf"({'|'.join(map(re.escape, tags.ends))}).*get_weather", joined)
    return next_call is not None or any(closing + tag in joined for tag in followers)


@pytest.mark.parametrize(
    "dialect, fault, call", FAULTS, ids=[f"{dialect.name}-{fault}" for dialect, fault, _ in FAULTS]
)
def test_a_small_fault_changes_no_argument(dialect, fault, call):
    for text in (f"Look.\n\n{call}", f"Look.\n\n{call}\n\nDone."):
        events = read(text, dialect)
        assert calls_of(events) == [("get_weather", ARGUMENTS)]
        assert text_of(events).split() == text.replace(call, "").split()
        assert read(text, dialect, range(len(text))) == events


@EVERY_STYLE
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_a_call_without_a_fault_is_never_repaired(dialect, data):
    """Whatever its values hold, if each of its parameters is given."""
    whole = contents(dialect).filter(lambda value: not is_ended(dialect, value) and "\r" not in value)
    texts = {**VALUES, "city": data.draw(whole), "unit": data.draw(whole)}
    parameters = [(key, texts[key]) for key in data.draw(st.permutations(sorted(texts)))]
    tools = [{"function": {"name": "get_weather", "parameters": {"properties": TYPES}}}]
    call = ("get_weather", {**texts, "days": 3, "flag": True})
    assert calls_of(read(spelt(dialect, parameters), dialect, tools=tools)) == [call]


@EVERY_STYLE
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_no_cut_changes_what_is_repaired(dialect, data):
    keys = data.draw(st.lists(st.sampled_from([*VALUES, "note", "unknown"]), min_size=1, max_size=4))
    closing = dialect.tags.value[1]
    ends = st.sampled_from([closing, "", f"{closing[:-1]}/>", closing[:-1]])
    parameters = [(key, data.draw(contents(dialect)) if key == "city" else VALUES.get(key, "x")) for key in keys]
    text = spelt(dialect, parameters, closings=[data.draw(ends) for _ in keys])
    text += data.draw(st.sampled_from(["", "\nDone.", "\n" + spelt(dialect)]))
    text = text[: data.draw(st.integers(len(text) // 2, len(text)) | st.just(len(text)))]
    cut, cuts = data.draw(st.booleans()), data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    events = read(text, dialect, cut=cut)
    assert read(text, dialect, cuts, cut=cut) == events == read(text, dialect, range(len(text)), cut=cut)
    for _, arguments in calls_of(events):
        assert set(arguments) <= {*keys, *VALUES, "unknown"}
    for event in events:
        if isinstance(event, CallEnd):
            pairs = json.loads(event.arguments, object_pairs_hook=list)
            assert len({key for key, _ in pairs}) == len(pairs)


@EVERY_STYLE
def test_an_opening_tag_counts_if_its_parameter_is_missing_and_it_stands_where_tags_do(dialect):
    tags, line = dialect.tags, "\n" if dialect.tags.lined else ""

    def opening(key):
        kind = (tags.kinds[0] if key == "city" else tags.kinds[1]) if tags.kinds else tags.value[0]
        return f"{tags.key[0]}{key}{tags.key[1]}{kind}{line}"

    def arguments(city, *more):
        ((_, found),) = calls_of(read(spelt(dialect, [("city", city), *more]), dialect))
        return found

    assert arguments(f"a\n{opening('days')}3") == {"city": "a", "days": 3}
    assert arguments(f"a\n{opening('city')}b") == {"city": f"a\n{opening('city')}b"}
    assert arguments(f"a\n{opening('other')}b") == {"city": f"a\n{opening('other')}b"}
    text = f"3\n{opening('unit')}4"
    assert arguments(f"a\n{opening('unit')}{text}") == {"city": "a", "unit": text}, "the value has one already"
    text = f"a\n{opening('days')}3"
    assert arguments(text, ("days", "4")) == {"city": text, "days": 4}, "the parameter comes later"
    text = f"a\n{opening('days')}3{line}{tags.value[1]}\nb"
    assert arguments(text) == {"city": text}, "a whole parameter"
    if dialect not in (GLM_LINE, KIMI_K3, HUNYUAN4):  # their tags stand in one line
        text = f"a {opening('days')}3"
        assert arguments(text) == {"city": text}, "in the middle of a line"


@EVERY_STYLE
def test_a_call_follows_one_whose_last_value_is_not_closed(dialect):
    first, second = spelt(dialect, [("city", "A")], closing=""), spelt(dialect, [("city", "B")])
    third = second
    if dialect.section[1] not in dialect.close:  # several calls in one section
        first = first.removesuffix(dialect.section[1])
        third = second[second.index(dialect.opening) :]
    none = EMPTY[dialect.name][0].replace("NAME", "get_time")
    if dialect.section[1] not in dialect.close:
        none = none[none.index(dialect.opening) :]
    assert calls_of(read(f"{first}\n{none}", dialect)) == [("get_weather", {"city": "A"}), ("get_time", {})]
    pairs = [(f"{first}\n{third}", "AB"), (f"{first}\n\n{second}", "AB"), (f"{first}\n{first}", "AA")]
    for text, cities in pairs[: 1 if dialect is MUSE_SPARK else 3]:  # a header may stand between its calls
        assert calls_of(read(text, dialect)) == [("get_weather", {"city": city}) for city in cities]


def test_many_calls_that_are_not_closed_are_read_in_linear_time():
    """Each ends where the next begins; what follows would be read again for each call."""
    steps, many = [], spelt(QWEN_XML, [("city", "Oslo")], closing="") * 200

    class Counted(AnswerReader):
        def _read_char(self, char):
            steps.append(char)
            return super()._read_char(char)

    reader = Counted(QWEN_XML, TOOLS)
    events = merged(reader.feed(many) + reader.finish())
    assert calls_of(events) == [("get_weather", {"city": "Oslo"})] * 200
    assert len(steps) < 2 * len(many)


@pytest.mark.parametrize(
    "call",
    [
        "<parameter=city>\nOslo\n<parameter=days>3</parameter>\n</function>",
        "<parameter=city>Oslo\n<parameter=days>3</parameter></function>",
        "<parameter=city>\nOslo\n    <parameter=days>\n3\n</parameter>\n</function>",
    ],
)
def test_values_on_the_line_of_their_tag(call):
    events = read(f"<tool_call>\n<function=get_weather>\n{call}\n</tool_call>", QWEN_XML)
    assert calls_of(events) == [("get_weather", {"city": "Oslo", "days": 3})]


def test_strings_stream_until_there_is_doubt():
    reader = AnswerReader(QWEN_XML, TOOLS)
    begin = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    assert reader.feed(begin + "one\ntwo\n")[-1] == CallDelta(0, '{"city": "one\\ntwo')
    assert reader.feed("<parameter=days>\n3\nmore") == []
    assert reader.feed("\n</parameter>\n<parameter=days>\n4\n</parameter>") == []
    assert reader.feed("\n</function>")[0] == CallDelta(0, '\\n<parameter=days>\\n3\\nmore", "days": 4}')
    reader = AnswerReader(MINIMAX, TOOLS)
    reader.feed('<invoke name="get_weather">\n<parameter name="city">one')
    assert reader.feed('\n<parameter name="days">3</parameter>') == []
    assert reader.feed("\n</invoke>")[0] == CallDelta(0, '", "days": 3}')


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("@<city>Oslo@<days>3@</days>@</invoke>", {"city": "Oslo", "days": 3}),
        ("@<city>Oslo@<days>3@</invoke>", {"city": "Oslo", "days": 3}),
        ("@<city>Oslo@</city>@<city>Rome@</city>@</invoke>", {"city": "Oslo"}),
        ("@<where>@<a>x@</where>@<mixed>@<item>a@</mixed>@</invoke>", {"where": {"a": "x"}, "mixed": ["a"]}),
        ("@<city>see @<other> there@</city>@</invoke>", {"city": f"see {MARK}<other> there"}),
    ],
)
def test_values_that_minimax_m3_does_not_close(text, arguments):
    text = marked(f'<invoke name="get_weather">{text}')
    events = read(text, MINIMAX_M3)
    assert calls_of(events) == [("get_weather", arguments)] and text_of(events) == ""
    assert read(text, MINIMAX_M3, range(len(text))) == events


@pytest.mark.parametrize("end", ["}\n</tool_call>", "\n}\n</tool_call>", "}", "\n}", "}\n\nDone.", "}}</tool_call>"])
def test_a_brace_too_many_is_no_text(end):
    events = read(f'<tool_call>\n{{"name": "get_time", "arguments": {{}}}}{end}', QWEN_JSON)
    assert calls_of(events) == [("get_time", {})] and text_of(events).strip() == "Done." * ("Done" in end)


def test_braces_of_the_text_behind_a_call_stay():
    events = read('<tool_call>{"name": "get_time"}}\n\n} else {', QWEN_JSON)
    assert calls_of(events) == [("get_time", {})] and text_of(events) == "\n\n} else {"


@EVERY_FORM
def test_a_brace_too_many_in_every_style(dialect, write):
    text = spare_brace(dialect, write(ARGUMENTS))
    if text is not None:
        events = read(text, dialect)
        assert calls_of(events) == [("get_weather", ARGUMENTS)] and text_of(events) == ""
        assert read(text, dialect, range(len(text))) == events


@EVERY_FORM
def test_a_call_without_arguments(dialect, write):
    for form in EMPTY[dialect.name]:
        text = form.replace("NAME", "get_time")
        events = read(text, dialect)
        assert calls_of(events) == [("get_time", {})] and text_of(events) == ""
        assert read(text, dialect, range(len(text))) == events


@EVERY_FORM
def test_a_call_that_the_limit_cuts_before_its_arguments_is_none(dialect, write):
    text = dialect.prefix("get_weather")
    for length in range(1, len(text) + 1):
        events = read(text[:length], dialect, cut=True)
        announced = any(isinstance(event, CallStart) for event in events)
        assert not calls_of(events) and not (announced and text_of(events))
