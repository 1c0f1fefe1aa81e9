"""Finds the parameters of a call whose tags have small faults: a closing tag that is missing or misspelt.

    <parameter=path>            read strictly: {"path": "a.py\n<parameter=limit>\n3"}
    a.py                        repaired:      {"path": "a.py", "limit": 3}
    <parameter=limit>
    3
    </parameter>

A tag inside a value is one of the call if it names a parameter that has no other value, and begins a line where the
call's tags do. Whatever does not look like that stays part of the value.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from .tags import Tags


@dataclass(frozen=True)
class Span:
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
    text: of the call.
    tags: how it is written.
    keys: the parameters that the tool's schema names.
    names: the declared tools.
    is_lined: the call's tags begin lines.
    """

    def __init__(self, text: str, tags: Tags, keys: Collection[str], names: Collection[str], is_lined: bool):
        self._text, self._tags = text, tags
        line, anywhere = r"(?:^|\n)[ \t]*", r"(?:\n[ \t]*)?"
        broken = ("\n?" if tags.lined else "") + rf"{re.escape(tags.value[1][:-1])}/?>?\s*"
        after = rf"(?:\s*{re.escape(tags.after)})?" if tags.after else ""
        self._end = rf"(?:{broken}|{line if tags.lined else anywhere})(?:{_any(tags.ends)}){after}"
        next_call = rf"\s*(?:(?:{_any(tags.opens)})\s*)+(?:{_any(names)})\b[^\n]*?\s*{re.escape(tags.key[0])}"
        self._last_end = rf"{self._end}(?={next_call})"
        self._opening = rf"(?:{broken}|{line if is_lined else anywhere}){_opening(tags, keys)}"

    def ended(self, spans: Sequence[Span], is_closed: bool) -> tuple[Sequence[Span], int | None]:
        """The spans up to where the call ends, and the place behind that; None if it ended where it was closed, or has
        not ended.

        A value ends before the first tag that may end a call and that another call with parameters follows, or, if it
        was not closed, before the last that may end one.
        """
        for n, span in enumerate(spans):
            text = self._text[span.start : span.stop]
            ends = list(re.finditer(self._last_end, text))[:1]
            if not ends and span is spans[-1] and not is_closed:
                ends = list(re.finditer(self._end, text))[-1:]
            for end in ends:
                stopped = replace(span, stop=span.start + end.start())
                return [*spans[:n], stopped], span.start + end.end()
        return spans, None

    def split(self, spans: Sequence[Span]) -> list[Span]:
        """The spans, and those that were opened inside their values."""
        parts: list[Span] = []
        for n, span in enumerate(spans):
            given = {other.key for other in (*parts, *spans[n:])}
            parts += self._split(span, given)
        return parts

    def _split(self, span: Span, given: set[str]) -> list[Span]:
        text = self._text[span.start : span.stop]
        openings = list(re.finditer(self._opening, text))
        parts = [span]
        for opening, after in zip_longest(openings, openings[1:]):
            key, stop = opening["key"], after.start() if after else None
            # A lone closing tag behind it means that a whole parameter is part of the value.
            if key in given or self._tags.value[1] in text[opening.end() : stop]:
                continue
            given.add(key)
            start = span.start + opening.end()
            parts[-1] = replace(parts[-1], stop=span.start + opening.start())
            parts.append(Span(key, opening.groupdict().get("kind") or "", start, span.stop))
        return parts


def _any(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"


def _opening(tags: Tags, keys: Collection[str]) -> str:
    """The regular expression of a tag that opens one of `keys`, up to the value."""
    named = rf"{re.escape(tags.key[0])}\s*(?P<key>{_any(sorted(keys, key=len, reverse=True))})\s*"
    closing, most_of_it = re.escape(tags.key[1]), re.escape(tags.key[1][:-1])
    if tags.kinds is not None:
        return rf"{named}{closing}(?P<kind>{_any(tags.kinds)})"
    if tags.value[0]:
        return rf"{named}(?:{most_of_it}>?)?\s*{re.escape(tags.value[0])}"
    return rf"{named}(?:{closing}|{most_of_it}(?=\n))" + (r"[ \t]*\n" if tags.lined else "")
