"""Parameters of a call in tags of their own, typed by the tool's schema.

A string passes through, escaped, as it comes; any other value is given out whole. A value ends where its closing tag is
followed by another tag of the call, so a lone closing tag inside it does no harm. If a parameter comes twice, its first
value counts.

If a value holds what may be a tag of the call behind a missing or misspelt closing tag, nothing more is given out until
the call has ended; then `repair` says which tags were the call's.
"""

import json
from dataclasses import replace

from .dialect import Call, Malformed, Parsing, Tags, Write, literal, optional, skip_space, until_one
from .json_form import arguments_before
from .repair import Repair, ValuePlace
from .schema import JSON_TYPES, STRING, TypedText, ValueShape, as_json

LOOK_BACK = 1024  # characters in which the end of a call and the beginning of the next stand


def parameters(call: Call, tags: Tags, held: str = "") -> Parsing[str]:
    """Reads parameters up to the end of the call, `held` of the first tag; returns what it read too far."""
    reading = _Parameters(call, tags)
    try:
        tag = yield from reading.read(held)
    except Malformed:
        rest = reading.settle(is_closed=False)
        if rest is None:
            raise
    else:
        rest = reading.settle(is_closed=True)
        call.check("")
    if rest is not None:
        return rest
    return (yield from optional(tags.after, (yield))) if tags.after and tag != tags.after else ""


class _Parameters:
    """The parameters of one call while they are read."""

    def __init__(self, call: Call, tags: Tags):
        self._call, self._tags = call, tags
        self._shape = ValueShape(call.schema, call.schema)
        self._spans: list[ValuePlace] = []
        self._begins_lines = False
        self._repair: Repair | None = None  # where there is doubt
        self._followers = (tags.key[0], *tags.ends)  # what may follow a closing tag
        self._begins = frozenset({"\n", tags.value[1][0], *(tag[0] for tag in self._followers)})

    def read(self, held: str) -> Parsing[str]:
        """Reads all parameters strictly, and returns the tag that ends the call."""
        held = held or (yield from skip_space())
        if held == "{":  # the arguments as JSON, though they should be in tags
            return (yield from arguments_before(self._tags.ends, self._call, held))
        tag = yield from literal(self._followers, held)
        self._begins_lines = "".join(self._call.raw).removesuffix(tag).rstrip(" \t").endswith("\n")
        while tag == self._tags.key[0]:
            tag = yield from self._parameter()
        if self._spans:
            self._call.write("}")
        return tag

    def settle(self, is_closed: bool) -> str | None:
        """Decides where there was doubt, and returns what has been read behind the call; None if that is nothing, or
        the call is incomplete.
        """
        if self._repair is None:
            return None
        text = "".join(self._call.raw)
        spans, stop = self._repair.ended(text, self._spans, is_closed)
        if stop is None and not is_closed:
            return None
        values: dict[str, str] = {}
        for span in self._repair.split(text, spans):
            values.setdefault(span.key, as_json(text[span.start : span.stop], self._types(span.key, span.kind)))
        self._call.settle("{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in values.items()) + "}")
        return None if stop is None else text[stop:]

    def _parameter(self) -> Parsing[str]:
        """Reads the parameter behind `key[0]`, and returns the tag that follows its closing tag."""
        key, has_line = yield from self._key()
        kind = (yield from literal(self._tags.kinds)) if self._tags.kinds else ""
        if any(span.key == key for span in self._spans):
            return (yield from self._value(key, kind, has_line, lambda piece: None))
        self._call.write((", " if self._spans else "{") + _quoted(key) + ": ")
        value = TypedText(self._call.write, self._types(key, kind))
        tag = yield from self._value(key, kind, has_line, value.add)
        value.end()
        return tag

    def _key(self) -> Parsing[tuple[str, bool]]:
        """A key up to its value, and whether its line ended before the tag did, which is accepted of a known key."""
        closing, opening = self._tags.key[1], self._tags.value[0]
        broken = closing[:-1] + "\n"
        text, end = yield from until_one([closing, broken, *filter(None, [opening])])
        key = self._tags.unescaped(text.strip())
        if end != closing and key not in self._shape.keys:
            raise Malformed("")
        if opening and end != opening:
            yield from literal([opening], (yield from skip_space()))
        return key, end == broken

    def _value(self, key: str, kind: str, has_line: bool, write: Write) -> Parsing[str]:
        """Passes on a value, where it is lined without one line break before and one after it."""
        raw, held = self._call.raw, ""
        char = yield
        if char == "\n" and self._tags.lined and not has_line:
            char = yield
        span = ValuePlace(key, kind, len(raw) - len(char), len(raw))
        self._spans.append(span)
        tag, is_first = "", True
        while not tag:
            if not char or self._has_next():
                self._spans[-1] = replace(span, stop=len(raw))
                raise Malformed("")
            held += char
            if is_first or held[0] in self._begins:
                tag = self._follower(held)
                self._look(held, is_first)
            while held and not (tag or self._may_end(held, is_first)):
                write(held[0])
                held, is_first = held[1:], False
            char = "" if tag else (yield)
        self._spans[-1] = replace(span, stop=len(raw) - len(held))
        return tag

    def _look(self, held: str, is_first: bool) -> None:
        """Begins to doubt if `held` may be a tag of the call whose closing tag is missing or misspelt."""
        if self._repair is None and self._is_doubtful(held, is_first):
            self._repair = Repair(self._tags, self._shape.keys, self._call.names, self._begins_lines)
            self._call.hold()

    def _has_next(self) -> bool:
        """Whether another call has begun behind a value that was not closed."""
        raw = self._call.raw
        if self._repair is None or not any(tag.endswith(raw[-1]) for tag in self._followers):
            return False
        last = "".join(raw[-LOOK_BACK:])
        return last.endswith(self._followers) and self._repair.has_next(last)

    def _follower(self, held: str) -> str:
        """The tag at the end of `held`, if all before it is a closing tag and spaces."""
        text, end = self._ending(held), self._tags.value[1]
        after = text[len(end) :].lstrip()
        return after if text.startswith(end) and after in self._followers else ""

    def _may_end(self, held: str, is_first: bool) -> bool:
        """Whether `held` may be the beginning of what ends a value, or of what could be meant to."""
        text, end = self._ending(held), self._tags.value[1]
        if text.startswith(end):
            return any(tag.startswith(text[len(end) :].lstrip()) for tag in self._followers)
        line = _in_line(held, is_first)
        return end.startswith(text) or any(tag.startswith(line) for tag in self._followers)

    def _is_doubtful(self, held: str, is_first: bool) -> bool:
        """Whether `held` is a tag of the call without a closing tag before it, or ends in a tag that is misspelt."""
        line, end = _in_line(held, is_first), self._tags.value[1]
        tag = line[len(end) :].lstrip() if line.startswith(end) else line
        return line in self._followers or any(tag[:-1] == one[:-1] and tag != one for one in (end, *self._tags.ends))

    def _ending(self, held: str) -> str:
        return held.removeprefix("\n") if self._tags.lined else held

    def _types(self, key: str, kind: str) -> frozenset[str]:
        types = self._shape.inner(key).types
        if self._tags.kinds is None:
            return types
        return STRING if kind == self._tags.kinds[0] else types - STRING or JSON_TYPES


def _in_line(held: str, is_first: bool) -> str:
    """`held` without the line break and the indent before it; `is_first`: nothing of its value stands before it."""
    return held.lstrip() if is_first or held.startswith("\n") else held


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
