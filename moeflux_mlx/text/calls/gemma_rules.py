"""Grammars of the arguments in Gemma's calls, in llguidance's form of Lark: any arguments, or those that a schema
allows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import RequestError
from .schema import Schema, variants

QUOTE = '<|"|>'
# What arguments may be.
ARGUMENTS = r"""
arguments: "{" (pair ("," pair)*)? "}"
pair: /[^:,{}\[\]<>"\s]+/ ":" argument
argument: string | NUMBER | "true" | "false" | "null" | arguments | list
list: "[" (argument ("," argument)*)? "]"
string: "<|\"|>" spoken
spoken[lazy]: TEXT "<|\"|>"
INTEGER: /-?(0|[1-9][0-9]*)/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""
TYPES = {
    "string": "string",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
LIMITS = (
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
MAX_DEPTH = 8  # of nested values


def arguments_of(schema: Schema) -> str:
    """The arguments of a tool whose parameters have this schema: its properties in order, and no others.

    Raises:
        RequestError: the schema has a condition that cannot be enforced.
    """
    return _object(schema, schema, MAX_DEPTH)


def _object(schema: Schema, root: Schema, depth: int) -> str:
    required, properties = schema.get("required") or (), schema.get("properties") or {}
    pairs = [
        (f"{_quoted(f'{name}:')} {_value(name, own, root, depth - 1)}", name in required)
        for name, own in properties.items()
    ]
    return f'"{{" {_members(pairs, is_first=True)} "}}"'


def _members(pairs: Sequence[tuple[str, bool]], is_first: bool) -> str:
    """Pairs with commas between them; those that are not required may be left out."""
    if not pairs:
        return ""
    (pair, is_required), *others = pairs
    rest = _members(others, is_first=False)
    if not is_first:
        return f'"," {pair} {rest}' if is_required else f'("," {pair})? {rest}'
    without = _members(others, is_first=True)
    return f"{pair} {rest}" if is_required else f"({pair} {rest})? " if not others else f"({pair} {rest} | {without})"


def _value(name: str, schema: Any, root: Schema, depth: int) -> str:
    if not depth:
        raise RequestError(f"parameter {name!r} is too deep to be enforced in this model's calls; leave out 'strict'")
    rules = [rule for one in variants(schema, root) for rule in _rules(name, one, root, depth)]
    return f"({' | '.join(dict.fromkeys(rules))})"


def _rules(name: str, one: Schema, root: Schema, depth: int) -> Iterator[str]:
    """The rules of values that a schema without unions allows."""
    limit = next((key for key in LIMITS if key in one), None)
    if limit is not None:
        raise RequestError(f"parameter {name!r} has {limit!r}, which cannot be enforced in this model's calls")
    values = one.get("enum", [one["const"]] if "const" in one else None)
    if values is not None:
        yield from (_quoted(written(value)) for value in values)
        return
    types = one.get("type", "any")
    for kind in [types] if isinstance(types, str) else types:
        if kind == "object" and one.get("properties"):
            yield _object(one, root, depth)
        elif kind == "array" and "items" in one:
            item = _value(name, one["items"], root, depth - 1)
            yield f'"[" ({item} ("," {item})*)? "]"'
        else:
            yield {**TYPES, "object": "arguments", "array": "list"}.get(kind, "argument")


def written(value: Any) -> str:
    """A value of JSON as Gemma writes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
