"""Qwen's calls in JSON, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The arguments pass through as they are once the name is known.
"""

from collections.abc import Sequence

from .dialect import Call, Malformed, Parsing, json_string, json_value, literal, optional, parsed, skip, skip_space

END = "</tool_call>"
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")
SPARE = "}"  # models write one too many behind a call, which is skipped


def qwen_json(call: Call, end: str = END) -> Parsing[str]:
    """Parses the text after `<tool_call>{`, up to the tag `end`."""
    char = yield from members(call)
    call.check(char)
    return (yield from optional(end, char, SPARE))


def members(call: Call, key: str = "") -> Parsing[str]:
    """Parses the name and the arguments of a call up to its closing brace, which may be missing before a tag; returns
    the character behind them. `key`: the first key, if it has been read.
    """
    seen = False
    char = '"' if key else (yield from skip_space())
    while char != "}":
        if char != '"':
            raise Malformed(char)
        key = key or (yield from _string())
        yield from literal([":"], (yield from skip_space()))
        if seen and key in ARGUMENTS:
            raise Malformed("")
        char = yield from _member(call, key)
        seen |= key in ARGUMENTS
        key = ""
        char = (yield from skip_space()) if char.isspace() else char
        if char == "<" and seen:  # the closing brace forgotten, the arguments whole
            return char
        if char == ",":
            char = yield from skip_space()
        elif char != "}":
            raise Malformed(char)
    return (yield)


def _member(call: Call, key: str) -> Parsing[str]:
    """The value of one key of the call, and the character after it."""
    first = yield from skip_space()
    if key in NAMES:
        if first != '"':
            raise Malformed(first)
        call.start((yield from _string()))
        return (yield)
    if key in ARGUMENTS:
        return (yield from arguments(call, first))
    return (yield from json_value(first, lambda piece: None))


def arguments(call: Call, first: str) -> Parsing[str]:
    """An object as it is; one that is written as a string, or null or [] for none, is taken for what it means."""
    if first == "{":
        return (yield from json_value(first, call.write))
    pieces: list[str] = []
    char = yield from json_value(first, pieces.append)
    try:
        value = parsed("".join(pieces))
    except ValueError:
        raise Malformed(char) from None
    if value and not isinstance(value, str):
        raise Malformed(char)
    call.write(value or "{}")
    return char


def arguments_before(ends: Sequence[str], call: Call, char: str) -> Parsing[str]:
    """The last part of a call whose name is known: `arguments` that begin with `char`, if any, and one of `ends`, which
    is returned.
    """
    if all(char != end[0] for end in ends):
        char = yield from arguments(call, char)
    _, char = yield from skip(SPARE, char)
    end = yield from literal(ends, char)
    call.check("")
    return end


def last_arguments(call: Call, follower: str, char: str) -> Parsing[str]:
    """The same for a call that needs no end: `arguments`, or nothing before `follower` or the end of the answer.

    Returns the character behind them.
    """
    if char and char != follower[0]:
        char = yield from arguments(call, char)
    call.check(char)
    return char


def without_arguments(call: Call, end: str) -> Parsing[str]:
    """A call whose tag is closed at once, and the tag `end` behind it, if it comes."""
    call.check("")
    return (yield from optional(end, (yield)))


def _string() -> Parsing[str]:
    """The value of a JSON string whose opening quote has been read."""
    pieces: list[str] = []
    yield from json_string(pieces.append)
    try:
        return str(parsed("".join(pieces)))
    except ValueError:
        raise Malformed("") from None
