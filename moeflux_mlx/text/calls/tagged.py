"""Parameters of a call in tags of their own, typed by the tool's schema.

Strings pass through, escaped, as they come; any other value is given out whole. A value ends where its closing tag is
followed by another tag of the call, so a lone closing tag inside it does no harm.
"""

import json
from dataclasses import dataclass

from .call import Call
from .schema import JSON_TYPES, STRING, as_json, is_text, parameter_types
from .steps import Malformed, Steps, Write, literal, skip_space, until


@dataclass(frozen=True)
class Tags:
    """The text of a parameter is `key[0] KEY key[1] value[0] VALUE value[1]`, with spaces between any of them.

    Attributes:
        key, value: what opens and closes each; where `key[1]` opens the value, `value[0]` is empty.
        ends: what may follow the last parameter.
        lined: a value stands on lines of its own, so the line breaks round it are no part of it.
        kinds: where the writer says which a value is, what opens a string and what opens JSON, in place of `value[0]`.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    ends: tuple[str, ...]
    lined: bool = False
    kinds: tuple[str, str] | None = None


def parameters(call: Call, tags: Tags, held: str = "") -> Steps[str]:
    """Reads parameters up to one of `tags.ends`, and returns that; `held` has been read of the first tag."""
    tag = yield from literal([tags.key[0], *tags.ends], held or (yield from skip_space()))
    before = "{"
    while tag == tags.key[0]:
        key = (yield from until(tags.key[1])).strip()
        if tags.value[0]:
            yield from literal([tags.value[0]], (yield from skip_space()))
        call.write(before + json.dumps(key, ensure_ascii=False) + ": ")
        tag = yield from _parameter(call, key, tags)
        before = ", "
    if before != "{":
        call.write("}")
    call.check("")
    return tag


def _parameter(call: Call, key: str, tags: Tags) -> Steps[str]:
    """A value; returns the tag that follows its own closing tag."""
    types = parameter_types(key, call.schema)
    is_string = is_text(types)
    if tags.kinds is not None:
        is_string = (yield from literal(tags.kinds)) == tags.kinds[0]
        types = types - STRING or JSON_TYPES
    if not is_string:
        pieces: list[str] = []
        tag = yield from _value(pieces.append, tags)
        call.write(as_json("".join(pieces), types))
        return tag
    call.write('"')
    tag = yield from _value(lambda piece: call.write(json.dumps(piece, ensure_ascii=False)[1:-1]), tags)
    call.write('"')
    return tag


def _value(write: Write, tags: Tags) -> Steps[str]:
    """Passes on a value, where it is lined without one line break before and one after it."""
    held = yield
    if held == "\n" and tags.lined:
        held = yield
    while not (tag := _follower(held, tags)):
        while held and not _may_end(held, tags):
            write(held[0])
            held = held[1:]
        char = yield
        if not char:
            raise Malformed("")
        held += char
    return tag


def _ending(held: str, tags: Tags) -> str:
    return held.removeprefix("\n") if tags.lined else held


def _follower(held: str, tags: Tags) -> str:
    """The tag at the end of `held`, if all before it is a closing tag and spaces."""
    text, end = _ending(held, tags), tags.value[1]
    after = text[len(end) :].lstrip()
    return after if text.startswith(end) and after in (tags.key[0], *tags.ends) else ""


def _may_end(held: str, tags: Tags) -> bool:
    """Whether `held` may be the beginning of what ends a value."""
    text, end = _ending(held, tags), tags.value[1]
    if not text.startswith(end):
        return end.startswith(text)
    return any(tag.startswith(text[len(end) :].lstrip()) for tag in (tags.key[0], *tags.ends))
