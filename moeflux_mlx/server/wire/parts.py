"""Reads the text of a message: a string, or a list of parts. Parts may be text, or images (`images`)."""

from collections.abc import Callable, Mapping

from ...errors import BadRequestError
from ...files import JsonValue
from .fields import Body, wrong

# Part type -> the field that holds its text.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def texts(message: Body, key: str, others: Mapping[str, Callable[[Body], str | None]] | None = None) -> list[str]:
    """The texts of a field's parts, empty ones left out.

    Args:
        message: what holds the field.
        key: its name; missing, null and "" are no text.
        others: part type -> its reader; None means that the part is skipped.
    """
    value = message.get(key)
    if value is None or isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, (list, tuple)):
        raise message.wrong(key, "a text or a list of parts")
    part_texts = (_text(part, f"{message.name(key)}[{place}]", others or {}) for place, part in enumerate(value))
    return [text for text in part_texts if text]


def text_of(message: Body, key: str) -> str:
    return "\n".join(texts(message, key))


def _text(part: JsonValue, path: str, others: Mapping[str, Callable[[Body], str | None]]) -> str | None:
    if isinstance(part, str):
        return part
    fields = Body(part, path)
    kind = fields.required_text("type")
    if kind in others:
        return others[kind](fields)
    if kind not in TEXTS:
        raise unserved(fields, kind)
    return fields.text(TEXTS[kind])


def unserved(part: Body, kind: str) -> BadRequestError:
    """Refuses audio, files and other parts; images have been taken out before (`images`)."""
    return wrong(part.name("type"), kind, "a text, or an image in a message: audio and files are not read")
