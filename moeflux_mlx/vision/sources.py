"""Where the bytes of an image come from: a path, a URL, a picture of Pillow's."""

import base64
import binascii
import io
import re
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ..errors import RequestError
from ..files import that_ends, user_path
from ..model.images import ImageSource

BASE64 = re.compile("; *base64 *$", re.IGNORECASE)  # the end of a data: URL's head if what follows is in base64


def bytes_of(source: ImageSource) -> bytes:
    """The bytes of an image file; see `Reader.image`."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and _is_data_url(source):
        return from_data_url(source)
    if isinstance(source, str) and source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    if isinstance(source, (str, Path)):
        path = user_path(source)
        try:
            return that_ends(path, pipes=True).read_bytes()
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    if hasattr(source, "save"):
        file = io.BytesIO()
        try:
            source.save(file, "PNG")
        except (OSError, ValueError) as error:
            raise RequestError(f"the picture cannot be read: {error}; convert it to RGB") from None
        return file.getvalue()
    raise RequestError(
        f"an image is a {type(source).__name__}; give a path, a data: URL, bytes or a picture of Pillow's"
    )


def image_bytes(url: str) -> bytes:
    """The bytes of an untrusted URL.

    Raises:
        RequestError: it is no data: URL, or a wrong one.
    """
    url = url.strip()
    if not _is_data_url(url):
        raise RequestError("images are not fetched from elsewhere; send a data: URL, data:image/png;base64,...")
    return from_data_url(url)


def _is_data_url(source: str) -> bool:
    return source[:5].lower() == "data:"


def from_data_url(url: str) -> bytes:
    """What `data:image/png;base64,...` holds, as browsers read it (WHATWG Fetch, "data: URLs"; RFC 2397).

    Raises:
        RequestError: it is no such URL.
    """
    head, comma, body = url.partition("#")[0].partition(",")
    if not comma:
        raise RequestError("the image's data: URL has no comma; give data:image/png;base64,...")
    data = unquote_to_bytes(body)
    return _from_base64(data) if BASE64.search(head) else data


def _from_base64(text: bytes) -> bytes:
    """Spaces, line breaks and missing padding are allowed (WHATWG Infra, "forgiving-base64 decode")."""
    text = b"".join(text.split())
    if len(text) % 4 == 0:
        text = text.removesuffix(b"=").removesuffix(b"=")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise RequestError(f"the image's base64 is damaged: {error}") from None
