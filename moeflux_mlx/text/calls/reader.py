"""Reads a model's answer while it is generated: reasoning, text, and calls of the declared tools.

It reads one character at a time, so the joined events do not depend on how the text was cut. An invalid call is
returned as text; if its start had been announced, it gets no `CallEnd`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ...files import JsonObject
from ..channels import HARMONY, INKLING, MUSE, SOLAR, THINK, Channels
from ..events import CallDelta, CallEnd, CallStart, Event, Reasoning, Text
from .dialect import Call, CallBody, Dialect, Malformed, Parsing, Switched
from .harmony import GPT_OSS
from .inkling import INKLING_JSON
from .muse import MUSE_SPARK
from .solar import SOLAR_OPEN

# The readers of messages' headers.
HEADERS: dict[Channels, Dialect] = {HARMONY: GPT_OSS, SOLAR: SOLAR_OPEN, INKLING: INKLING_JSON, MUSE: MUSE_SPARK}


class AnswerReader:
    """Args:
    dialect: how the model calls tools; None reads no calls.
    tools: the declared ones, {"type": "function", "function": {"name", "parameters"}}; none reads no calls.
    inside_reasoning: the prompt has already opened the reasoning.
    parallel: False stops reading after the first call.
    channels: how the model marks its reasoning.

    Attributes:
        done: nothing more will be read, so generation can end.
        calls: number of complete calls.
    """

    def __init__(
        self,
        dialect: Dialect | None,
        tools: Sequence[JsonObject] = (),
        inside_reasoning: bool = False,
        parallel: bool = True,
        channels: Channels = THINK,
    ):
        self.done, self.calls = False, 0
        self._inside, self._parallel = inside_reasoning, parallel
        self._schemas = schemas_of(tools)
        self._channels = channels
        # The headers of messages are no text, whether or not they may open a call.
        self._dialect = HEADERS.get(channels, dialect if self._schemas else None)
        self._events: list[Event] = []
        self._started = 0
        self._held, self._spaces = "", ""
        self._spacing = 0  # how many characters of the answer became `_spaces`
        self._leading = inside_reasoning  # line breaks after a tag of reasoning are part of it
        self._after_call = False
        self._said: set[bool] = set()  # whether there has been reasoning, or text
        self._markers = self._awaited()
        self._body: Parsing[str] | None = None
        if self._dialect is not None and self._dialect.first is not None and not inside_reasoning:
            self._open_call("", self._dialect.first)

    @property
    def held(self) -> int:
        """How many of the last characters are still in no event, but may be."""
        return len(self._held) + self._spacing + (len(self._call.raw) if self._body is not None else 0)

    def feed(self, text: str) -> list[Event]:
        """Reads `text`; returns the events that are certain, with pieces of the same kind joined."""
        self._read(text)
        return self._taken()

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. `cut`: a limit ended the answer, so an incomplete call is dropped."""
        while self._body is not None:
            announced, self._call.is_cut = bool(self._call.name), cut
            try:
                rest = self._at_end(self._body)
            except Switched:
                self._body = None
                break
            if rest is None and cut and announced:
                self._body = None
            else:
                self._read(self._give_back("") if rest is None else self._end_call(rest))
        self._say(self._held)
        self._held = ""
        if not self._inside and not self._after_call:
            self._flush_spaces()
        return self._taken()

    def _read(self, text: str) -> None:
        """All of `text`, and again what a parser has read too far."""
        at = 0
        while at < len(text) and not self.done:
            plain = 0 if self._held or self._body is not None else self._before_tag(text, at)
            if plain:
                self._say(text[at : at + plain])
                at += plain
                continue
            back = self._read_char(text[at])
            text, at = (back + text[at + 1 :], 0) if back else (text, at + 1)

    def _read_char(self, char: str) -> str:
        """Returns what is to be read again."""
        if self._body is not None:
            return self._read_call(self._body, char)
        self._held += char
        while self._held and not any(marker.startswith(self._held) for marker in self._markers):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held in self._markers:
            marker, self._held = self._held, ""
            body = self._markers[marker]
            if isinstance(body, bool):
                self._switch(body)
            else:
                self._open_call(marker, body)
        return ""

    def _switch(self, inside: bool) -> None:
        """Switches to reasoning or to the answer."""
        if self._inside:
            self._spaces = ""
        self._flush_spaces()
        self._inside, self._leading = inside, True
        self._markers = self._awaited()

    def _begin_message(self, inside: bool) -> str:
        """After a header; a line stays free between two messages of one kind."""
        self._body = None
        self._switch(inside)
        self._spaces = "\n\n" if inside in self._said else ""
        return ""

    def _awaited(self) -> dict[str, CallBody | bool]:
        """The tags that mean something here: those that open a call, and whether reasoning follows the others."""
        tags: dict[str, CallBody | bool] = {**self._channels.switches(self._inside)}
        if self._dialect is not None:
            tags |= {**self._dialect.openings, **({} if self._inside else self._dialect.bare)}
            tags |= self._dialect.following if self._after_call else {}
        self._first = re.compile(f"[{re.escape(''.join({tag[0] for tag in tags}))}]")
        return tags

    def _set_after_call(self, after_call: bool) -> None:
        """Whether a call has just ended."""
        self._after_call = after_call
        if self._dialect is not None and self._dialect.following:
            self._markers = self._awaited()

    def _before_tag(self, text: str, at: int) -> int:
        """How many characters come before one that may begin a tag."""
        first = self._first.search(text, at)
        return (first.start() if first else len(text)) - at

    def _say(self, text: str) -> None:
        """Emits reasoning or text. Spaces wait, because before a call and at the end of reasoning they are layout."""
        core = text.strip()
        before, after = (text[: text.index(core)], text[text.index(core) + len(core) :]) if core else (text, "")
        self._spaces += before.replace("\n", "") if self._leading else before
        self._spacing += len(before)
        if core:
            self._flush_spaces()
            self._leading = False
            self._set_after_call(False)
            self._said.add(self._inside)
            self._events.append(Reasoning(core) if self._inside else Text(core))
        self._spaces += after
        self._spacing += len(after)

    def _flush_spaces(self) -> None:
        if self._spaces:
            self._events.append(Reasoning(self._spaces) if self._inside else Text(self._spaces))
        self._spaces, self._spacing = "", 0

    def _open_call(self, marker: str, body: CallBody) -> None:
        self._call = Call(self._started, self._schemas, self._events.append)
        self._call.raw += marker
        self._marker = marker
        self._body = body(self._call)
        next(self._body)

    def _read_call(self, body: Parsing[str], char: str) -> str:
        self._call.raw.append(char)
        back = ""
        try:
            body.send(char)
        except StopIteration as end:
            back = self._end_call(end.value)
        except Malformed as fault:
            back = self._give_back(fault.rest)
        except Switched as header:
            back = self._begin_message(header.inside)
        if self._call.name:
            self._started = self._call.index + 1
        return back

    def _end_call(self, rest: str) -> str:
        self._call.end(rest)
        self._body, self._spaces, self._spacing = None, "", 0
        self._set_after_call(True)
        self.calls += 1
        self.done = not self._parallel
        return rest

    def _give_back(self, rest: str) -> str:
        self._body, raw = None, "".join(self._call.raw)
        if not (self._marker or self._call.name):  # the beginning of an answer, which had no header
            return raw
        self._say(raw.removesuffix(rest))
        return rest

    def _at_end(self, body: Parsing[str]) -> str | None:
        """The characters that a call read too far, if the end of the text completes it; None if it is incomplete."""
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


def schemas_of(tools: Sequence[JsonObject]) -> dict[str, JsonObject]:
    """Name -> JSON schema of the parameters; {} where a tool has none that is one."""
    functions = [tool.get("function") or tool for tool in tools]
    parameters = {function["name"]: function.get("parameters") for function in functions}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in parameters.items()}
