"""Reads a model's answer as it comes: reasoning, text, and calls of the declared tools.

Every character is read by itself, so the events put together do not depend on how the text was cut. A call that turns
out to be none is given back as the text it is; if its start had been announced, there will be no `CallEnd` for it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..channels import END, START
from ..events import CallDelta, CallEnd, CallStart, Event, Reasoning, Text
from .call import Call
from .dialect import Body, Dialect
from .steps import Malformed, Steps


class AnswerReader:
    """Args:
    dialect: how the model calls tools; None reads no calls.
    tools: the declared ones, {"type": "function", "function": {"name", "parameters"}}; none reads no calls.
    inside_reasoning: the prompt has already opened the reasoning.
    parallel: False stops reading after the first call.

    Attributes:
        done: nothing more will be read, so generation can end.
        calls: how many calls were whole.
    """

    def __init__(
        self,
        dialect: Dialect | None,
        tools: Sequence[Mapping[str, Any]] = (),
        inside_reasoning: bool = False,
        parallel: bool = True,
    ):
        self.done, self.calls = False, 0
        self._inside, self._parallel = inside_reasoning, parallel
        self._schemas = schemas_of(tools)
        self._dialect = dialect if self._schemas else None
        self._events: list[Event] = []
        self._again: deque[str] = deque()
        self._started = 0
        self._held, self._spaces = "", ""
        self._leading = inside_reasoning  # line breaks after a tag of reasoning are part of it
        self._after_call = False
        self._markers = self._awaited()
        self._body: Steps[str] | None = None
        self._raw = ""

    def feed(self, text: str) -> list[Event]:
        """What is certain by now, pieces of the same kind put together."""
        self._read(text)
        return self._taken()

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest. `cut`: a limit ended the answer, so a call that is not whole but announced is dropped."""
        while self._body is not None:
            announced = bool(self._call.name)
            rest = self._at_end(self._body)
            if rest is None and cut and announced:
                self._body = None
            elif rest is None:
                self._give_back("")
                self._read("")
            else:
                self._end_call(rest)
                self._read("")
        self._say(self._held)
        self._held = ""
        if not self._inside and not self._after_call:
            self._flush_spaces()
        return self._taken()

    def _read(self, text: str) -> None:
        self._again.extend(text)
        while self._again and not self.done:
            char = self._again.popleft()
            if self._body is None:
                self._read_text(char)
            else:
                self._read_call(self._body, char)

    def _read_text(self, char: str) -> None:
        self._held += char
        while self._held and not any(marker.startswith(self._held) for marker in self._markers):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held in self._markers:
            marker, self._held = self._held, ""
            body = self._markers[marker]
            if body is None:
                self._switch()
            else:
                self._open_call(marker, body)

    def _switch(self) -> None:
        """From reasoning to the answer, or back."""
        if self._inside:
            self._spaces = ""
        self._flush_spaces()
        self._inside, self._leading = not self._inside, True
        self._markers = self._awaited()

    def _awaited(self) -> dict[str, Body | None]:
        """The tags that mean something here; those without a parser begin or end reasoning."""
        tag: dict[str, Body | None] = {END if self._inside else START: None}
        if self._dialect is None:
            return tag
        return tag | self._dialect.openings | ({} if self._inside else self._dialect.bare)

    def _say(self, text: str) -> None:
        """Reasoning or text; spaces wait, because those before a call and at the end of reasoning are layout."""
        for char in text:
            if char == "\n" and self._leading:
                continue
            if char.isspace():
                self._spaces += char
                continue
            self._flush_spaces()
            self._leading = self._after_call = False
            self._events.append(Reasoning(char) if self._inside else Text(char))

    def _flush_spaces(self) -> None:
        if self._spaces:
            self._events.append(Reasoning(self._spaces) if self._inside else Text(self._spaces))
        self._spaces = ""

    def _open_call(self, marker: str, body: Body) -> None:
        self._call = Call(self._started, self._schemas, self._events.append)
        self._raw, self._body = marker, body(self._call)
        next(self._body)

    def _read_call(self, body: Steps[str], char: str) -> None:
        self._raw += char
        try:
            body.send(char)
        except StopIteration as end:
            self._end_call(end.value)
        except Malformed as fault:
            self._give_back(fault.rest)
        if self._call.name:
            self._started = self._call.index + 1

    def _end_call(self, rest: str) -> None:
        self._call.end(self._raw.removesuffix(rest))
        self._started = self._call.index + 1
        self._again.extendleft(reversed(rest))
        self._body, self._spaces, self._after_call = None, "", True
        self.calls += 1
        self.done = not self._parallel

    def _give_back(self, rest: str) -> None:
        self._body = None
        self._say(self._raw.removesuffix(rest))
        self._again.extendleft(reversed(rest))

    def _at_end(self, body: Steps[str]) -> str | None:
        """What a call that the end of the text makes whole has read too far; None if it is not whole."""
        try:
            body.send("")
        except StopIteration as end:
            return str(end.value)
        except Malformed:
            pass
        body.close()
        return None

    def _taken(self) -> list[Event]:
        taken, self._events[:] = merged(self._events), []
        return taken


def merged(events: Sequence[Event]) -> list[Event]:
    """The events with neighbours of one kind put together."""
    whole: list[Event] = []
    for _, group in groupby(events, _kind):
        first, *others = group
        if others and not isinstance(first, (CallStart, CallEnd)):
            pieces = [first.text, *(other.text for other in others if isinstance(other, type(first)))]
            whole.append(replace(first, text="".join(pieces)))
        else:
            whole += [first, *others]
    return whole


def _kind(event: Event) -> tuple[type, int]:
    return type(event), event.index if isinstance(event, CallDelta) else 0


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON schema of the parameters; {} where a tool has none."""
    functions = [tool.get("function") or tool for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
