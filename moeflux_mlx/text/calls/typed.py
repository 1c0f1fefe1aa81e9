"""Converts the text of a value without quotes to JSON, according to the types that its schema allows.

Where only a string is allowed, the text stays as it is. Beside a string, a text that is JSON of another allowed type
becomes that value: `5` is a number for `integer|string`, and `null` is null wherever null is allowed. Without a string,
any JSON passes.
"""

import ast
import json

from .dialect import Write, parsed
from .schema import STRING, has_type

CONTAINERS = {"object": "{", "array": "["}
WORDS = {"null": ["null"], "boolean": ["true", "false"]}
NUMBERS = frozenset({"integer", "number"})
DIGITS = frozenset("0123456789+-.eE")
JSON_TYPES = NUMBERS | CONTAINERS.keys() | WORDS.keys()  # types other than string
PEEK = 16  # the characters from which a string is recognised before it has ended


class TypedText:
    """One value of one of `types`, whose text comes in pieces: a string is written as it comes, as soon as it can be
    nothing else, any other value at the end."""

    def __init__(self, write: Write, types: frozenset[str]):
        self._write, self._types = write, types
        self._text, self._is_string = "", False

    def add(self, piece: str) -> None:
        self._text += piece
        if not self._is_string and "string" in self._types and not _may_differ(self._text[:PEEK].strip(), self._types):
            self._write('"')
            self._is_string = True
        if self._is_string:
            self._write(json.dumps(self._text, ensure_ascii=False)[1:-1])
            self._text = ""

    def end(self) -> None:
        self._write('"' if self._is_string else as_json(self._text, self._types))


def as_json(text: str, types: frozenset[str]) -> str:
    """The value that `text` stands for, as JSON text."""
    return _json(text.strip(), types) or _python(text.strip(), types) or json.dumps(text, ensure_ascii=False)


def _may_differ(begun: str, types: frozenset[str]) -> bool:
    """Whether a text that begins so may be a value of another type than string."""
    if not begun or types == STRING:
        return types != STRING
    return (
        any(word.startswith(begun) for kind in types for word in WORDS.get(kind, ()))
        or any(begun[0] == bracket and kind in types for kind, bracket in CONTAINERS.items())
        or (DIGITS.issuperset(begun) and not types.isdisjoint(NUMBERS))
    )


def _json(text: str, types: frozenset[str]) -> str | None:
    """JSON text passes as it is, so that no number changes."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    is_other = "string" not in types and value is not None
    return text if is_other or (not isinstance(value, str) and has_type(value, types)) else None


def _python(text: str, types: frozenset[str]) -> str | None:
    """Reads Python's True, None and quotes, which models write too; beside a string only in objects and arrays."""
    try:
        value = ast.literal_eval(text)
        is_meant = has_type(value, types) and ("string" not in types or isinstance(value, (dict, list)))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if is_meant else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
