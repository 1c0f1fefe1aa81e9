"""Qwen's calls in tags, `<function=NAME><parameter=KEY>value</parameter></function>`, typed by the tool's schema.

Strings pass through, escaped, as they come; any other value is given out whole. A value ends where its closing tag is
followed by another tag of the call, so a lone closing tag inside it does no harm.
"""

import json

from .call import Call
from .schema import as_json, is_text, parameter_types
from .steps import Malformed, Steps, Write, literal, optional, skip_space, until

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
END = "</tool_call>"
FOLLOWERS = (PARAMETER, END_FUNCTION, END)


def qwen_xml(call: Call) -> Steps[str]:
    """What follows `<function=`."""
    call.start((yield from until(">")).strip())
    tag = yield from literal([PARAMETER, END_FUNCTION], (yield from skip_space()))
    before = "{"
    while tag == PARAMETER:
        key = (yield from until(">")).strip()
        call.write(before + json.dumps(key, ensure_ascii=False) + ": ")
        tag = yield from _parameter(call, key)
        before = ", "
    if before != "{":
        call.write("}")
    call.check("")
    return "" if tag == END else (yield from optional(END, (yield)))


def _parameter(call: Call, key: str) -> Steps[str]:
    """A value; returns the tag that follows its own closing tag."""
    types = parameter_types(key, call.schema)
    if not is_text(types):
        pieces: list[str] = []
        tag = yield from _value(pieces.append)
        call.write(as_json("".join(pieces), types))
        return tag
    call.write('"')
    tag = yield from _value(lambda piece: call.write(json.dumps(piece, ensure_ascii=False)[1:-1]))
    call.write('"')
    return tag


def _value(write: Write) -> Steps[str]:
    """Passes on a value without one line break before and one after it."""
    held = yield
    if held == "\n":
        held = yield
    while not (tag := _follower(held)):
        while held and not _may_end(held):
            write(held[0])
            held = held[1:]
        char = yield
        if not char:
            raise Malformed("")
        held += char
    return tag


def _follower(held: str) -> str:
    """The tag at the end of `held`, if all before it is a closing tag and spaces."""
    if len(held) <= len(END_PARAMETER):
        return ""
    text = held.removeprefix("\n")
    after = text[len(END_PARAMETER) :].lstrip()
    return after if text.startswith(END_PARAMETER) and after in FOLLOWERS else ""


def _may_end(held: str) -> bool:
    """Whether `held` may be the beginning of what ends a value."""
    if held[0] not in "\n<":
        return False
    text = held.removeprefix("\n")
    if not text.startswith(END_PARAMETER):
        return END_PARAMETER.startswith(text)
    return any(tag.startswith(text[len(END_PARAMETER) :].lstrip()) for tag in FOLLOWERS)
