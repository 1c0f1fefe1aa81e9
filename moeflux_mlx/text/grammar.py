"""Grammars of what an answer may be, in llguidance's form of Lark.

An answer is JSON under a schema, or free text with calls whose arguments follow the schemas of their tools, or either.
Text is free until a call opens. Nothing here knows tokens, or whether llguidance can enforce a schema.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .calls import deepseek, xml_form
from .calls.dialect import QWEN_JSON, QWEN_XML, TOOL_CALL, Dialect
from .calls.schema import parameter_types, variants

Schema = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
ANY_OBJECT: Schema = {"type": "object"}
# Between two tokens of JSON: a space, or a new line and its indent. More would only use up the limit of the answer.
OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,16}"}
HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]{0,4}/\n"
SPOKEN_LIMITS = ("pattern", "format", "minLength", "maxLength")  # of a string that is written without quotes


@dataclass(frozen=True)
class Grammar:
    """Attributes:
    text: in Lark.
    schemas: those that it holds, as JSON text, to be checked one by one.
    """

    text: str
    schemas: tuple[str, ...]


def json_grammar(schema: Schema | bool) -> Grammar:
    """JSON that conforms to `schema`, and any object for True; spaces may stand before it."""
    source = json_schema(schema)
    return Grammar(f"{HEAD}start: SPACE json\njson: %json {source}\n", (source,))


def calls_grammar(
    tools: Tools, dialect: Dialect, *, required: bool = False, schema: Schema | bool | None = None
) -> Grammar:
    """Free text with calls of `tools`, the arguments of strict ones under their schemas.

    Args:
        required: the answer is a call, without text before it.
        schema: the answer is a call, or else JSON that conforms to this.
    """
    schemas: list[str] = []
    calls = [_call(function, dialect, schemas) for function in _functions(tools)]
    opening = _quoted(_opening(dialect))
    rules = [f"call: {' | '.join(f'call_{n}' for n in range(len(calls)))}"]
    rules += [f"call_{n}: {call}" for n, call in enumerate(calls)]
    rules += [f"open[lazy]: TEXT {opening}", 'value[lazy]: TEXT "\\n</parameter>\\n"', 'key[lazy]: /[^>\\n]+/ ">\\n"']
    first = f"SPACE {_quoted(dialect.begin.partition(_opening(dialect))[0] + _opening(dialect))} call"
    start = "(open call)* TEXT"
    if required or schema is not None:
        start = f"{first} {start}"
    if schema is not None and not required:
        schemas.append(json_schema(schema))
        rules.append(f"json: %json {schemas[-1]}")
        start = f"SPACE json | {start}"
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
    """As JSON text on one line, with our options in place of any that it has."""
    return json.dumps({**(ANY_OBJECT if isinstance(schema, bool) else schema), "x-guidance": OPTIONS})


def _functions(tools: Tools) -> Iterator[Mapping[str, Any]]:
    for tool in tools:
        yield tool.get("function") or tool


def _opening(dialect: Dialect) -> str:
    """What ends free text."""
    if dialect is QWEN_XML:
        return xml_form.FUNCTION
    return TOOL_CALL if dialect is QWEN_JSON else deepseek.CALL_BEGIN


def _call(function: Mapping[str, Any], dialect: Dialect, schemas: list[str]) -> str:
    """What follows the opening, for one tool."""
    name, strict = function["name"], is_strict(function)
    schema = parameters_of(function) if strict else ANY_OBJECT
    if dialect is QWEN_XML:
        parameters = " ".join(_parameters(schema, schemas)) if strict else '("<parameter=" key value)*'
        begin, end = f"{name}>\n", f"{xml_form.END_FUNCTION}\n{xml_form.END}"
        return f"{_quoted(begin)} {parameters} {_quoted(end)}"
    schemas.append(json_schema(schema))
    begin = (dialect.begin + dialect.named.replace("NAME", name)).split(_opening(dialect), 1)[1]
    return f"{_quoted(begin)} %json {schemas[-1]} {_quoted(_closing(dialect))}"


def _closing(dialect: Dialect) -> str:
    if dialect is QWEN_JSON:
        return f"}}\n{xml_form.END}"
    fence = f"\n{deepseek.FENCE}" if deepseek.FENCE in dialect.named else ""
    return fence + deepseek.CALL_END


def _parameters(schema: Schema, schemas: list[str]) -> Iterator[str]:
    """The parameters in the schema's order; those that are not required may be left out."""
    required = schema.get("required") or ()
    for name, own in (schema.get("properties") or {}).items():
        begin = _quoted(f"{xml_form.PARAMETER}{name}>\n")
        rule = f"({begin} {_parameter_value(name, own, schema, schemas)})"
        yield rule if name in required else f"{rule}?"


def _parameter_value(name: str, own: Any, schema: Schema, schemas: list[str]) -> str:
    end = _quoted(f"\n{xml_form.END_PARAMETER}\n")
    if "string" not in parameter_types(name, schema):
        whole = {key: schema[key] for key in ("$defs", "definitions") if key in schema} | dict(own)
        schemas.append(json_schema(whole))
        return f"%json {schemas[-1]} {end}"
    alternatives = variants(own, schema)
    for key in SPOKEN_LIMITS:
        if any(key in one for one in alternatives):
            raise RequestError(
                f"parameter {name!r} has {key!r}, which cannot be enforced in this model's calls; leave it out"
            )
    listed = [
        one.get("enum", [one["const"]] if "const" in one else None) for one in alternatives if one.get("type") != "null"
    ]
    if None in listed:
        return "value"
    values = [value if isinstance(value, str) else json.dumps(value) for values in listed for value in values]
    return f"({' | '.join(_quoted(value) for value in values)}) {end}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
