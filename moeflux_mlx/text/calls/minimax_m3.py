"""MiniMax-M3's calls in a section, with a mark before every tag and a tag for each parameter:

    MARK<tool_call>
    MARK<invoke name="get_weather">MARK<city>OsloMARK</city>MARK<days>MARK<item>3MARK</item>MARK</days>MARK</invoke>
    MARK</tool_call>

An object is its members, a list its items, one inside the other. A text is typed by the tool's schema, as in `tagged`.
The mark is a token of its own, so a tag of the object that a text is part of ends this text, without its closing tag.

In the grammars of arguments, in llguidance's form of Lark, a text ends where the mark begins, so the mark belongs to
the text; each rule of a value ends behind the mark of the closing tag, and the rule of the arguments behind that of
`</invoke>`.
"""

import json
from collections.abc import Mapping, Sequence, Set

from .dialect import (
    MAX_NESTED,
    Call,
    Dialect,
    Malformed,
    Parsing,
    Write,
    behind,
    literal,
    optional,
    skip_space,
    until,
    until_one,
)
from .invoke import CLOSED
from .json_form import without_arguments
from .schema import TypedText, ValueShape
from .schema_rules import MemberRule, SchemaRules, quoted

MARK = "]<]minimax[>["  # one token, before every tag of a call
ITEM = "item"
# What arguments may be without a schema.
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

    def literal(self, value: object) -> str:
        return quoted(written(value) + MARK)

    def any_of(self, kind: str) -> str:
        return TYPE_RULES.get(kind, "argument")


def written(value: object) -> str:
    """A value of JSON as MiniMax-M3 writes it; None in an object is left out."""
    if isinstance(value, Mapping):
        return "".join(_tagged(key, item) for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return "".join(_tagged(ITEM, item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _tagged(tag: str, value: object) -> str:
    return f"{MARK}<{tag}>{written(value)}{MARK}</{tag}>"


TAG = f"{MARK}<"
SECTION = f"{TAG}tool_call>", f"{TAG}/tool_call>"
INVOKE = f'{TAG}invoke name="'
EMPTY = {"array": "[]", "object": "{}"}


def invoke(call: Call) -> Parsing[str]:
    """Parses the text after `MARK<invoke name="`."""
    name, end = yield from until_one(['">', *CLOSED])
    call.start(name.strip())
    if end in CLOSED:
        return (yield from without_arguments(call, SECTION[1]))
    yield from literal([TAG], (yield from skip_space()))
    arguments = ValueShape(call.schema, call.schema)
    yield from _members("invoke", (yield from until(">")), arguments, call.write, is_list=False)
    call.check("")
    return (yield from optional(SECTION[1], (yield)))


def _members(tag: str, name: str, shape: ValueShape, write: Write, is_list: bool) -> Parsing[None]:
    """The members or items of a value up to `</tag>`; `name` is what the first of their tags names.

    Raises:
        Malformed: values are nested too deeply.
    """
    opening, closing = "[]" if is_list else "{}"
    write(opening)
    given: set[str] = set()
    while name != f"/{tag}":
        if name.startswith("/") or shape.depth == MAX_NESTED:
            raise Malformed("")
        own = write if is_list or name not in given else lambda piece: None  # the first value counts
        own((", " if given else "") + ("" if is_list else json.dumps(name, ensure_ascii=False) + ": "))
        given.add(name)
        following = {f"/{tag}"} if is_list else {f"/{tag}", *shape.keys - given}
        name = yield from _read(name, shape.inner(None if is_list else name), own, following)
        if not name:
            yield from literal([TAG], (yield from skip_space()))
            name = yield from until(">")
    write(closing)


def _read(tag: str, shape: ValueShape, write: Write, following: Set[str]) -> Parsing[str]:
    """A value up to `MARK</tag>`: members or items, or a text; spaces before the first of them are no text yet.

    Returns "", or which tag of `following` came in place of the closing one.
    """
    ends = {f"{TAG}/{tag}>": ""} | {f"{TAG}{name}>": name for name in following}
    text = TypedText(write, shape.types)
    spaces, held, is_text = "", "", False
    while held not in ends:
        char = yield
        if not char:
            raise Malformed("")
        if held == TAG and char != "/" and not is_text:
            name = yield from until(">", char)
            is_list = name == ITEM and ("array" in shape.types or "object" not in shape.types)
            yield from _members(tag, name, shape, write, is_list)
            return ""
        held += char
        while not any(end.startswith(held) for end in ends):
            spaces, held = spaces + held[0], held[1:]
        if is_text or spaces.strip():
            text.add(spaces)
            spaces, is_text = "", True
    empty = [] if is_text or "string" in shape.types else [EMPTY[kind] for kind in EMPTY if kind in shape.types]
    if empty:
        write(empty[0])
    else:
        text.add(spaces)
        text.end()
    return ends[held]


MINIMAX_M3 = Dialect(
    name="minimax_m3",
    openings={SECTION[0]: behind(INVOKE, invoke), INVOKE: invoke},
    begin=f"{SECTION[0]}\n",
    opening=INVOKE,
    named=f'{INVOKE}NAME">',
    close="</invoke>",
    section=SECTION,
    markers=frozenset({MARK, "<tool_call>", "</tool_call>"}),
    arguments=(ARGUMENTS, lambda schema: MiniMaxRules(schema).arguments()),
)
