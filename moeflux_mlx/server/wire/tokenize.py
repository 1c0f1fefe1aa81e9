"""/tokenize, as in llama.cpp: returns the token ids of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...files import JsonDict, JsonObject
from .fields import Body, check
from .replies import openai_error

error = openai_error


@dataclass(frozen=True)
class Tokenize:
    """`content` is to be cut, `add_special` what begins and ends a text, `with_pieces` each token's own text."""

    content: str
    add_special: bool = False
    with_pieces: bool = False


def read(body: JsonObject) -> Tokenize:
    check(body)
    fields = Body(body)
    content = fields.text("content")
    if content is None:
        raise fields.wrong("content", "a text")
    return Tokenize(content, fields.flag("add_special"), fields.flag("with_pieces"))


def whole(tokens: Sequence[int], pieces: Sequence[str] | None = None) -> JsonDict:
    """The reply; with `pieces`, one to a token."""
    if pieces is None:
        return {"tokens": list(tokens)}
    return {"tokens": [{"id": id, "piece": piece} for id, piece in zip(tokens, pieces, strict=True)]}
