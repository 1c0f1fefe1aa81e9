"""Schemas of tools in the forms whose arguments are not JSON: what a grammar allows, and the types that are read."""

import json
from time import process_time
from urllib.parse import quote

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from styles import written
from test_calls import calls_of, read
from test_structured import follows

from moeflux_mlx.errors import RequestError
from moeflux_mlx.text.calls.gemma import GEMMA
from moeflux_mlx.text.calls.invoke import DEEPSEEK_V4
from moeflux_mlx.text.calls.minimax_m3 import MINIMAX_M3
from moeflux_mlx.text.calls.reader import AnswerReader
from moeflux_mlx.text.calls.registry import DIALECTS
from moeflux_mlx.text.calls.schema import JSON_TYPES, MAX_ALTERNATIVES, ValueShape, variants
from moeflux_mlx.text.calls.tool_call import QWEN_JSON, QWEN_XML
from moeflux_mlx.text.grammar import calls_grammar
from moeflux_mlx.text.structured import Constrainer
from moeflux_mlx.text.tokenizer import load_tokenizer

OWN_FORM = [dialect for dialect in DIALECTS if dialect.tags or dialect.arguments]
EVERY_OWN_FORM = pytest.mark.parametrize("dialect", [*OWN_FORM, QWEN_JSON], ids=lambda dialect: dialect.name)
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
POINT = {"type": "object", "properties": {"a": INTEGER, "b": TEXT}, "required": ["a"], "additionalProperties": False}
NOTE = {"type": "object", "properties": {"c": {"enum": ["x", 3]}}, "required": ["c"], "additionalProperties": False}
DEEP = {"x y": {"prefixItems": [TEXT, INTEGER]}, "a/b~": {"$ref": "#/$defs/x%20y/prefixItems/1"}}
LENGTHS = [{"type": "string", "minLength": n} for n in range(20)]
LONGEST = [{"type": "string", "maxLength": n} for n in range(20)]
# Schema, what it allows, what it forbids.
SCHEMAS = {
    "reference": ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, [{"a": 1, "b": "5"}], [{}, {"a": "x"}]),
    "allOf": (
        {"allOf": [POINT, {"properties": {"b": {"enum": ["x"]}}}]},
        [{"a": 1, "b": "x"}],
        [{}, {"a": 1, "b": "y"}],
    ),
    "anyOf": ({"anyOf": [POINT, NOTE]}, [{"a": 1}, {"c": "x"}, {"c": 3}], [{}, {"a": 1, "c": "x"}, {"c": "y"}]),
    "oneOf": ({"type": "object", "oneOf": [POINT, NOTE]}, [{"a": 1}, {"c": 3}], [{}, {"a": 1, "c": 3}]),
    "siblings": (
        {"$ref": "#/$defs/p", "required": ["b"], "$defs": {"p": POINT}},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "pointers": (
        {"properties": {"u": {"$ref": "#/$defs/a~1b~0"}, "v": {"$ref": "#/properties/u"}}, "$defs": DEEP},
        [{"u": 1, "v": 2}],
        [{"u": "x"}, {"v": "x"}],
    ),
    "references inside a value": (
        {"properties": {"u": INTEGER, "v": {"type": "array", "items": {"anyOf": [{"$ref": "#/properties/u"}, NOTE]}}}},
        [{"v": [1, {"c": "x"}]}],
        [{"v": ["x"]}, {"v": [{"c": "y"}]}],
    ),
    "unions in properties": (
        {"properties": {"u": {"anyOf": [POINT, {"allOf": [NOTE]}]}, "v": {"type": ["string", "integer", "null"]}}},
        [{"u": {"a": 1}}, {"u": {"c": 3}, "v": "x"}, {"v": 5}],
        [{"u": {}}, {"u": {"c": "y"}}, {"u": {"a": 1, "c": 3}}],
    ),
    "a string or a list": (
        {"properties": {"u": {"anyOf": [TEXT, {"type": "array", "items": INTEGER}]}}},
        [{"u": "5"}, {"u": [5]}, {"u": ""}],
        [{"u": ["x"]}, {"u": {"a": 5}}],
    ),
    "nullable": (
        {"properties": {"u": {"enum": ["x"], "nullable": True}, "v": {"items": {"nullable": True, **INTEGER}}}},
        [{"u": "x", "v": [1, None]}],
        [{"u": "y"}, {"v": ["x"]}],
    ),
    "a reference into a nullable value": (
        {
            "properties": {
                "u": {"type": "object", "nullable": True, "properties": {"x": INTEGER}},
                "v": {"$ref": "#/properties/u/properties/x"},
            }
        },
        [{"u": {"x": 1}, "v": 2}],
        [{"u": {"x": "z"}}, {"v": "z"}],
    ),
    "any keys": ({"type": "object", "additionalProperties": INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "z"}]),
    "any keys inside": (
        {"properties": {"u": {"type": "object", "additionalProperties": INTEGER}}},
        [{"u": {}}, {"u": {"x": 1, "y": 2}}],
        [{"u": {"x": "z"}}],
    ),
    "anything": ({"type": "object"}, [{}, {"x": "z", "y": "5"}], []),
    "a name without a property": ({"type": "object", "required": ["x"]}, [{"x": "z"}], [{}]),
    "a property that cannot be": ({"properties": {"x": False, "y": INTEGER}}, [{"y": 1}], [{"x": 1}]),
}


@pytest.fixture(scope="module")
def constrainer():
    return Constrainer(load_tokenizer("moeflux_mlx/demo"))


def tools_of(schema):
    return [{"function": {"name": "f", "strict": True, "parameters": schema}}]


def check(constrainer, dialect, schema, allowed=(), forbidden=()):
    """Checks which arguments a strict call may have, and that they are read as they were written."""
    tools, write = tools_of(schema), written(dialect)
    grammar = constrainer.grammar(tools=tools, dialect=dialect)
    for arguments in allowed:
        text = write(arguments, "f")
        assert follows(constrainer, grammar, text), arguments
        ((_, found),) = calls_of(read(text, dialect, tools=tools))
        assert json.dumps(found) == json.dumps(arguments)
        assert read(text, dialect, range(len(text)), tools=tools) == read(text, dialect, tools=tools)
    for arguments in forbidden:
        assert not follows(constrainer, grammar, write(arguments, "f")), arguments


@EVERY_OWN_FORM
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_every_kind(constrainer, dialect, name):
    check(constrainer, dialect, *SCHEMAS[name])


# Schema, a value, and one that it forbids: None if any text is a string.
VALUES = [
    (INTEGER, 5, "x"),
    (TEXT, "x y", None),
    ({"type": ["string", "null"]}, "nu", None),
    ({"enum": ["C", "F"]}, "F", "K"),
    ({"const": 3}, 3, 4),
    ({"type": "array", "items": {"type": "boolean"}}, [True, False], [1]),
    ({"anyOf": [INTEGER, {"type": "array", "items": TEXT}]}, ["x"], {"x": 5}),
    (POINT, {"a": 1, "b": "x"}, {"a": "x"}),
]
KEYS = st.sampled_from(["a", "a/b~", "x y", "100%", "é"])


@st.composite
def disguised(draw, schema, defs, depth=2):
    """Returns a schema that means the same, and puts what it refers to into `defs`."""
    for _ in range(draw(st.integers(0, depth))):
        kind = draw(st.sampled_from(["$ref", "allOf", "anyOf", "oneOf", "items"]))
        if kind in ("$ref", "items"):
            key = f"{draw(KEYS)}{len(defs)}"
            defs[key] = schema if kind == "$ref" else {"prefixItems": [True, schema]}
            pointer = quote(key.replace("~", "~0").replace("/", "~1"))
            schema = {"$ref": f"#/$defs/{pointer}{'' if kind == '$ref' else '/prefixItems/1'}"}
        else:
            schema = {kind: [schema] if kind == "allOf" else [False, schema][draw(st.integers(0, 1)) :]}
    return schema


@EVERY_OWN_FORM
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_a_schema_means_the_same_in_any_disguise(constrainer, dialect, data):
    names = data.draw(st.lists(st.sampled_from("pqrs"), unique=True, min_size=1))
    values = {name: data.draw(st.sampled_from(VALUES)) for name in names}
    defs = {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}
    properties = {name: data.draw(disguised(own, defs)) for name, (own, _, _) in values.items()}
    plain = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    schema = {**data.draw(disguised(plain, defs)), "$defs": defs}
    good = {name: right for name, (_, right, _) in values.items()}
    bad = [good | {name: wrong} for name, (_, _, wrong) in values.items() if wrong is not None]
    check(constrainer, dialect, schema, [good], bad)


@EVERY_OWN_FORM
def test_a_schema_that_refers_to_itself(constrainer, dialect):
    schema = {"properties": {"n": INTEGER, "inner": {"$ref": "#"}}, "additionalProperties": False}
    if dialect.arguments is not None:
        with pytest.raises(RequestError, match="parameter 'n' is too large to be enforced"):
            check(constrainer, dialect, schema)
        return
    check(constrainer, dialect, schema, [{"inner": {"n": 1, "inner": {"n": 2}}}], [{"inner": {"inner": {"n": "x"}}}])


@pytest.mark.parametrize(
    "schema, fault",
    [
        ({"properties": {"p": {"type": "string", "pattern": "a+"}}}, "parameter 'p' has 'pattern'"),
        ({"properties": {"p": {"anyOf": [TEXT, {"type": "integer", "minimum": 3}]}}}, "parameter 'p' has 'minimum'"),
        ({"properties": {"p": {"anyOf": [TEXT, {"enum": [1, 2]}]}}}, "parameter 'p' has 'enum'"),
        ({"properties": {"p": {"enum": ["5", 6]}}}, "parameter 'p' has '5' beside another type"),
        ({"properties": {"p": {"$ref": "#anchor"}}, "$defs": {"p": {"$anchor": "anchor"}}}, "parameter 'p' has '.ref'"),
        ({"patternProperties": {"^a": INTEGER}}, "the schema of a tool has 'patternProperties'"),
        ({"const": {"a": 1}}, "the schema of a tool has 'enum'"),
        ({"properties": {"p": {"allOf": [INTEGER, TEXT]}}, "required": ["p"]}, "cannot be enforced"),
        ({"$ref": "#/$defs/none"}, "/.defs/none"),
        ({"required": ["p"], "additionalProperties": False}, "'p' is unsatisfiable"),
    ],
)
def test_what_a_call_in_tags_cannot_enforce_is_named(constrainer, schema, fault):
    for dialect in (QWEN_XML, MINIMAX_M3):
        with pytest.raises(RequestError, match=fault):
            constrainer.grammar(tools=tools_of({"type": "object", **schema}), dialect=dialect)


@pytest.mark.parametrize("dialect", [GEMMA, MINIMAX_M3], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "own, key",
    [({"prefixItems": [INTEGER]}, "prefixItems"), ({"items": [INTEGER]}, "prefixItems"), ({"minItems": 1}, "minItems")],
)
def test_conditions_of_lists_are_named(constrainer, dialect, own, key):
    with pytest.raises(RequestError, match=f"parameter 'p' has '{key}'"):
        constrainer.grammar(tools=tools_of({"properties": {"p": {"type": "array", **own}}}), dialect=dialect)


@EVERY_OWN_FORM
@pytest.mark.parametrize("schema", [{"type": "array"}, {"anyOf": [{"type": "array"}, {"const": 3}]}])
def test_a_schema_without_an_object_is_refused(constrainer, dialect, schema):
    with pytest.raises(RequestError, match="the schema of a tool allows no object"):
        constrainer.grammar(tools=tools_of(schema), dialect=dialect)


@pytest.mark.parametrize("dialect", [QWEN_XML, QWEN_JSON], ids=lambda dialect: dialect.name)
def test_values_that_look_like_schemas_stay_as_they_are(constrainer, dialect):
    value = {"nullable": True, "type": "string", "$ref": "#/x"}
    schema = {"properties": {"p": {"enum": [value, 5]}, "default": {"nullable": True, **INTEGER}}}
    check(constrainer, dialect, schema, [{"p": value}, {"p": 5, "default": None}], [{"p": None}])


@pytest.mark.parametrize("own", [{"const": 3}, {"enum": [3], **INTEGER}, INTEGER, {"anyOf": [INTEGER]}, {}])
def test_null_is_allowed_beside_any_condition(constrainer, own):
    schema = {"properties": {"p": {"nullable": True, **own}}}
    check(constrainer, QWEN_JSON, schema, [{"p": None}, {"p": 3}], [{"p": "x"}] if own else [])


@pytest.mark.parametrize("dialect", [QWEN_XML, GEMMA], ids=lambda dialect: dialect.name)
def test_a_name_that_is_no_text_is_no_property(dialect):
    assert "call_0" in calls_grammar(tools_of({"required": [["a"]]}), dialect).text


WORDS = [f"word {n}" for n in range(10000)]


def test_a_long_enum_is_resolved_in_linear_time():
    begin = process_time()
    grammar = calls_grammar(tools_of({"properties": {"p": {"type": "string", "enum": WORDS}}}), QWEN_XML)
    assert all(word in grammar.text for word in WORDS[::1000]) and process_time() - begin < 3


def test_many_types_are_merged_in_linear_time():
    kinds, begin = {"type": WORDS, "enum": WORDS}, process_time()
    assert variants({"allOf": [kinds, kinds]}, {}) == [] and process_time() - begin < 1
    assert variants({"allOf": [{"type": ["number", "null"]}, {"type": ["null", "integer"]}]}, {}) == [
        {"type": ["null", "integer"]}
    ]


def test_the_items_of_a_list_are_resolved_once():
    item = {"properties": {"q": {"allOf": [{"enum": WORDS}, {"enum": WORDS[:5000]}]}}}
    tools = tools_of({"properties": {"p": {"type": "array", "items": item}}})
    values = {"p": [{"q": WORDS[n]} for n in range(100)]}
    call, begin = written(MINIMAX_M3)(values, "f"), process_time()
    assert calls_of(read(call, MINIMAX_M3, tools=tools)) == [("f", values)]
    assert process_time() - begin < 3


def test_a_large_merge_ends_early():
    large = {"properties": {f"p{n}": INTEGER for n in range(2000)}}
    schema = {"allOf": [{"$ref": "#/$defs/o"}] * 3, "$defs": {"o": large}}
    assert ValueShape(schema, schema).keys == large["properties"].keys()
    schema["allOf"], begin = schema["allOf"] * 500, process_time()
    assert not ValueShape(schema, schema).keys and process_time() - begin < 1


def test_unions_that_hold_together_are_resolved_up_to_so_many_alternatives():
    shortest = [{"minLength": n} for n in range(16)]
    least, most = ({"allOf": [{"anyOf": shortest}, {"anyOf": LONGEST[:count]}]} for count in (16, 17))
    assert len(variants(least, {})) == MAX_ALTERNATIVES == 16 * 16
    assert variants(most, {}) == [most]


def test_alternatives_that_differ_in_words_alone_are_one():
    schema = {"allOf": [{"anyOf": [{"title": "a"}, {"title": "b", "description": "c"}]}] * 8, **TEXT}
    assert variants(schema, schema) == [{"type": ["string"]}]
    integers = {"properties": {f"p{n}": {"$ref": "#/$defs/i"} for n in range(100)}, "$defs": {"i": INTEGER}}
    grammar = calls_grammar(tools_of({**integers, "allOf": schema["allOf"]}), QWEN_XML)
    assert len(grammar.schemas) == 100 and len(grammar.text) < 30000


@pytest.mark.parametrize("count, size", [(1025, 1), (100, 5000)])
def test_the_grammar_of_parameters_in_tags_is_bounded(count, size):
    defs = {"i": {"enum": list(range(size))}}
    properties = {f"p{n}": {"$ref": "#/$defs/i"} for n in range(count)}
    with pytest.raises(RequestError, match="parameter 'p[0-9]+' is too large"):
        calls_grammar(tools_of({"properties": properties, "$defs": defs}), QWEN_XML)
    few = dict(list(properties.items())[:10])
    assert len(calls_grammar(tools_of({"properties": few, "$defs": defs}), QWEN_XML).schemas) == 10


def test_what_a_parameter_does_not_refer_to_is_not_copied():
    properties = {f"p{n}": {"$ref": "#/$defs/i"} for n in range(100)}
    defs = {"i": {"items": {"$ref": "#/$defs/j"}}, "j": INTEGER, "large": {"enum": WORDS}}
    assert len(calls_grammar(tools_of({"properties": properties, "$defs": defs}), QWEN_XML).text) < 50000


def test_types_that_are_written_need_no_guess(constrainer):
    check(constrainer, DEEPSEEK_V4, {"properties": {"p": {"enum": ["5", 6]}}}, [{"p": "5"}, {"p": 6}], [{"p": 5}])
    listed = {"properties": {"p": {"anyOf": [TEXT, {"enum": [1]}]}}}
    check(constrainer, DEEPSEEK_V4, listed, [{"p": "[1"}, {"p": 1}], [{"p": 2}])


@pytest.mark.parametrize(
    "schema, types",
    [
        ({"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"k": INTEGER}}}}, {"integer"}),
        ({"allOf": [{"properties": {"k": {"type": "number"}}}, {"properties": {"k": INTEGER}}]}, {"integer"}),
        ({"oneOf": [{"properties": {"k": TEXT}}, {"properties": {"k": INTEGER}}]}, {"string", "integer"}),
        ({"additionalProperties": INTEGER}, {"integer"}),
        ({"properties": {"k": {"$ref": "#/anyOf/1"}}, "anyOf": [{}, INTEGER]}, {"integer"}),
        ({"properties": {"k": {"$ref": "#/properties/j/prefixItems/0"}, "j": {"prefixItems": [INTEGER]}}}, {"integer"}),
        ({"properties": {"k": {"properties": {}}}}, {"object"}),
        ({"properties": {"k": {"items": {}}}}, {"array"}),
        ({"properties": {"k": {"nullable": True, **INTEGER}}}, {"integer", "null"}),
        ({"properties": {"k": {"enum": ["x", None]}}}, {"string", "null"}),
        ({"properties": {"k": {"type": ["string", "null"], "enum": ["x"]}}}, {"string"}),
        ({"properties": {"k": {"const": True}}}, {"boolean"}),
        ({"properties": {"k": {"$ref": "#/anyOf/9"}}, "anyOf": []}, {"string"}),
        ({"properties": {"k": {"allOf": [{"enum": [1, "x", None]}, {"enum": [True, 1.0, "x"]}]}}}, {"string"}),
        ({"properties": {"k": {"anyOf": [{"const": True}, {"const": 1}]}}}, {"boolean", "integer"}),
        ({"properties": {"k": {"allOf": [{"anyOf": LENGTHS}] * 20}}}, {"string"}),  # 20 ** 20 alternatives
    ],
)
def test_types_of_a_parameter(schema, types):
    assert ValueShape(schema, schema).inner("k").types == types


@pytest.mark.parametrize("dialect", [QWEN_XML, MINIMAX_M3], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "kinds, text, value",
    [
        (["string", "null"], "null", None),
        (["string", "null"], "nullable", "nullable"),
        (["string", "null"], "None", "None"),
        (["string", "integer"], "5", 5),
        (["string", "integer"], "5.0", "5.0"),
        (["string", "integer"], "5 apples", "5 apples"),
        (["string", "boolean"], "true", True),
        (["string", "boolean"], "True", "True"),
        (["string", "boolean"], "null", "null"),
        (["string", "array"], "2024", "2024"),
        (["string", "array"], "['x']", ["x"]),
        (["string", "object"], "{x}", "{x}"),
    ],
)
def test_a_text_beside_a_string(dialect, kinds, text, value):
    tools = tools_of({"properties": {"k": {"type": kinds}}})
    call = written(dialect)({"k": text}, "f")
    ((_, found),) = calls_of(read(call, dialect, tools=tools))
    assert json.dumps(found) == json.dumps({"k": value})
    assert read(call, dialect, range(len(call)), tools=tools) == read(call, dialect, tools=tools)


@pytest.mark.parametrize("dialect", [QWEN_XML, MINIMAX_M3], ids=lambda dialect: dialect.name)
def test_a_string_beside_other_types_streams(dialect):
    """It is held back only as long as it may be a value of another type."""
    every = ["string", "null", "boolean", "number", "array", "object"]
    for begun, kinds, expected in (
        ("nul", ["string", "null"], ""),
        ("none", ["string", "null"], '"none'),
        ("def f", every, '"def f'),
        ("-1.5", every, ""),
        ("[x", every, ""),
        ("[x", ["string", "null"], '"[x'),
    ):
        tools = tools_of({"properties": {"k": {"type": kinds}}})
        call = written(dialect)({"k": f"{begun}END"}, "f")
        events = AnswerReader(dialect, tools).feed(call.partition("END")[0])
        assert events[-1].text == f'{{"k": {expected}'


@EVERY_OWN_FORM
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_no_cut_changes_a_value_of_several_types(dialect, data):
    """Also if tags inside a value, or missing ones, make it doubtful where it ends."""
    kinds = data.draw(st.lists(st.sampled_from(sorted(JSON_TYPES)), unique=True)) + ["string"]
    tools = tools_of({"properties": {"k": {"type": kinds}, "l": TEXT}})
    tags = [] if dialect.tags is None else [dialect.tags.value[1], dialect.tags.key[0], dialect.tags.value[1][:-1]]
    pieces = st.sampled_from(["nul", "null", "true", "5", "-", "[", "]", "{", "}", "'x'", " ", "\n", "x", *tags])
    values = {key: "".join(data.draw(st.lists(pieces, max_size=4))) for key in "kl"}
    call = written(dialect)(values, "f")
    if tags and data.draw(st.booleans()):
        call = call.replace(tags[0], "", 1)
    cuts = data.draw(st.lists(st.integers(0, len(call)), max_size=6))
    assert read(call, dialect, cuts, tools=tools) == read(call, dialect, tools=tools)
    assert read(call, dialect, range(len(call)), tools=tools) == read(call, dialect, tools=tools)
