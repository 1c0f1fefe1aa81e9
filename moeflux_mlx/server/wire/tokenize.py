"""/tokenize, as in llama.cpp: returns the token ids of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...files import JsonDict, JsonObject
from .fields import Body, check
from .replies import openai_error

error = openai_error


@dataclass(frozen=True)
class Tokenize:
    """`content` is to be cut, `add_special` what begins and ends a text."""

    content: str
    add_special: bool = False


def read(body: JsonObject) -> Tokenize:
    check(body)
    fields = Body(body)
    content = fields.text("content")
    if content is None:
        raise fields.wrong("content", "a text")
    return Tokenize(content, fields.flag("add_special"))


def whole(tokens: Sequence[int]) -> JsonDict:
    """The reply."""
    return {"tokens": list(tokens)}
