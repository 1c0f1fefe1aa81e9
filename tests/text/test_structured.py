"""Masks of grammars: what they allow and forbid, for every kind of tokenizer, and schemas that cannot be enforced."""

import json
import sys

import mlx.core as mx
import numpy as np
import pytest
from styles import thought_of, written
from test_calls import EVERY_TAGGED_FORM, calls_of, read
from test_tokenizer import SPACING, train_bpe, train_sentencepiece, write_json
from tokenizers import AddedToken

from moeflux_mlx.driving.sampling import Constraint
from moeflux_mlx.errors import RequestError
from moeflux_mlx.text.calls.gemma import GEMMA
from moeflux_mlx.text.calls.kimi_k3 import KIMI_K3
from moeflux_mlx.text.calls.listed import COHERE_ACTION
from moeflux_mlx.text.calls.minimax_m3 import MARK, MINIMAX_M3
from moeflux_mlx.text.calls.reader import HEADERS
from moeflux_mlx.text.calls.registry import CALL_MARKERS
from moeflux_mlx.text.calls.tool_call import QWEN_JSON, QWEN_XML
from moeflux_mlx.text.channels import COHERE, MINIMAX
from moeflux_mlx.text.structured import Constrainer
from moeflux_mlx.text.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "object",
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "kind": {"type": "string", "enum": ["wind", "rain"]},
        "days": {"type": "integer"},
        "sign": {"anyOf": [{"const": "+"}, {"allOf": [{"const": "-"}]}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": TOOL}},
    {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}},
]
SPECIAL = ["<think>", "</think>", *sorted(CALL_MARKERS.difference(*(one.markers for one in HEADERS.values())))]


def directory(path, kind):
    """Writes a tokenizer of this kind. In "marked" ones, every tag of calls and reasoning is a token."""
    write_json(path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    if kind in SPACING:
        (path / "tokenizer.model").write_bytes(train_sentencepiece(**SPACING[kind]))
        return path
    tokenizer = train_bpe()
    if kind == "marked":
        tokenizer.add_tokens([AddedToken(tag, special=tag.startswith("<｜")) for tag in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module", params=["marked", "prefix", "demo"])
def constrainer(request, tmp_path_factory):
    if request.param == "demo":
        return Constrainer(load_tokenizer("moeflux_mlx/demo"))
    return Constrainer(load_tokenizer(directory(tmp_path_factory.mktemp(request.param), request.param)))


def passes(mask, tokenizer, text, prefix=""):
    """Returns how much of `text` the mask allows, and whether the end may follow."""
    tokens = tokenizer.encode_after(text)
    for i, token in enumerate(tokens):
        if not mask.allowed()[token]:
            return tokenizer.decode(tokens[:i]), False
        mask.consume(token)
    return text, bool(mask.allowed()[tokenizer.eos_token_id])


def follows(constrainer, grammar, text, **options):
    return passes(constrainer.mask(grammar, **options), constrainer.tokenizer, text) == (text, True)


def can_write(constrainer, dialect):
    """Returns whether the tokenizer can write the dialect's tags.

    sentencepiece spells a space as U+2581, which DeepSeek's tags also contain.
    """
    tokenizer = constrainer.tokenizer
    able = tokenizer.decode(tokenizer.encode_after(dialect.begin)) == dialect.begin
    assert able or "\u2581" in dialect.begin
    return able


def test_a_schema_is_followed(constrainer):
    grammar = constrainer.grammar(SCHEMA)
    for good in ('{"city": "Paris"}', '\n\n{"city":"A","days":3}', '{\n  "city": "é 🙂 \\n",\n  "days": 14\n}'):
        assert follows(constrainer, grammar, good)
    for bad in ("Sure", '{"town": 1}', '{"city": "A", "days": 15}', '{"days": 3}', '{"city": "A"} and', "{}", '{"city'):
        assert not follows(constrainer, grammar, bad)


def test_no_more_space_than_an_indent(constrainer):
    grammar = constrainer.grammar(SCHEMA)
    for good in ('{"city": "A"}', '{\n    "city" : "A"\n}', '{\n\t"city":\n"A"}'):
        assert follows(constrainer, grammar, good)
    for bad in ('{"city":  "A"}', '{\n\n"city": "A"}', f'{{\n{" " * 17}"city": "A"}}', '{ \n"city": "A"}'):
        assert not follows(constrainer, grammar, bad)


def test_any_object(constrainer):
    grammar = constrainer.grammar(True)
    assert follows(constrainer, grammar, '{"a": [1, {"b": null}], "c": "x"}') and follows(constrainer, grammar, "{}")
    assert not follows(constrainer, grammar, "[1]") and not follows(constrainer, grammar, "{a: 1}")


def test_the_end_is_known(constrainer):
    mask = constrainer.mask(constrainer.grammar(SCHEMA))
    assert not mask.is_done
    assert passes(mask, constrainer.tokenizer, '{"city": "A"}')[1]
    assert mask.is_done
    assert set(np.flatnonzero(mask.allowed())) == constrainer.tokenizer.eos_token_ids


def test_reasoning_is_free_and_the_answer_is_not(constrainer):
    grammar = constrainer.grammar(SCHEMA)
    text = 'Any {"thing" < </thin </think>\n\n{"city": "A"}'
    assert follows(constrainer, grammar, text, inside_reasoning=True)
    assert not follows(constrainer, grammar, text.replace("city", "town"), inside_reasoning=True)
    may_open = constrainer.tokenizer.has_thinking
    assert follows(constrainer, grammar, f"<think>{text}") == may_open
    assert not follows(constrainer, grammar, f'{{"city": "A"<think>{text}')


def test_an_answer_that_is_owed_cannot_end_inside_its_reasoning(constrainer):
    """A token that would end the answer ends the reasoning instead, if the tags are single tokens."""
    tokenizer, wants_to_end = constrainer.tokenizer, mx.zeros((1, constrainer.tokenizer.vocab_size))
    wants_to_end[:, tokenizer.eos_token_id] = 5
    mask = constrainer.mask(constrainer.grammar(SCHEMA), inside_reasoning=True)
    prompt = tokenizer.encode("<think>")
    logits = np.array(Constraint(mask)(mx.array(prompt), wants_to_end))[0]
    assert all(logits[token] == -np.inf for token in tokenizer.eos_token_ids)
    assert np.isfinite(logits).sum() == len(logits) - len(tokenizer.eos_token_ids)
    if tokenizer.has_thinking:
        assert logits.argmax() == tokenizer.think_end_id and logits.max() == 5
    assert passes(mask, tokenizer, 'Hm.</think>{"city": "A"}') == ('Hm.</think>{"city": "A"}', True)


def test_an_answer_that_may_be_empty_can_end_inside_its_reasoning(constrainer):
    mask = constrainer.mask(constrainer.grammar(tools=TOOLS, dialect=QWEN_JSON), inside_reasoning=True)
    assert mask.allowed().all() and mask.redirected() is None


@EVERY_TAGGED_FORM
def test_strict_tools_get_what_their_schema_says(constrainer, dialect, write):
    if not can_write(constrainer, dialect):
        return
    grammar = constrainer.grammar(tools=TOOLS, dialect=dialect)
    good = write({"city": "Paris < </x>", "unit": "C", "kind": "wind", "days": 3, "sign": "-"})
    free = write({"anything": "goes"}, "get_time")
    for text in ("No call at all.", f"Look:\n{good}", f"{good}\n{free}", free, "a < b <tool"):
        assert follows(constrainer, grammar, text)
    assert calls_of(read(good, dialect, tools=TOOLS))[0][1]["days"] == 3
    for wrong in ({"unit": "K"}, {"days": "x"}, {"kind": "sun"}, {"sign": "/"}, {"town": "A"}):
        assert not follows(constrainer, grammar, write({"city": "A"} | wrong))
    assert not follows(constrainer, grammar, write({"unit": "C"}))
    assert not follows(constrainer, grammar, write({"city": "A"}, "unheard_of"))


@EVERY_TAGGED_FORM
def test_a_call_can_be_required(constrainer, dialect, write):
    if not can_write(constrainer, dialect):
        return
    grammar = constrainer.grammar(tools=TOOLS[:1], dialect=dialect, required=True)
    call = write({"city": "A"})
    assert follows(constrainer, grammar, call) and follows(constrainer, grammar, f"{call}\n{call}")
    assert not follows(constrainer, grammar, "No.") and not follows(
        constrainer, grammar, write({"city": "A"}, "get_time")
    )
    for prefix in (dialect.prefix(), dialect.prefix("get_weather")):
        assert follows(constrainer, grammar, call.removeprefix(prefix), prefix=prefix)
        assert not follows(constrainer, grammar, write({"town": "A"}).removeprefix(prefix), prefix=prefix)


@EVERY_TAGGED_FORM
def test_a_schema_beside_tools_leaves_calls_possible(constrainer, dialect, write):
    if not can_write(constrainer, dialect):
        return
    grammar = constrainer.grammar(SCHEMA, tools=TOOLS, dialect=dialect)
    for good in ('{"city": "A"}', write({"city": "A"}), write({}, "get_time")):
        assert follows(constrainer, grammar, good)
    assert not follows(constrainer, grammar, "No.") and not follows(constrainer, grammar, write({"town": "A"}))


WITH_LEADS = [*((dialect, channels) for channels, dialect in HEADERS.items()), (COHERE_ACTION, COHERE)]


@pytest.fixture(scope="module", params=WITH_LEADS, ids=lambda one: one[0].name)
def messages(request, tmp_path_factory):
    """Returns a tokenizer with the markers of messages, and the dialect of their calls."""
    dialect, channels = request.param
    path = tmp_path_factory.mktemp("messages")
    tokenizer = train_bpe()
    tags = dialect.markers | channels.tags | channels.ends
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in sorted(tags)])
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"eos_token": max(channels.ends)})
    return Constrainer(load_tokenizer(path)), dialect, channels


def test_a_grammar_applies_to_messages_that_are_not_reasoning(messages):
    constrainer, dialect, channels = messages
    assert {constrainer.tokenizer.convert_tokens_to_ids(end) for end in channels.ends} == (
        constrainer.tokenizer.eos_token_ids
    )
    thought = thought_of(channels, "", '{"town"}')
    final, write = channels.lead, written(dialect)
    alone = constrainer.grammar(SCHEMA)
    both = constrainer.grammar(SCHEMA, tools=TOOLS, dialect=dialect)
    strict = constrainer.grammar(tools=TOOLS, dialect=dialect)
    required = constrainer.grammar(tools=TOOLS[:1], dialect=dialect, required=True)
    good, bad = f'{thought}{final}{{"city": "A"}}', f'{thought}{final}{{"town": "A"}}'
    for grammar in (alone, both):
        assert follows(constrainer, grammar, good) and follows(constrainer, grammar, good.removeprefix(thought))
        assert not follows(constrainer, grammar, bad) and not follows(constrainer, grammar, thought)
        rest, prefix = good.removeprefix(channels.start), channels.start if channels.header else ""
        assert follows(constrainer, grammar, rest, prefix=prefix, inside_reasoning=True)
    assert follows(constrainer, strict, bad)
    for grammar in (both, strict):
        assert follows(constrainer, grammar, thought + write({"city": "A", "days": 3}))
        assert not follows(constrainer, grammar, thought + write({"city": "A", "days": "x"}))
        assert not follows(constrainer, grammar, write({"city": "A"}, "unheard_of"))
    assert follows(constrainer, required, write({"city": "A"})) and not follows(constrainer, required, bad)
    prefix = dialect.prefix("get_weather")
    assert follows(constrainer, required, write({"city": "A"}).removeprefix(prefix), prefix=prefix)


def test_an_id_that_a_model_chooses_is_valid(messages):
    constrainer, dialect, _ = messages
    if not dialect.id_rule:
        return
    grammar = constrainer.grammar(tools=TOOLS, dialect=dialect)
    call = written(dialect)({"city": "A", "days": 3})
    for call_id, expected in (("a1b2c3d4e5", True), ("A1b2c3d4e5", False), ("a1b2", False)):
        assert follows(constrainer, grammar, call.replace("0" * 10, call_id)) == expected


def test_nothing_to_enforce(constrainer):
    assert constrainer.grammar() is None
    assert constrainer.grammar(tools=TOOLS[1:], dialect=QWEN_JSON) is None
    assert constrainer.grammar(tools=TOOLS, dialect=None) is None


@pytest.mark.parametrize(
    "schema, key",
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"type": "objct"}, "objct"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "x-guidance": {"nonsense": 1}, "format": "zork"}, "zork"),
    ],
)
def test_what_cannot_be_enforced_is_named(constrainer, schema, key):
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"q": schema}}}
    for dialect in (QWEN_JSON, QWEN_XML):
        with pytest.raises(RequestError, match="cannot be enforced"):
            constrainer.grammar(tools=[{"function": tool}], dialect=dialect)
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        constrainer.grammar(schema)
    assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "parameters",
    [
        7,
        {"properties": 7},
        {"required": 7},
        {"properties": {"a": 7}},
        {"properties": {"a": {"type": "string", "enum": 7}}},
    ],
)
def test_a_strict_tool_whose_schema_is_none_is_refused(constrainer, parameters):
    tool = {"function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(RequestError, match="cannot be enforced|must be an object"):
        constrainer.grammar(tools=[tool], dialect=QWEN_XML)


def test_limits_of_strings_in_tags_are_named(constrainer):
    tool = {"name": "f", "strict": True, "parameters": {"properties": {"p": {"type": "string", "pattern": "a+"}}}}
    with pytest.raises(RequestError, match="'p' has 'pattern'"):
        constrainer.grammar(tools=[{"function": tool}], dialect=QWEN_XML)


NESTED = pytest.mark.parametrize("dialect", [GEMMA, MINIMAX_M3], ids=lambda dialect: dialect.name)


@NESTED
def test_schemas_of_calls_that_are_not_json(constrainer, dialect):
    item = {"type": "object", "properties": {"on": {"type": "boolean"}, "n": {"type": ["number", "null"]}}}
    fields = {"a": {"type": "integer"}, "b": {"type": "array", "items": item}, "c": {}, "d": {"enum": [1, "x"]}}
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": fields, "required": ["c"]}}
    grammar = constrainer.grammar(tools=[{"function": tool}], dialect=dialect)
    write = written(dialect)
    for good in ({"c": {"any": ["x", 1]}}, {"a": 3, "b": [{"on": True}, {"n": None}, {}], "c": "y", "d": "x"}):
        assert follows(constrainer, grammar, write(good, "f"))
    for bad in (
        {},
        {"a": 3.5, "c": 1},
        {"c": 1, "d": 2},
        {"b": [{"n": "x"}], "c": 1},
        {"c": 1, "e": 1},
        {"c": 1, "a": 1},
    ):
        assert not follows(constrainer, grammar, write(bad, "f"))
    tool["parameters"]["properties"]["a"]["minimum"] = 2
    with pytest.raises(RequestError, match="parameter 'a' has 'minimum'"):
        constrainer.grammar(tools=[{"function": tool}], dialect=dialect)


def test_names_of_kimi_k3_are_escaped(constrainer):
    tool = {"name": "R&D", "strict": True, "parameters": {"properties": {'a"&': {"type": "string"}}}}
    grammar = constrainer.grammar(tools=[{"function": tool}], dialect=KIMI_K3)
    right = written(KIMI_K3)({'a"&': "x"}, "R&D")
    assert 'tool="R&amp;D"' in right and 'key="a&quot;&amp;"' in right and follows(constrainer, grammar, right)
    assert not follows(constrainer, grammar, right.replace("&quot;", '"'))
    assert not follows(constrainer, grammar, right.replace("&amp;D", "&D"))


@NESTED
def test_a_value_may_be_a_string_or_something_else(constrainer, dialect):
    words = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": words}}}
    grammar, write = constrainer.grammar(tools=[{"function": tool}], dialect=dialect), written(dialect)
    for good in ({}, {"a": "two words"}, {"a": [1, 2]}, {"a": ""}):
        assert follows(constrainer, grammar, write(good, "f"))
    for bad in ({"a": ["x"]}, {"a": [[1]]}, {"a": {"b": 1}}):
        assert not follows(constrainer, grammar, write(bad, "f"))


def test_an_answer_may_begin_with_an_empty_reasoning(tmp_path):
    tokenizer = train_bpe()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in sorted(MINIMAX.tags | {MARK})])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    constrainer = Constrainer(load_tokenizer(tmp_path))
    grammar, good, bad = constrainer.grammar(SCHEMA), '{"city": "A"}', '{"town": "A"}'
    for lead in ("", "</mm:think>", "<mm:think>why</mm:think>"):
        assert follows(constrainer, grammar, lead + good) and not follows(constrainer, grammar, lead + bad)
    assert not follows(constrainer, grammar, f"</mm:think></mm:think>{good}")


@pytest.mark.parametrize("is_token", [True, False])
def test_reasoning_of_less_effort_ends_too(tmp_path, is_token):
    """K2 Horizon's tags (vLLM: `k2_horizon_reasoning_parser.py`), which a model may also spell."""
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    efforts, tokenizer = [f"ifm|think{effort}>" for effort in ("", "_fast", "_faster")], train_bpe()
    tags = [f"<{slash}{effort}" for effort in efforts for slash in ("", "/")]
    tokenizer.add_tokens([AddedToken(tag) for tag in tags if is_token or tag[1] != "/"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    constrainer = Constrainer(load_tokenizer(tmp_path))
    grammar, thought = constrainer.grammar(SCHEMA), "why?</ifm|think_fast>\n"
    assert follows(constrainer, grammar, thought + '{"city": "A"}', inside_reasoning=True)
    assert not follows(constrainer, grammar, thought + '{"town": "A"}', inside_reasoning=True)


def test_a_forbidden_token_is_an_error(constrainer):
    mask = constrainer.mask(constrainer.grammar(SCHEMA))
    token = constrainer.tokenizer.encode_after("Sure")[0]
    with pytest.raises(RequestError, match="cannot go on"):
        mask.consume(token)


def test_the_processor_leaves_what_the_mask_allows(constrainer):
    tokenizer, text = constrainer.tokenizer, '{"city": "A", "days": 3}'
    process = Constraint(constrainer.mask(constrainer.grammar(SCHEMA)))
    prompt = tokenizer.encode("The answer?")
    answer = [*tokenizer.encode_after(text), tokenizer.eos_token_id]
    wide = tokenizer.vocab_size + 60
    for n, token in enumerate(answer):
        logits = process(mx.array([*prompt, *answer[:n]], mx.uint32), mx.zeros((1, wide), mx.bfloat16))
        masked = np.array(logits)
        assert masked.dtype == np.float32 and masked[0, token] == 0 and np.all(masked[0, tokenizer.vocab_size :] < 0)
    assert set(np.flatnonzero(masked[0] == 0)) == tokenizer.eos_token_ids


def test_any_allowed_tokens_make_json(constrainer):
    schema = {"type": "array", "items": {"enum": [1, 2.5, "é🙂", None]}, "maxItems": 3, "minItems": 1}
    grammar, draw = constrainer.grammar(schema), np.random.default_rng(7)
    for _ in range(20):
        mask, tokens = constrainer.mask(grammar), []
        while not mask.is_done:
            allowed = np.flatnonzero(mask.allowed())
            allowed = allowed[allowed != constrainer.tokenizer.think_start_id]
            text = [t for t in allowed if constrainer.tokenizer.token_bytes(int(t)).strip()]
            tokens.append(int(draw.choice(text or allowed)))
            if tokens[-1] in constrainer.tokenizer.eos_token_ids:
                break
            mask.consume(tokens[-1])
        stops = constrainer.tokenizer.eos_token_ids
        value = json.loads(constrainer.tokenizer.decode([t for t in tokens if t not in stops]))
        assert 1 <= len(value) <= 3 and set(value) <= {1, 2.5, "é🙂", None}


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"run: pip install ('llguidance>=|-e .*\[structured\])"):
        Constrainer(load_tokenizer("moeflux_mlx/demo"))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    train_bpe().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="ends an answer"):
        Constrainer(load_tokenizer(tmp_path))


def test_ends_that_the_tokenizer_lacks_are_left_out(tmp_path):
    path = directory(tmp_path, "marked")
    end = load_tokenizer(path).eos_token_id
    write_json(path / "generation_config.json", {"eos_token_id": [end, 248044]})
    constrainer = Constrainer(load_tokenizer(path))
    grammar = constrainer.grammar(SCHEMA)
    assert follows(constrainer, grammar, '{"city": "A"}') and constrainer.ends == {end}
    allowed = constrainer.mask(grammar, inside_reasoning=True).allowed()
    assert np.flatnonzero(~allowed).tolist() == [end]
    write_json(path / "generation_config.json", {"eos_token_id": 248044})
    with pytest.raises(RequestError, match="name 248044, which its tokenizer does not have"):
        Constrainer(load_tokenizer(path))


def test_llguidance_is_imported_late():
    import subprocess

    code = "import sys, moeflux_mlx.text.structured; print('llguidance' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
