"""One call while it is read: its known parts, and their events."""

from collections.abc import Callable, Mapping
from typing import Any

from ..events import CallDelta, CallEnd, CallStart, Event
from .steps import Malformed, parsed


class Call:
    """Args:
    index: of the call in its answer.
    schemas: the declared tools: name -> JSON schema of the parameters.
    emit: takes the events.
    """

    def __init__(self, index: int, schemas: Mapping[str, Mapping[str, Any]], emit: Callable[[Event], object]):
        self.index, self.name = index, ""
        self._schemas, self._emit = schemas, emit
        self._arguments: list[str] = []

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the called tool's parameters."""
        return self._schemas[self.name]

    def knows(self, name: str) -> bool:
        return name in self._schemas

    def start(self, name: str) -> None:
        """Sets the name; arguments that came before it are emitted at once.

        Raises:
            Malformed: no such tool is declared, or the call has a name.
        """
        if self.name or not self.knows(name):
            raise Malformed("")
        self.name = name
        self._emit(CallStart(self.index, name))
        for piece in self._arguments:
            self._emit(CallDelta(self.index, piece))

    def write(self, piece: str) -> None:
        """Appends `piece` to the arguments."""
        self._arguments.append(piece)
        if self.name:
            self._emit(CallDelta(self.index, piece))

    def check(self, rest: str) -> None:
        """Makes sure that the arguments are a JSON object, an empty one if there are none.

        Raises:
            Malformed: they are not, or there is no name; `rest` has been read too far.
        """
        if not self.name:
            raise Malformed(rest)
        if not self._arguments:
            self.write("{}")
        try:
            value = parsed("".join(self._arguments))
        except ValueError:
            raise Malformed(rest) from None
        if not isinstance(value, dict):
            raise Malformed(rest)

    def end(self, raw: str) -> None:
        self._emit(CallEnd(self.index, self.name, "".join(self._arguments), raw))
