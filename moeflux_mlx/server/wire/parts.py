"""Reads the text of a message: a string, or a list of parts. Parts may be text or images.

`without_images` takes the images out of a body: marks replace them in the messages, and they are read later. All
APIs put images into lists of parts, with types that have no other meaning. The request maps marks to images. A mark
contains random letters of the request, so that no text can contain it by chance.
"""

from collections.abc import Callable, Mapping, Sequence

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from ..request import ImageParts
from .settings import Body, wrong

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
    """Refuses audio, files and other parts; images have been taken out before."""
    return wrong(part.name("type"), kind, "a text, or an image in a message: audio and files are not read")


MOST = 32  # the most images of a request
FIELDS = ("content", "output")  # keys of a message or an item that may have parts
KINDS = ("image_url", "input_image", "image")
MARKED = ("text", "input_text")  # parts that a mark is joined to


def without_images(body: JsonObject, key: str) -> tuple[JsonDict, ImageParts]:
    """Returns the body with marks in place of the images in its messages or items under `key`, and the images. A mark
    is joined to the text before or behind it, as templates write images.

    Raises:
        BadRequestError: an image part has no image, or there are too many images.
    """
    images, items = ImageParts(), body.get(key)
    if not isinstance(items, list):
        return dict(body), images
    cleared = [_cleared(item, images, f"{key}[{n}]") for n, item in enumerate(items)]
    if len(images.sources) > MOST:
        raise BadRequestError(f"the request has {len(images.sources)} images; at most {MOST}", key)
    return {**body, key: cleared}, images


def _cleared(item: JsonValue, images: ImageParts, path: str) -> JsonValue:
    if not isinstance(item, Mapping):
        return item
    lists = {name: value for name in FIELDS if isinstance(value := item.get(name), list)}
    return {**item, **{name: _parts(value, images, f"{path}.{name}") for name, value in lists.items()}}


def _parts(parts: Sequence[JsonValue], images: ImageParts, path: str) -> list[JsonValue]:
    """The parts, and those within results of tools."""
    done: list[JsonValue] = []
    is_open = False  # whether the last part is a text that ends with a mark
    for n, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        before = done[-1] if done and isinstance(done[-1], dict) and done[-1].get("type") in MARKED else None
        if kind in KINDS:
            mark = images.mark(_source(part, f"{path}[{n}]"))
            if before is not None and isinstance(before.get("text"), str):
                done[-1] = {**before, "text": before["text"] + mark}
            else:
                done.append({"type": "text", "text": mark})
            is_open = True
            continue
        if is_open and before is not None and kind in MARKED and isinstance(part.get("text"), str):
            done[-1] = {**before, "text": before["text"] + part["text"]}
        else:
            done.append(_cleared(part, images, f"{path}[{n}]") if kind == "tool_result" else part)
        is_open = False
    return done


def _source(part: JsonObject, path: str) -> str:
    """The URL of an image in any form of the APIs."""
    if part["type"] == "image":  # Anthropic's
        source = part.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        value = source.get({"base64": "data", "url": "url"}.get(str(kind), "")) if isinstance(source, Mapping) else None
        if not isinstance(value, str):
            raise wrong(f"{path}.source", kind, "an object of type base64 with data, or of type url")
        return value if kind == "url" else f"data:;base64,{value}"
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise wrong(f"{path}.image_url", url, "a data: URL")
    return url
