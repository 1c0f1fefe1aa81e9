"""Images in a text: their places, the embeddings at these places, and the rotary positions around them.

A text is a sequence of places: one for each token, and one for each row that an encoder made from an image. This module
knows no pixels.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import LayerCache
from ..ops.backend import Array, dtype_of, of_kind


class ImageRows(NamedTuple):
    """An encoder's output for an image: embeddings [n, hidden_size], and equally many features to add after each of the
    first layers (DeepStack, arXiv:2406.04334).
    """

    embeddings: mx.array
    deep: Sequence[mx.array] = ()


class Image(Protocol):
    """An image in a text.

    Attributes:
        digest: identifies the image.
        length: number of its places.
        grid: rows and columns of the places, where rotary positions follow them; None: they follow the text.
    """

    @property
    def digest(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...

    def rows(self, encoder: "ImageEncoder | None") -> ImageRows:
        """The image's rows, computed by the model's encoder when first requested and kept until `forget`."""

    def forget(self) -> None: ...


class Picture(Protocol):
    """A picture of Pillow's."""

    def save(self, file: io.BytesIO, form: str, /) -> None: ...


ImageSource: TypeAlias = str | Path | bytes | Picture  # a path, a URL, an image file's bytes, or a picture


class ImageReader(Protocol):
    """Reads images for a model; `token` stands for each in a prompt."""

    token: int

    def image(self, source: ImageSource) -> Image:
        """Raises RequestError: it cannot be read."""


class ImageEncoder(ImageReader, Protocol):
    """Also makes the rows of what it read, or what its `reader` has read, which holds no encoder."""

    @property
    def reader(self) -> ImageReader: ...

    def encode(self, levels: np.ndarray) -> ImageRows:
        """Raises RequestError: the model has no encoder."""


@dataclass(frozen=True)
class Images:
    """The images of a text.

    With a grid, row r and column c of an image that begins at rotary position p are at (p, p + r, p + c), and what
    comes after the image goes on at p + max(rows, columns) (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Args:
        placed: each with the first place that it takes, ascending.
        by: difference between the rotary position of the text's first token and its place.
    """

    placed: Sequence[tuple[int, Image]] = ()
    by: int = 0

    def after(self, cache: Sequence[LayerCache]) -> "Images":
        """The same images if the text follows the contents of `cache`."""
        start = cache[0].offset
        return Images([(start + place, image) for place, image in self.placed], cache[0].position - start)

    def positions(self, start: int, end: int) -> np.ndarray | None:
        """Rotary positions [3, end - start] of places; None: no image that has a grid is among them."""
        inside = [image for place, image in self.placed if image.grid and place < end and start < place + image.length]
        if not inside:
            return None
        places = np.arange(start, end)
        positions = np.repeat(places[None] + self.by, 3, axis=0)
        for (place, image), by in zip(self.placed, [self.by, *(by for _, by in self._shifts())], strict=False):
            after = place + image.length
            if image.grid:
                number = np.arange(image.length)
                of_image = place + by + np.stack([0 * number, *np.divmod(number, image.grid[1])])
                within = (place <= places) & (places < after)
                positions[:, within] = of_image[:, places[within] - place]
            positions[:, places >= after] += _gain(image)
        return positions

    def shifts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where images have ended, behind `start` and up to `end`, and how much further than its place the rotary
        position is from there on."""
        return [(place, by) for place, by in self._shifts() if start < place <= end]

    def _shifts(self) -> list[tuple[int, int]]:
        by, shifts = self.by, []
        for place, image in self.placed:
            by += _gain(image)
            shifts.append((place + image.length, by))
        return shifts

    def embedded(self, hidden: Array, start: int, encoder: ImageEncoder | None) -> Array:
        """`hidden` [1, L, hidden_size] of places from `start` on, with the images' embeddings."""
        for rows, of_image, image in self._parts(start, hidden.shape[1]):
            hidden[:, rows] = _like(image.rows(encoder).embeddings[of_image], hidden)
        return hidden

    def deepened(self, hidden: Array, start: int, layer: int, encoder: ImageEncoder | None) -> Array:
        """`hidden` behind a layer, with what images add there."""
        for rows, of_image, image in self._parts(start, hidden.shape[1]):
            deep = image.rows(encoder).deep
            if layer < len(deep):
                hidden[:, rows] += _like(deep[layer][of_image], hidden)
        return hidden

    def _parts(self, start: int, length: int) -> list[tuple[slice, slice, Image]]:
        """The images among `length` places from `start` on: which of the places, which of its rows."""
        parts = []
        for place, image in self.placed:
            first, last = max(place, start), min(place + image.length, start + length)
            if first < last:
                parts.append((slice(first - start, last - start), slice(first - place, last - place), image))
        return parts


NO_IMAGES = Images()


def _gain(image: Image) -> int:
    """The number of an image's rotary positions minus the number of its places."""
    return max(image.grid) - image.length if image.grid else 0


def _like(rows: mx.array, hidden: Array) -> Array:
    return of_kind(rows.astype(dtype_of(hidden)), hidden)
