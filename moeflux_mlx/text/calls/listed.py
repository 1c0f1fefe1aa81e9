"""Calls as a list in JSON between two tags, or one call alone."""

from .call import Call
from .dialect import CallBody
from .json_form import SPARE, members
from .steps import Malformed, Parsing, optional, skip, skip_space


def bodies(end: str) -> tuple[CallBody, CallBody]:
    """What parses the text after the tag that begins calls, and after a comma behind a call; `end` may follow the
    last.
    """

    def first(call: Call) -> Parsing[str]:
        char = yield from skip_space()
        if char == "[":
            char = yield from skip_space()
        return (yield from _one(call, char, end))

    def another(call: Call) -> Parsing[str]:
        return (yield from _one(call, (yield from skip_space()), end))

    return first, another


def _one(call: Call, char: str, end: str) -> Parsing[str]:
    if char != "{":
        raise Malformed(char)
    char = yield from members(call)
    call.check(char)
    _, char = yield from skip(SPARE, char)
    if char == ",":
        return char
    return (yield from optional(end, (yield) if char == "]" else char))
