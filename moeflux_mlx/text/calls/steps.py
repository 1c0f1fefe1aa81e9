"""Parsers that take one character at a time, so that their result does not depend on how the text was cut.

A parser is a generator: every `yield` waits for the next character, and "" says that the text has ended. It returns the
characters that it read too far, and raises `Malformed` if the text is invalid.
"""

import json
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ...files import JsonValue

T = TypeVar("T")
Parsing = Generator[None, str, T]
Write = Callable[[str], object]

MAX_NESTED = 64  # values inside each other: every level is one of Python's stack
MAX_NAME = 256  # longer than any tool name, and short enough not to hold back an answer
OPENING, CLOSING = frozenset("{["), frozenset("}]")
SCALAR = frozenset("0123456789+-.eEtrufalsn")
BETWEEN = SCALAR | frozenset(" \t\r\n,:")


class Malformed(Exception):
    """The text is no call; `rest` are the characters to be read again as text."""

    def __init__(self, rest: str):
        super().__init__(rest)
        self.rest = rest


class Switched(Exception):
    """The text was the header of a message: reasoning follows, or text for the user."""

    def __init__(self, inside: bool):
        super().__init__(inside)
        self.inside = inside


def skip_space() -> Parsing[str]:
    """The first character that is no space."""
    char = yield
    while char.isspace():
        char = yield
    return char


def literal(options: Sequence[str], held: str = "") -> Parsing[str]:
    """Reads one of `options`; `held` is the part already read."""
    while held not in options:
        char = (yield) if any(option.startswith(held) for option in options) else ""
        if not char:
            raise Malformed(held)
        held += char
    return held


def until(end: str, held: str = "") -> Parsing[str]:
    """Reads up to the character or tag `end`, on one line."""
    text, _ = yield from until_one([end], held)
    return text


def until_one(ends: Sequence[str], held: str = "", or_end: bool = False) -> Parsing[tuple[str, str]]:
    """Reads up to one of the characters or tags `ends`, on one line; returns the text before it, and which it is.

    `or_end`: the text may also end; then the second is "".
    """
    while not (end := next(filter(held.endswith, ends), "")):
        char = yield
        if or_end and not char:
            return held, ""
        is_line_end = char == "\n" and not any((held + char).endswith(end) for end in ends)
        if not char or is_line_end or len(held) > MAX_NAME + max(map(len, ends)):
            raise Malformed(char)
        held += char
    return held.removesuffix(end), end


def skip(spare: str, char: str) -> Parsing[tuple[str, str]]:
    """Reads spaces and characters of `spare`, `char` of them; returns them, and the character behind them."""
    skipped = ""
    while char and (char.isspace() or char in spare):
        skipped += char
        char = yield
    return skipped, char


def optional(end: str, char: str, spare: str = "") -> Parsing[str]:
    """Reads spaces, characters of `spare` and the tag `end`, `char` of them. If something else comes, returns what was
    read, without those of `spare` on the first line.
    """
    skipped, char = yield from skip(spare, char)
    if not char:
        return "".join(one for one in skipped if one not in spare)
    try:
        yield from literal([end], char)
    except Malformed as error:
        line, line_break, others = skipped.partition("\n")
        return "".join(one for one in line if one not in spare) + line_break + others + error.rest
    return ""


def json_value(first: str, write: Write) -> Parsing[str]:
    """Passes on the value that begins with `first`, and returns the character after it.

    Brackets are counted and strings followed; whether it is JSON otherwise, `parsed` says of the whole.
    """
    if first == '"':
        yield from json_string(write)
        return (yield)
    if first in OPENING:
        yield from _json_inside(first, write)
        return (yield)
    if first not in SCALAR:
        raise Malformed(first)
    while first in SCALAR:
        write(first)
        first = yield
    return first


def _json_inside(first: str, write: Write) -> Parsing[None]:
    write(first)
    depth = 1
    while depth:
        char = yield
        if char == '"':
            yield from json_string(write)
            continue
        if char not in BETWEEN and char not in OPENING and char not in CLOSING:
            raise Malformed(char)
        depth += (char in OPENING) - (char in CLOSING)
        write(char)


def json_string(write: Write) -> Parsing[None]:
    """The string after its opening quote; line breaks that a model forgot to escape are escaped."""
    write('"')
    escaped = False
    while True:
        char = yield
        if not char:
            raise Malformed("")
        write(char if char >= " " else json.dumps(char)[1:-1])
        if char == '"' and not escaped:
            return
        escaped = char == "\\" and not escaped


def parsed(text: str) -> JsonValue:
    """The value of JSON text, and ValueError where there is none; NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def _refuse(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")
