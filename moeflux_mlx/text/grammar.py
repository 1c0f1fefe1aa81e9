"""Grammars of answers, in llguidance's form of Lark.

An answer is JSON under a schema, or free text with calls whose arguments follow the schemas of their tools, or either.
Text is free until a call opens. This module knows neither tokens nor whether llguidance can enforce a schema.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .calls.dialect import Dialect
from .calls.schema import COMPOSED, STRING, allowed_types, is_map, members, types, variants
from .calls.schema_rules import (
    SPOKEN_LIMITS,
    check_limits,
    check_readable,
    enforceable,
    is_free_text,
    objects,
    possible,
    quoted,
)
from .calls.tags import Tags
from .calls.typed import CONTAINERS

Schema = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
ANY_OBJECT: Schema = {"type": "object"}
ROOT = "#/$defs/root"
# Between two tokens of JSON: a space, or a new line and its indent. More would only use up the limit of the answer.
OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,16}"}
HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]{0,4}/\n"


@dataclass(frozen=True)
class Grammar:
    """Attributes:
    text: in Lark.
    schemas: its schemas as JSON text, to be checked one by one.
    """

    text: str
    schemas: tuple[str, ...]


def json_grammar(schema: Schema | bool, lead: str = "") -> Grammar:
    """JSON that conforms to `schema`, and any object for True; spaces may stand before it, or free text and `lead`."""
    source = json_schema(schema)
    return Grammar(f"{HEAD}start: {_led(lead)} json\n{_lead(lead)}json: %json {source}\n", (source,))


def calls_grammar(
    tools: Tools,
    dialect: Dialect,
    *,
    required: bool = False,
    schema: Schema | bool | None = None,
    lead: str = "",
) -> Grammar:
    """Free text with calls of `tools`, the arguments of strict ones under their schemas.

    Args:
        required: the answer must be a call, without text before it.
        schema: the answer is a call, or else JSON that conforms to this.
        lead: text between free text and such JSON; with it, free text may also precede a call.
    """
    schemas: list[str] = []
    calls = [_call(function, dialect, schemas) for function in _functions(tools)]
    opening = quoted(dialect.opening)
    rules = [f"call: {' | '.join(f'call_{n}' for n in range(len(calls)))}"]
    rules += [f"call_{n}: {call}" for n, call in enumerate(calls)]
    rules.append(f"open[lazy]: TEXT {opening}")
    if dialect.arguments is not None:
        rules.append(dialect.arguments[0].strip())
    if dialect.tags is not None:
        end = quoted(_value_end(dialect.tags))
        rules += [f"value[lazy]: TEXT {end}", f"unbracketed[lazy]: /\\s*([^\\s\\[{{](.|\\n)*)?/ {end}"]
        rules += [f"key[lazy]: /[^<>\\n]+/ {quoted(dialect.tags.key[1])}"]
    before = (dialect.begin + dialect.named).partition(dialect.opening)[0]
    first = "open call" if lead and not required else f"SPACE {quoted(before + dialect.opening)} call"
    start = "(open call)* TEXT"
    if required or schema is not None:
        start = f"{first} {start}"
    if schema is not None and not required:
        schemas.append(json_schema(schema))
        rules.append(f"json: %json {schemas[-1]}")
        rules.append(_lead(lead))
        start = f"{_led(lead)} json | {start}"
    return Grammar("\n".join([f"{HEAD}start: {start}", *rules, ""]), tuple(schemas))


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether a tool asks for arguments that conform to its schema."""
    return bool((tool.get("function") or tool).get("strict"))


def parameters_of(tool: Mapping[str, Any]) -> Schema:
    """The JSON schema of a tool's arguments.

    Raises:
        RequestError: it is not an object.
    """
    function = tool.get("function") or tool
    parameters = function.get("parameters") or ANY_OBJECT
    if not isinstance(parameters, Mapping):
        raise RequestError(
            f"parameters of tool {function.get('name')!r} are {parameters!r:.60}; they must be an object"
        )
    return parameters


def json_schema(schema: Schema | bool) -> str:
    """The schema as JSON text on one line, with our options instead of its own."""
    return json.dumps({**(ANY_OBJECT if isinstance(schema, bool) else _rewritten(schema)), "x-guidance": OPTIONS})


def _functions(tools: Tools) -> Iterator[Mapping[str, Any]]:
    for tool in tools:
        yield tool.get("function") or tool


def _led(lead: str) -> str:
    return "lead" if lead else "SPACE"


def _lead(lead: str) -> str:
    """The rule of what stands before JSON, if anything does."""
    return f"lead[lazy]: TEXT {quoted(lead)}\n" if lead else ""


def _call(function: Mapping[str, Any], dialect: Dialect, schemas: list[str]) -> str:
    """What follows the opening, for one tool."""
    name, strict = function["name"], is_strict(function)
    schema = parameters_of(function) if strict else ANY_OBJECT
    begin = (dialect.begin + dialect.named).split(dialect.opening, 1)[1]
    if dialect.id_rule:
        begin = begin.removeprefix("ID")
    begin = begin.replace("NAME", name)
    if dialect.arguments is not None:
        own = dialect.arguments[1](schema) if strict else "arguments"
        return f"{quoted(begin)} {own} {quoted(dialect.close)}"
    if dialect.tags is None:
        objects(schema)  # refused if there is none: arguments are always an object
        schemas.append(json_schema(schema))
        close = quoted(dialect.close) if dialect.close else ""
        return f"{dialect.id_rule} {quoted(begin)} {dialect.between} %json {schemas[-1]} {close}"
    parameters = " | ".join(" ".join(_parameters(one, schema, dialect.tags, schemas)) for one in enforceable(schema))
    return f"{quoted(begin.rstrip())} {_gap(dialect.tags)} ({parameters}) {quoted(dialect.close)}"


def _gap(tags: Tags) -> str:
    """What stands between two tags."""
    return quoted("\n") if tags.lined else "SPACE"


def _value_begin(tags: Tags) -> Iterator[str]:
    """What stands between a key's closing tag and the value."""
    if tags.lined:
        yield _gap(tags)
    elif tags.value[0]:
        yield f"SPACE {quoted(tags.value[0])}"


def _kind(tags: Tags, is_string: bool | None = None) -> str:
    """What opens a string, or JSON, or either; nothing where a value does not say which it is."""
    if tags.kinds is None:
        return ""
    string, json_value = map(quoted, tags.kinds)
    return f"({string} | {json_value})" if is_string is None else string if is_string else json_value


def _value_end(tags: Tags) -> str:
    return ("\n" if tags.lined else "") + tags.value[1]


def _parameters(one: Schema, root: Schema, tags: Tags, schemas: list[str]) -> Iterator[str]:
    """The parameters of an alternative in order; those that are not required may be left out."""
    if is_map(one):
        value = _parameter_value(None, one.get("additionalProperties", True), root, tags, schemas)
        yield f"({quoted(tags.key[0])} key {value})*"
    else:
        for name, own, is_required in members(one, root):
            rule = f"{quoted(f'{tags.key[0]}{name}{tags.key[1]}')} {_parameter_value(name, own, root, tags, schemas)}"
            yield rule if is_required else f"({rule})?"


def _parameter_value(name: str | None, own: Any, root: Schema, tags: Tags, schemas: list[str]) -> str:
    """What follows the tag of a key: the value as a text, as one of the listed texts, or as JSON."""
    alternatives, end = possible(name, variants(own, root)), quoted(_value_end(tags))
    texts = [one for one in alternatives if "string" in (types(one) or STRING)]
    if tags.kinds is None:
        check_readable(name, alternatives)
    for one in texts:
        check_limits(name, one, (*COMPOSED, *SPOKEN_LIMITS))
    listed = [text for one in texts for text in one.get("enum", ()) if isinstance(text, str)]
    rules = [f"{_kind(tags, True)} {quoted(text)} {end}" for text in listed]
    others = allowed_types(alternatives) - STRING
    if any(map(is_free_text, texts)):
        others = others if tags.kinds else others & CONTAINERS.keys()
        rules = [f"{_kind(tags, True)} {'unbracketed' if others and not tags.kinds else 'value'}"]
    if others:
        schemas.append(json_schema(_part({"allOf": [own, {"type": sorted(others)}]}, root)))
        rules.append(f"{_kind(tags, False)} %json {schemas[-1]} {end}")
    elif not all(map(types, texts)):
        rules = [f"{_kind(tags)} value"]
    return " ".join([*_value_begin(tags), f"({' | '.join(rules)})", _gap(tags)])


def _part(own: Schema, root: Schema) -> Schema:
    """A part of the schema `root` as a schema of its own."""
    if "$ref" not in json.dumps(own):
        return own
    return {"allOf": [_rewritten(own, ROOT)], "$defs": {"root": _rewritten(root, ROOT)}}


def _rewritten(schema: Any, base: str = "#") -> Any:
    """A schema in which references begin at `base`, and a union says what `nullable` says, which llguidance ignores."""
    if isinstance(schema, list):
        return [_rewritten(item, base) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    own = {key: _rewritten(value, base) for key, value in schema.items()}
    reference = own.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        own["$ref"] = base + reference[1:]
    is_schema = not all(isinstance(value, (bool, Mapping)) for value in own.values())  # else a map of schemas
    if is_schema and own.get("nullable") is True:
        del own["nullable"]
        return {"anyOf": [own, {"type": "null"}]}
    return own
