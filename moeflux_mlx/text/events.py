"""The events of a model's text in order: reasoning, text and tool calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of the tool `name` begins; `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallDelta:
    """A piece of the call's arguments as JSON text; the pieces of one call together are what `CallEnd` has."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete: `arguments` is a JSON object as text, `raw` is the model's text including tags."""

    index: int
    name: str
    arguments: str
    raw: str


Event = Reasoning | Text | CallStart | CallDelta | CallEnd
