"""How the parameters of a call are written in tags of their own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tags:
    """The text of a parameter is `key[0] KEY key[1] value[0] VALUE value[1]`, with spaces between any of them.

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
