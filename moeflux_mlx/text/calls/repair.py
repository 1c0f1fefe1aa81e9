"""Finds the parameters of a call whose tags have small faults: a closing tag that is missing or misspelt.

    <parameter=path>            read strictly: {"path": "a.py\n<parameter=limit>\n3"}
    a.py                        repaired:      {"path": "a.py", "limit": 3}
    <parameter=limit>
    3
    </parameter>

A tag inside a value belongs to the call if it names a parameter that has no other value, and begins a line where the
call's tags do. All other text stays part of the value.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from .dialect import Tags


@dataclass(frozen=True)
class ValuePlace:
    """A parameter in the text of a call.

    Attributes:
        key: its name.
        kind: what opened its value, one of `Tags.kinds`, or "".
        start, stop: the value's place.
    """

    key: str
    kind: str
    start: int
    stop: int


class Repair:
    """Args:
    tags: how the call is written.
    keys: the parameters that the tool's schema names.
    names: the declared tools.
    is_lined: the call's tags begin lines.
    """

    def __init__(self, tags: Tags, keys: Collection[str], names: Collection[str], is_lined: bool):
        self._closing, self._unescaped = tags.value[1], tags.unescaped
        line, anywhere = r"(?:^|\n)[ \t]*", r"(?:\n[ \t]*)?"
        broken = ("\n?" if tags.lined else "") + rf"{_misspelt(tags.value[1])}\s*"
        ends = "|".join(map(_misspelt, tags.ends))
        after = rf"(?:\s*{re.escape(tags.after)})?" if tags.after else ""
        self._end = rf"(?:{broken}|{line if tags.lined else anywhere})(?:{ends}){after}"
        called = rf"(?:(?:{_any(tags.opens)})\s*)+(?:{_any(map(tags.escaped, names))})\b"
        begun = rf"{called}[^\n]*?\s*(?:{_any((tags.key[0], *tags.ends))})"
        self._end_before_call = rf"{self._end}(?=\s*{begun})"
        self._opening = rf"(?:{broken}|{line if is_lined else anywhere}){_opening(tags, keys)}"

    def has_next(self, text: str) -> bool:
        """Whether `text`, the last of a value, ends with the beginning of another call behind the end of this one."""
        return re.search(self._end_before_call, text) is not None

    def ended(self, text: str, spans: Sequence[ValuePlace], is_closed: bool) -> tuple[Sequence[ValuePlace], int | None]:
        """The spans of the call's `text` up to its end, and the place behind that; None if it ended where it was
        closed, or has not ended.

        A value ends before the first tag that may end a call and that another call follows, or, if it was not closed,
        before the last that may end one.
        """
        for n, span in enumerate(spans):
            value = text[span.start : span.stop]
            end = re.search(self._end_before_call, text[span.start :])
            if end is None and span is spans[-1] and not is_closed:
                end = next(reversed([*re.finditer(self._end, value)]), None)
            if end is not None and end.start() < len(value):
                return [*spans[:n], replace(span, stop=span.start + end.start())], span.start + end.end()
        return spans, None

    def split(self, text: str, spans: Sequence[ValuePlace]) -> list[ValuePlace]:
        """The spans, and those that were opened inside their values."""
        parts: list[ValuePlace] = []
        for n, span in enumerate(spans):
            given = {other.key for other in (*parts, *spans[n:])}
            parts += self._split(text, span, given)
        return parts

    def _split(self, text: str, span: ValuePlace, given: set[str]) -> list[ValuePlace]:
        length = span.stop - span.start
        with_closing = text[span.start : span.stop + len(self._closing) + 1]
        openings = [one for one in re.finditer(self._opening, with_closing) if one.end() <= length]
        parts = [span]
        for opening, after in zip_longest(openings, openings[1:]):
            key, stop = self._unescaped(opening["key"]), after.start() if after else length
            # A lone closing tag behind it means that a whole parameter is part of the value.
            if key in given or self._closing in with_closing[opening.end() : stop]:
                continue
            given.add(key)
            start = span.start + opening.end()
            parts[-1] = replace(parts[-1], stop=span.start + opening.start())
            parts.append(ValuePlace(key, opening.groupdict().get("kind") or "", start, span.stop))
        return parts


def _any(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"


def _misspelt(tag: str) -> str:
    """The regular expression of a tag that may also end in "/>" or lack its ">"."""
    return rf"{re.escape(tag[:-1])}/?>?"


def _opening(tags: Tags, keys: Collection[str]) -> str:
    """The regular expression of a tag that opens one of `keys`, up to the value."""
    written = sorted(map(tags.escaped, keys), key=len, reverse=True)
    named = rf"{re.escape(tags.key[0])}\s*(?P<key>{_any(written)})\s*"
    closing, most_of_it = re.escape(tags.key[1]), re.escape(tags.key[1][:-1])
    if tags.kinds is not None:
        return rf"{named}{closing}(?P<kind>{_any(tags.kinds)})"
    if tags.value[0]:
        return rf"{named}(?:{most_of_it}>?)?\s*{re.escape(tags.value[0])}"
    if not tags.lined:
        return rf"{named}(?:{closing}|{most_of_it}(?=\n))"
    return rf"{named}(?:(?:{closing})?[ \t]*\n|{closing}(?=[^\n]*{re.escape(tags.value[1])}))"
