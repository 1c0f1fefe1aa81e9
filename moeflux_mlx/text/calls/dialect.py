"""One form of tool calls (`Dialect`), one call while it is read (`Call`), and the parsers of both.

Parsers take one character at a time, so that their result does not depend on how the text was cut. A parser is a
generator: every `yield` waits for the next character, and "" says that the text has ended. It returns the characters
that it read too far, and raises `Malformed` if the text is invalid.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...files import JsonObject, JsonValue
from ..channels import THINK, Channels
from ..events import CallDelta, CallEnd, CallStart, Event

T = TypeVar("T")
Parsing = Generator[None, str, T]
Write = Callable[[str], object]

MAX_NESTED = 64  # values inside each other: every level is one of Python's stack
MAX_NAME = 256  # longer than any tool name, and short enough not to hold back an answer
OPENING, CLOSING = frozenset("{["), frozenset("}]")
SCALAR = frozenset("0123456789+-.eEtrufalsn")
BETWEEN = SCALAR | frozenset(" \t\r\n,:")


class Malformed(Exception):
    """The text is no call; `rest` are the characters to be read again as text."""

    def __init__(self, rest: str):
        super().__init__(rest)
        self.rest = rest


class Switched(Exception):
    """The text was the header of a message: reasoning follows, or text for the user."""

    def __init__(self, inside: bool):
        super().__init__(inside)
        self.inside = inside


def skip_space() -> Parsing[str]:
    """The first character that is no space."""
    char = yield
    while char.isspace():
        char = yield
    return char


def literal(options: Sequence[str], held: str = "") -> Parsing[str]:
    """Reads one of `options`; `held` is the part already read."""
    while held not in options:
        char = (yield) if any(option.startswith(held) for option in options) else ""
        if not char:
            raise Malformed(held)
        held += char
    return held


def until(end: str, held: str = "") -> Parsing[str]:
    """Reads up to the character or tag `end`, on one line."""
    text, _ = yield from until_one([end], held)
    return text


def until_one(ends: Sequence[str], held: str = "", or_end: bool = False) -> Parsing[tuple[str, str]]:
    """Reads up to one of the characters or tags `ends`, on one line; returns the text before it, and which it is.

    `or_end`: the text may also end; then the second is "".
    """
    while not (end := next(filter(held.endswith, ends), "")):
        char = yield
        if or_end and not char:
            return held, ""
        is_line_end = char == "\n" and not any((held + char).endswith(end) for end in ends)
        if not char or is_line_end or len(held) > MAX_NAME + max(map(len, ends)):
            raise Malformed(char)
        held += char
    return held.removesuffix(end), end


def skip(spare: str, char: str) -> Parsing[tuple[str, str]]:
    """Reads spaces and characters of `spare`, `char` of them; returns them, and the character behind them."""
    skipped = ""
    while char and (char.isspace() or char in spare):
        skipped += char
        char = yield
    return skipped, char


def optional(end: str, char: str, spare: str = "") -> Parsing[str]:
    """Reads spaces, characters of `spare` and the tag `end`, `char` of them. If something else comes, returns what was
    read, without those of `spare` on the first line.
    """
    skipped, char = yield from skip(spare, char)
    if not char:
        return "".join(one for one in skipped if one not in spare)
    try:
        yield from literal([end], char)
    except Malformed as error:
        line, line_break, others = skipped.partition("\n")
        return "".join(one for one in line if one not in spare) + line_break + others + error.rest
    return ""


def json_value(first: str, write: Write) -> Parsing[str]:
    """Passes on the value that begins with `first`, and returns the character after it.

    Brackets are counted and strings followed; whether it is JSON otherwise, `parsed` says of the whole.
    """
    if first == '"':
        yield from json_string(write)
        return (yield)
    if first in OPENING:
        yield from _json_inside(first, write)
        return (yield)
    if first not in SCALAR:
        raise Malformed(first)
    while first in SCALAR:
        write(first)
        first = yield
    return first


def _json_inside(first: str, write: Write) -> Parsing[None]:
    write(first)
    depth = 1
    while depth:
        char = yield
        if char == '"':
            yield from json_string(write)
            continue
        if char not in BETWEEN and char not in OPENING and char not in CLOSING:
            raise Malformed(char)
        depth += (char in OPENING) - (char in CLOSING)
        write(char)


def json_string(write: Write) -> Parsing[None]:
    """The string after its opening quote; line breaks that a model forgot to escape are escaped."""
    write('"')
    escaped = False
    while True:
        char = yield
        if not char:
            raise Malformed("")
        write(char if char >= " " else json.dumps(char)[1:-1])
        if char == '"' and not escaped:
            return
        escaped = char == "\\" and not escaped


def parsed(text: str) -> JsonValue:
    """The value of JSON text, and ValueError where there is none; NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def _refuse(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


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


@dataclass(frozen=True)
class Tags:
    """How the parameters of a call are written in tags of their own.

    The text of a parameter is `key[0] KEY key[1] value[0] VALUE value[1]`, with spaces between any of them.

    Attributes:
        key, value: what opens and closes each; where `key[1]` opens the value, `value[0]` is empty.
        ends: what may follow the last parameter.
        after: what may follow one of `ends`, or be one; "" for nothing.
        opens: what may open another call.
        lined: a value stands on lines of its own, so the line breaks round it are no part of it.
        kinds: where the writer says which a value is, what opens a string and what opens JSON of each type, in place of
            `value[0]`.
        escapes: characters of keys and tools' names, and what is written for each.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    ends: tuple[str, ...]
    after: str = ""
    opens: tuple[str, ...] = ()
    lined: bool = False
    kinds: tuple[str, ...] | None = None
    escapes: tuple[tuple[str, str], ...] = ()

    def escaped(self, name: str) -> str:
        """A key or a tool's name as it is written."""
        for plain, written in self.escapes:
            name = name.replace(plain, written)
        return name

    def unescaped(self, name: str) -> str:
        """The key or tool's name that is written so."""
        for plain, written in reversed(self.escapes):
            name = name.replace(written, plain)
        return name


CallBody = Callable[[Call], Parsing[str]]


def behind(opening: str, parse: CallBody) -> CallBody:
    """The parser of a text that has spaces and `opening` before what `parse` takes."""

    def parse_all(call: Call) -> Parsing[str]:
        yield from literal([opening], (yield from skip_space()))
        return (yield from parse(call))

    return parse_all


@dataclass(frozen=True)
class Dialect:
    """A call is written `begin`, `named` with the tool's name in place of NAME, its arguments, `close`.

    Attributes:
        name: such as "qwen_json".
        openings: tag -> parser of the text after it.
        begin: how a call is opened.
        opening: the part of `begin` and `named` that every call has; free text ends with it.
        named: what follows `begin` if the tool is known, with its name in place of NAME and its id in place of ID.
        close: what ends a call.
        between: what the model itself writes between `named` and the arguments, in Lark.
        tags: how parameters are written; None: the arguments are JSON, or as `arguments` says.
        arguments: of arguments that are no JSON, the rule "arguments" in Lark with those that it needs, and what
            makes of a tool's schema an expression of theirs.
        section: how the calls of an answer begin, and how they end if the last one has no arguments. The end may also
            end the answer.
        bare: like `openings`, for tags that only count outside reasoning, because a model that drops the first tag
            writes them.
        following: like `openings`, for what only opens a call right behind another one.
        first: the parser of the beginning of an answer that follows a header in the prompt, if there may be more of it.
        markers: all tags that only the model may write, for calls.
        id: the form of a call's id in the prompt, {name} and {index} in place of the tool and the number of the call
            in the chat; None: any id.
        id_form: finds the ids in what a model wrote.
        id_rule: what an id is that the model chooses, in Lark, where `named` has one.
    """

    name: str
    openings: Mapping[str, CallBody]
    begin: str
    opening: str
    named: str
    close: str
    section: tuple[str, str]
    markers: frozenset[str]
    between: str = ""
    tags: Tags | None = None
    bare: Mapping[str, CallBody] = field(default_factory=dict)
    following: Mapping[str, CallBody] = field(default_factory=dict)
    first: CallBody | None = None
    id: str | None = None
    id_form: re.Pattern[str] | None = None
    id_rule: str = ""
    arguments: tuple[str, Callable[[JsonObject], str]] | None = None

    def prefix(self, tool: str | None = None, inside_reasoning: bool = False, channels: Channels = THINK) -> str:
        """The text to append to a prompt so that a call of `tool`, or of any tool, follows.

        The reader of the answer must be fed it as well. `inside_reasoning` also closes what the prompt has opened.
        """
        closing = channels.closing if inside_reasoning else ""
        if tool is None:
            return closing + self.begin
        call_id = (self.id or "").format(name=tool, index=0)
        return closing + self.begin + self.named.replace("ID", call_id).replace("NAME", self.spelt(tool))

    def spelt(self, tool: str) -> str:
        """A tool's name as it is written."""
        return tool if self.tags is None else self.tags.escaped(tool)
