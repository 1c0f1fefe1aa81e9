"""One call while it is read: its characters, its known parts, and their events."""

from collections.abc import Callable, Collection, Mapping

from ...files import JsonObject
from ..events import CallDelta, CallEnd, CallStart, Event
from .steps import Malformed, parsed


class Call:
    """Args:
    index: of the call in its answer.
    schemas: the declared tools: name -> JSON schema of the parameters.
    emit: takes the events.

    Attributes:
        raw: its characters so far.
        is_cut: a limit has ended the answer here, so what only the end of the text would complete is incomplete.
    """

    def __init__(self, index: int, schemas: Mapping[str, JsonObject], emit: Callable[[Event], object]):
        self.index, self.name = index, ""
        self.raw: list[str] = []
        self.is_cut = False
        self._schemas, self._emit = schemas, emit
        self._arguments: list[str] = []
        self._held: int | None = None  # how many pieces of the arguments had been emitted when others were held back

    @property
    def schema(self) -> JsonObject:
        """The schema of the called tool's parameters."""
        return self._schemas[self.name]

    @property
    def names(self) -> Collection[str]:
        """The names of the declared tools."""
        return self._schemas

    def knows(self, name: str) -> bool:
        """Whether this is the whole name of a declared tool."""
        return name in self._schemas and not self.is_cut

    def start(self, name: str) -> None:
        """Sets the name; arguments that came before it are emitted at once.

        Raises:
            Malformed: no such tool is declared, the call has a name, or the answer was cut in the name.
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
        if self.name and self._held is None:
            self._emit(CallDelta(self.index, piece))

    def hold(self) -> None:
        """Emits no more of the arguments, which are in doubt, until `settle`."""
        self._held = len(self._arguments)

    def settle(self, arguments: str) -> None:
        """Ends the doubt: the arguments are these, which begin with what has been emitted."""
        emitted = "".join(self._arguments[: self._held])
        assert arguments.startswith(emitted)
        self._arguments, self._held = [emitted], None
        self.write(arguments[len(emitted) :])

    def check(self, rest: str) -> None:
        """Makes sure that the arguments are a JSON object, an empty one if there are none.

        Raises:
            Malformed: they are not, there is no name, or the answer was cut before them; `rest` has been read too far.
        """
        if not self.name or (self.is_cut and not self._arguments):
            raise Malformed(rest)
        if not self._arguments:
            self.write("{}")
        try:
            value = parsed("".join(self._arguments))
        except ValueError:
            raise Malformed(rest) from None
        if not isinstance(value, dict):
            raise Malformed(rest)

    def end(self, rest: str) -> None:
        """The call is whole, up to the characters `rest`, which have been read too far."""
        raw = "".join(self.raw).removesuffix(rest)
        self._emit(CallEnd(self.index, self.name, "".join(self._arguments), raw))
