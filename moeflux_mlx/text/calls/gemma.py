"""Gemma 4's calls, `<|tool_call>call:NAME{city:<|"|>Oslo<|"|>,days:3}<tool_call|>`, one after the other.

Keys have no quotes, and strings stand between tokens of their own; all else is as in JSON.
"""

import json
from collections.abc import Mapping, Sequence

from .dialect import (
    MAX_NESTED,
    Call,
    Dialect,
    Malformed,
    Parsing,
    Write,
    json_string,
    literal,
    optional,
    parsed,
    skip_space,
    until,
    until_one,
)
from .json_form import SPARE
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

    def literal(self, value: object) -> str:
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


def written(value: object) -> str:
    """A value of JSON as Gemma writes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


CALL_BEGIN, CALL_END = "<|tool_call>", "<tool_call|>"
ENDS = frozenset(",}]")
WORDS = {"None": "null", "True": "true", "False": "false"}  # as templates write them in past calls


def gemma(call: Call) -> Parsing[str]:
    """Parses the text after `<|tool_call>`."""
    yield from literal(["call:"], (yield from skip_space()))
    name, char = yield from until_one(["{", CALL_END, CALL_BEGIN, "\n"], or_end=True)
    call.start(name.strip())
    if char == "\n":
        char = yield from skip_space()
    if char != "{":
        call.check(char)
        return "" if char == CALL_END else char if char == CALL_BEGIN else (yield from optional(CALL_END, char))
    yield from _members("}", call.write, has_keys=True)
    call.check("")
    return (yield from optional(CALL_END, (yield), SPARE))


def _members(end: str, write: Write, has_keys: bool, depth: int = MAX_NESTED) -> Parsing[None]:
    """An object or a list behind its opening bracket, as JSON."""
    if not depth:
        raise Malformed("")
    write("{" if has_keys else "[")
    char = yield from skip_space()
    while char != end:
        if has_keys:
            key = yield from _key(char)
            write(json.dumps(key, ensure_ascii=False) + ": ")
            char = yield from skip_space()
        char = yield from _value(char, write, depth - 1)
        char = (yield from skip_space()) if char.isspace() else char
        if char == ",":
            write(", ")
            char = yield from skip_space()
        elif char != end:
            raise Malformed(char)
    write(end)


def _key(first: str) -> Parsing[str]:
    """The key that begins with `first`, up to its colon."""
    if first not in ("<", '"'):
        if first in ENDS or not first:
            raise Malformed(first)
        return (yield from until(":", first)).strip()
    pieces: list[str] = []
    char = yield from _value(first, pieces.append, 0)
    yield from literal([":"], (yield from skip_space()) if char.isspace() else char)
    return str(parsed("".join(pieces)))


def _value(first: str, write: Write, depth: int) -> Parsing[str]:
    """Passes on the value that begins with `first` as JSON, and returns the character after it."""
    if first == "<":
        yield from literal([QUOTE], first)
        yield from _string(write)
        return (yield)
    if first == '"':
        yield from json_string(write)
        return (yield)
    if first in ("{", "["):
        yield from _members("}" if first == "{" else "]", write, has_keys=first == "{", depth=depth)
        return (yield)
    word = ""
    while first not in ENDS:
        if not first:
            raise Malformed("")
        word += first
        first = yield
    word = word.strip()
    write(WORDS.get(word) or (word if _is_json(word) else json.dumps(word, ensure_ascii=False)))
    return first


def _is_json(word: str) -> bool:
    try:
        parsed(word)
    except ValueError:
        return False
    return True


def _string(write: Write) -> Parsing[None]:
    """Reads up to the closing quote, as a JSON string."""
    write('"')
    held = ""
    while held != QUOTE:
        if QUOTE.startswith(held):
            char = yield
            if not char:
                raise Malformed("")
            held += char
        else:
            write(json.dumps(held[0], ensure_ascii=False)[1:-1])
            held = held[1:]
    write('"')


GEMMA = Dialect(
    name="gemma",
    openings={CALL_BEGIN: gemma},
    begin=f"{CALL_BEGIN}call:",
    opening=CALL_BEGIN,
    named="NAME",
    close=CALL_END,
    section=(CALL_BEGIN, CALL_END),
    markers=frozenset({CALL_BEGIN, CALL_END, QUOTE}),
    arguments=(ARGUMENTS, lambda schema: GemmaRules(schema).arguments()),
)
