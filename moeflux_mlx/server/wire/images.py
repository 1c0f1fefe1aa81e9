"""Takes the images out of a body: marks replace them in the messages, and the images are read later.

All APIs put images into lists of parts, with types that have no other meaning. The request maps marks to images. A mark
contains random letters of the request, so that no text can contain it by chance.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject, JsonValue
from .fields import wrong

MOST = 32  # the most images of a request
FIELDS = ("content", "output")  # keys of a message or an item that may have parts
KINDS = ("image_url", "input_image", "image")
TEXTS = ("text", "input_text")


@dataclass
class ImageParts:
    """Images of one request, each a URL or base64 text, by the number in its mark."""

    sources: list[str] = field(default_factory=list)
    letters: str = field(default_factory=lambda: f"image{secrets.token_hex(12)}n", compare=False)

    def mark(self, source: str) -> str:
        """The mark of an image in texts."""
        self.sources.append(source)
        return f"{self.letters}{len(self.sources) - 1}."

    def replaced(self, text: str, shown: str) -> tuple[str, list[str]]:
        """The text with `shown` for each mark, and the images in its order."""
        pattern = re.compile(rf"{self.letters}(\d+)\.")
        return pattern.sub(lambda match: shown, text), [self.sources[int(n)] for n in pattern.findall(text)]


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
        before = done[-1] if done and isinstance(done[-1], dict) and done[-1].get("type") in TEXTS else None
        if kind in KINDS:
            mark = images.mark(_source(part, f"{path}[{n}]"))
            if before is not None and isinstance(before.get("text"), str):
                done[-1] = {**before, "text": before["text"] + mark}
            else:
                done.append({"type": "text", "text": mark})
            is_open = True
            continue
        if is_open and before is not None and kind in TEXTS and isinstance(part.get("text"), str):
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
