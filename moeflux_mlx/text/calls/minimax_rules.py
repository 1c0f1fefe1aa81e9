"""Grammars of the arguments in MiniMax-M3's calls, in llguidance's form of Lark: any arguments, or those that a schema
allows.

A text ends where the mark begins, so the mark belongs to the text; each rule of a value ends behind the mark of the
closing tag, and the rule of the arguments behind that of `</invoke>`.
"""

import json
from collections.abc import Mapping, Sequence

from ...files import JsonValue
from .schema_rules import MemberRule, SchemaRules, quoted

MARK = "]<]minimax[>["  # one token, before every tag of a call
ITEM = "item"
# What arguments may be.
ARGUMENTS = r"""
arguments: MARK member*
member: OPEN argument CLOSE MARK
OPEN: /<[^<>\/\s][^<>\s]*>/
CLOSE: /<\/[^<>\s]+>/
argument: string member*
string[lazy]: TEXT MARK
integer: /-?(0|[1-9][0-9]*)/ MARK
number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/ MARK
boolean: ("true" | "false") MARK
null: "null" MARK
MARK: "]<]minimax[>["
"""
TYPE_RULES = {kind: kind for kind in ("string", "integer", "number", "boolean", "null")}
TYPE_RULES |= {"object": "MARK member*", "array": f'MARK ("<{ITEM}>" argument "</{ITEM}>" MARK)*'}


class MiniMaxRules(SchemaRules):
    """`<city>Oslo]<]minimax[>[</city>]<]minimax[>[`, behind a mark."""

    writes_types = False

    def members(self, members: Sequence[MemberRule]) -> str:
        rules = [
            (f"{quoted(f'<{key}>')} {value} {quoted(f'</{key}>')} MARK", is_required)
            for key, value, is_required in members
        ]
        return " ".join(["MARK", *(rule if is_required else f"({rule})?" for rule, is_required in rules)])

    def any_members(self, value: str) -> str:
        return f"MARK (OPEN {value} CLOSE MARK)*"

    def items(self, item: str) -> str:
        return f'MARK ("<{ITEM}>" {item} "</{ITEM}>" MARK)*'

    def either(self, rules: Sequence[str]) -> str:
        """Beside strings, the text before the first tag inside is an empty one: a mark always ends a text there."""
        if "string" in rules:
            rules = [f"string{rule.removeprefix('MARK')}" if rule.startswith("MARK") else rule for rule in rules]
        return super().either(rules)

    def literal(self, value: JsonValue) -> str:
        return quoted(written(value) + MARK)

    def any_of(self, kind: str) -> str:
        return TYPE_RULES.get(kind, "argument")


def written(value: JsonValue) -> str:
    """A value of JSON as MiniMax-M3 writes it; None in an object is left out."""
    if isinstance(value, Mapping):
        return "".join(_tagged(key, item) for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return "".join(_tagged(ITEM, item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _tagged(tag: str, value: JsonValue) -> str:
    return f"{MARK}<{tag}>{written(value)}{MARK}</{tag}>"
