"""Reads a request's JSON with types: an error is a 400 that names the field, the value and what is expected. A null
field counts as missing, and unknown fields are ignored. Nothing here knows any API.
"""

import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from ...errors import BadRequestError
from ...files import JsonDict, JsonValue

DEEPEST = 64  # levels of objects and lists; tool schemas of agents reach about 20
LARGEST = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(data: bytes) -> JsonDict:
    """The JSON object that the body of a request holds."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {_line(error)}") from error
    check(body)
    return dict(body)


def check(body: JsonValue) -> None:
    """Refuses data that is not an object, nests too deeply, or has values that JSON in UTF-8 cannot express."""
    if not isinstance(body, Mapping):
        raise BadRequestError(f"the body is {shown(body)}; expected a JSON object")
    level: list[JsonValue] = [body]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _held(value) if _is_container(inner)]
        if not level:
            return
    raise too_deep()


def _held(value: JsonValue) -> Iterable[JsonValue]:
    return itertools.chain(value, value.values()) if isinstance(value, Mapping) else value


def _is_container(value: JsonValue) -> bool:
    """Whether a value contains others; checks values that do not. It must be fast, because bodies can have millions of
    values.
    """
    kind = type(value)
    if kind is int or kind is str and value.isascii():
        return False
    if isinstance(value, str) and _SURROGATE.search(value):
        raise BadRequestError(f"the text {shown(value)} has half of a surrogate pair; expected whole characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequestError(f"the body holds {value}; expected finite numbers")
    return isinstance(value, (dict, list, tuple, Mapping))


def too_deep() -> BadRequestError:
    return BadRequestError(f"the body nests more than {DEEPEST} levels deep; expected at most {DEEPEST}")


def shown(value: JsonValue) -> str:
    """A value for a message: short, in one line, and ASCII where its characters could not be written."""
    text = ascii(value) if isinstance(value, str) and _SURROGATE.search(value) else _short.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def wrong(name: str, value: JsonValue, wanted: str) -> BadRequestError:
    return BadRequestError(f"{name} is {shown(value)}; expected {wanted}", name)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2


class Body:
    """The fields of one JSON object.

    Args:
        data: the object.
        path: its place in the body, for messages; "" for the body itself.
    """

    def __init__(self, data: JsonValue, path: str = ""):
        if not isinstance(data, Mapping):
            raise wrong(path or "the body", data, "an object")
        self.data, self.path = data, path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> JsonValue:
        return self.data.get(key)

    def wrong(self, key: str, wanted: str) -> BadRequestError:
        value = self.data.get(key)
        if value is None:
            return BadRequestError(f"{self.name(key)} is missing; expected {wanted}", self.name(key))
        return wrong(self.name(key), value, wanted)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def integer(self, key: str, least: int, most: int = LARGEST) -> int | None:
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float) -> float | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def object(self, key: str) -> "Body | None":
        value = self.data.get(key)
        return None if value is None else Body(value, self.name(key))

    def list(self, key: str) -> Sequence[JsonValue]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, "a list")
        return value

    def objects(self, key: str) -> Iterator["Body"]:
        for place, item in enumerate(self.list(key)):
            yield Body(item, f"{self.name(key)}[{place}]")
