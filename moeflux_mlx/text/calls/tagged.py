"""Parameters of a call in tags of their own, typed by the tool's schema.

A string passes through, escaped, as it comes; any other value is given out whole. A value ends where its closing tag is
followed by another tag of the call, so a lone closing tag inside it does no harm. If a parameter comes twice, its first
value counts.

If a value holds what may be a tag of the call behind a missing or misspelt closing tag, nothing more is given out until
the call has ended; then `repair` says which tags were the call's.
"""

import json
from dataclasses import replace

from .call import Call
from .repair import Repair, Span
from .schema import STRING, keys_of, parameter_types
from .steps import Malformed, Steps, Write, literal, optional, skip_space, until_one
from .tags import Tags
from .typed import JSON_TYPES, TypedText, as_json


def parameters(call: Call, tags: Tags, held: str = "") -> Steps[str]:
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
        self._keys = keys_of(call.schema, call.schema)
        self._spans: list[Span] = []
        self._begins_lines = self._in_doubt = False

    def read(self, held: str) -> Steps[str]:
        """Reads all parameters strictly, and returns the tag that ends the call."""
        tag = yield from literal(self._followers, held or (yield from skip_space()))
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
        if not self._in_doubt:
            return None
        text = "".join(self._call.raw)
        repair = Repair(text, self._tags, self._keys, self._call.names, self._begins_lines)
        spans, stop = repair.ended(self._spans, is_closed)
        if stop is None and not is_closed:
            return None
        values: dict[str, str] = {}
        for span in repair.split(spans):
            values.setdefault(span.key, as_json(text[span.start : span.stop], self._types(span.key, span.kind)))
        self._call.settle("{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in values.items()) + "}")
        return None if stop is None else text[stop:]

    def _parameter(self) -> Steps[str]:
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

    def _key(self) -> Steps[tuple[str, bool]]:
        """A key up to its value, and whether its line ended before the tag did, which is accepted of a known key."""
        closing, opening = self._tags.key[1], self._tags.value[0]
        broken = closing[:-1] + "\n"
        text, end = yield from until_one([closing, broken, *filter(None, [opening])])
        key = text.strip()
        if end != closing and key not in self._keys:
            raise Malformed("")
        if opening and end != opening:
            yield from literal([opening], (yield from skip_space()))
        return key, end == broken

    def _value(self, key: str, kind: str, has_line: bool, write: Write) -> Steps[str]:
        """Passes on a value, where it is lined without one line break before and one after it."""
        raw, held = self._call.raw, ""
        char = yield
        if char == "\n" and self._tags.lined and not has_line:
            char = yield
        span = Span(key, kind, len(raw) - len(char), len(raw))
        self._spans.append(span)
        while True:
            self._spans[-1] = replace(span, stop=len(raw))
            if not char:
                raise Malformed("")
            held += char
            if tag := self._follower(held):
                break
            if not self._in_doubt and self._is_doubtful(held):
                self._in_doubt = True
                self._call.hold()
            while held and not self._may_end(held):
                write(held[0])
                held = held[1:]
            char = yield
        self._spans[-1] = replace(span, stop=len(raw) - len(held))
        return tag

    @property
    def _followers(self) -> tuple[str, ...]:
        """What may follow a closing tag."""
        return (self._tags.key[0], *self._tags.ends)

    def _follower(self, held: str) -> str:
        """The tag at the end of `held`, if all before it is a closing tag and spaces."""
        text, end = self._ending(held), self._tags.value[1]
        after = text[len(end) :].lstrip()
        return after if text.startswith(end) and after in self._followers else ""

    def _may_end(self, held: str) -> bool:
        """Whether `held` may be the beginning of what ends a value, or of what could be meant to."""
        text, end = self._ending(held), self._tags.value[1]
        if text.startswith(end):
            return any(tag.startswith(text[len(end) :].lstrip()) for tag in self._followers)
        return end.startswith(text) or any(tag.startswith(_in_line(held)) for tag in self._followers)

    def _is_doubtful(self, held: str) -> bool:
        """Whether `held` is a tag of the call without a closing tag before it, or a closing tag that is misspelt."""
        text, end = _in_line(held), self._tags.value[1]
        return text in self._followers or (text[:-1] == end[:-1] and text != end)

    def _ending(self, held: str) -> str:
        return held.removeprefix("\n") if self._tags.lined else held

    def _types(self, key: str, kind: str) -> frozenset[str]:
        types = parameter_types(key, self._call.schema)
        if self._tags.kinds is None:
            return types
        return STRING if kind == self._tags.kinds[0] else types - STRING or JSON_TYPES


def _in_line(held: str) -> str:
    """`held` without the line break and the indent before it."""
    return held.lstrip() if held.startswith("\n") else held


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
