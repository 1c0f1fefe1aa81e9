"""Grammars of the arguments in Gemma's calls, in llguidance's form of Lark: any arguments, or those that a schema
allows.
"""

import json
from collections.abc import Mapping, Sequence

from ...files import JsonValue
from .schema_rules import MemberRule, SchemaRules, quoted

QUOTE = '<|"|>'
# What arguments may be.
ARGUMENTS = r"""
arguments: "{" (pair ("," pair)*)? "}"
pair: KEY ":" argument
KEY: /[^:,{}\[\]<>"\s]+/
argument: string | NUMBER | "true" | "false" | "null" | arguments | list
list: "[" (argument ("," argument)*)? "]"
string: "<|\"|>" spoken
spoken[lazy]: TEXT "<|\"|>"
INTEGER: /-?(0|[1-9][0-9]*)/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""
TYPE_RULES = {
    "string": "string",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "null": '"null"',
    "object": "arguments",
    "array": "list",
}


class GemmaRules(SchemaRules):
    """`{city:<|"|>Oslo<|"|>,days:3}`."""

    writes_types = True

    def members(self, members: Sequence[MemberRule]) -> str:
        return f'"{{" {_joined(members, is_first=True)} "}}"'

    def any_members(self, value: str) -> str:
        return f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"'

    def items(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'

    def literal(self, value: JsonValue) -> str:
        return quoted(written(value))

    def any_of(self, kind: str) -> str:
        return TYPE_RULES.get(kind, "argument")


def _joined(members: Sequence[MemberRule], is_first: bool) -> str:
    """Members with commas between them."""
    if not members:
        return ""
    (key, value, is_required), *others = members
    pair, rest = f"{quoted(f'{key}:')} {value}", _joined(others, is_first=False)
    if not is_first:
        return f'"," {pair} {rest}' if is_required else f'("," {pair})? {rest}'
    without = _joined(others, is_first=True)
    return f"{pair} {rest}" if is_required else f"({pair} {rest})? " if not others else f"({pair} {rest} | {without})"


def written(value: JsonValue) -> str:
    """A value of JSON as Gemma writes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)
