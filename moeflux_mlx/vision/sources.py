"""Where the bytes of an image come from: a path, a URL, a picture of Pillow's."""

import base64
import binascii
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import RequestError
from ..files import user_path


def bytes_of(source: Any) -> bytes:
    """The bytes of an image file; see `Reader.image`."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith("data:"):
        return from_data_url(source)
    if isinstance(source, str) and source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    if isinstance(source, (str, Path)):
        path = user_path(source)
        try:
            return path.read_bytes()
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    if hasattr(source, "save"):
        file = io.BytesIO()
        source.save(file, "PNG")
        return file.getvalue()
    raise RequestError(
        f"an image is a {type(source).__name__}; give a path, a data: URL, bytes or a picture of Pillow's"
    )


def image_bytes(url: str, fetch: Callable[[str], bytes] | None) -> bytes:
    """The bytes behind an untrusted URL.

    Args:
        fetch: fetches from http and https; None: nothing is fetched. Other schemes but `data:` never are.

    Raises:
        RequestError: it cannot be had.
    """
    if url.startswith("data:"):
        return from_data_url(url)
    if not url.lower().startswith(("http://", "https://")):
        raise RequestError("an image is neither a data: URL nor at http:// or https://; send data:image/png;base64,...")
    if fetch is None:
        raise RequestError("images are not fetched from other machines; send a data: URL, or serve --allow-image-urls")
    return fetch(url)


def from_data_url(url: str) -> bytes:
    """What `data:image/png;base64,...` holds. Raises RequestError: it is no such URL."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("the image's data: URL is not in base64; give data:image/png;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image's data: URL is damaged: {error}") from None
