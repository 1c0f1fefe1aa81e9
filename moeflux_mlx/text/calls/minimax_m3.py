"""MiniMax-M3's calls in a section, with a mark before every tag and a tag for each parameter:

    MARK<tool_call>
    MARK<invoke name="get_weather">MARK<city>OsloMARK</city>MARK<days>MARK<item>3MARK</item>MARK</days>MARK</invoke>
    MARK</tool_call>

An object is its members, a list its items, one inside the other. A text is typed by the tool's schema, as in `tagged`.
The mark is a token of its own, so a tag of the object that a text is part of ends this text, without its closing tag.
"""

import json
from collections.abc import Set

from .call import Call
from .dialect import Dialect, behind
from .invoke import CLOSED
from .json_form import without_arguments
from .minimax_rules import ARGUMENTS, ITEM, MARK, MiniMaxRules
from .schema import ValueShape
from .steps import MAX_NESTED, Malformed, Parsing, Write, literal, optional, skip_space, until, until_one
from .typed import TypedText

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
        own = write if is_list or name not in given else _nowhere  # the first value counts
        own((", " if given else "") + ("" if is_list else json.dumps(name, ensure_ascii=False) + ": "))
        given.add(name)
        following = {f"/{tag}"} if is_list else {f"/{tag}", *shape.keys - given}
        name = yield from _read(name, shape.inner(None if is_list else name), own, following)
        if not name:
            yield from literal([TAG], (yield from skip_space()))
            name = yield from until(">")
    write(closing)


def _nowhere(_piece: str) -> None:
    pass


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
