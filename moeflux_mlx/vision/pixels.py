"""Image files become patches of pixels as a model's encoder takes them.

Files are not trusted: the size of a picture is checked before anything is decoded. How pictures are resized follows
transformers' image processors, whose formulas are cited where they stand.
"""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, RequestError
from ..families.fields import Fields
from ..files import JsonObject

FILE_BYTES = 32 << 20  # the most bytes of an image file
PIXELS = 1 << 25  # the most pixels of a decoded picture: 7680 by 4320 fits
LONGEST = 200  # largest ratio of the sides, as in transformers
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_ROWS = 1024  # default number of embeddings of one image


class Size(NamedTuple):
    """The size of a picture in pixels."""

    width: int
    height: int

    def scaled(self, factor: float) -> "Size":
        return Size(int(self.width * factor), int(self.height * factor))


@dataclass(frozen=True)
class Processor:
    """How a model's pictures become patches.

    Args:
        kind: "area": a picture is resized so that its area is within bounds; "area of two": the bounds count it twice,
            as two frames of a video; "padded": it is shrunk if it has too many patches, and padded.
        patch: width of a square patch in pixels.
        merge: so many patches by as many become one row of embeddings.
        frames: how often a picture is repeated, for encoders of videos.
        least, most: of the area in pixels, counted as `kind` says; of "padded" the most patches.
        mean, deviation: of each colour, by which values from 0 to 1 are normalised.
        side: patches along a side, at most.
    """

    kind: str
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    side: int = 512

    @property
    def factor(self) -> int:
        """Pixels along a side for one row of embeddings."""
        return self.patch * self.merge

    def limited(self, rows: int) -> int:
        """The processor with the bound `most` for images of at most `rows` rows of embeddings."""
        area = rows * (self.merge**2 if self.kind == "padded" else self.factor**2)
        return min(self.most, area * (2 if self.kind == "area of two" else 1))

    def resized(self, size: Size, rows: int) -> tuple[Size, Size]:
        """The size to which a picture is resized, and the size to which it is then padded.

        Raises:
            RequestError: it is too long for its width.
        """
        longest, shortest = max(size), min(size)
        if longest > LONGEST * shortest:
            raise RequestError(f"the image is {size.width} by {size.height}; at most {LONGEST} times as long as wide")
        most = self.limited(rows)
        if self.kind != "padded":
            made = self._within_area(size, most)
            return made, made
        across, down = (max(length // self.patch, 1) for length in size)
        limit = self.side * self.patch
        scale = min(1.0, math.sqrt(most / (across * down)), limit / size.height, limit / size.width)
        made = Size(*(min(max(length, 1), limit) for length in size.scaled(scale)))
        padded = Size(*(-(-length // self.factor) * self.factor for length in made))
        while padded.width * padded.height > rows * self.factor**2:  # padding added rows
            made = Size(*(max(length - self.factor // 2, 1) if length == max(made) else length for length in made))
            padded = Size(*(-(-length // self.factor) * self.factor for length in made))
        return made, padded

    def _within_area(self, size: Size, most: int) -> Size:
        """Multiples of `factor`, the nearest whose area is in bounds (transformers, `smart_resize`)."""
        factor, count = self.factor, 2 if self.kind == "area of two" else 1
        if count == 2 and min(size) < factor:
            size = size.scaled(factor / min(size))
        nearest = Size(*(round(length / factor) * factor for length in size))
        area = count * nearest.width * nearest.height
        if area > most:
            shrink = math.sqrt(count * size.width * size.height / most)
            return Size(*(max(math.floor(length / shrink / factor), 1) * factor for length in size))
        if area < self.least:
            grow = math.sqrt(self.least / (count * size.width * size.height))
            return Size(*(math.ceil(length * grow / factor) * factor for length in size))
        return nearest

    def patches(self, levels: np.ndarray) -> np.ndarray:
        """float32 [patches, colours, (frames,) patch, patch] of levels uint8 [height, width, 3], normalised.

        With frames, the patches that become one row of embeddings lie together, else they lie as in the picture.
        """
        mean, deviation = (np.array(values, np.float32) for values in (self.mean, self.deviation))
        values = (levels.astype(np.float32) / 255 - mean) / deviation
        down, across = (length // self.patch for length in levels.shape[:2])
        if self.kind == "padded":
            cut = values.reshape(down, self.patch, across, self.patch, 3).transpose(0, 2, 4, 1, 3)
            return np.ascontiguousarray(cut.reshape(-1, 3, self.patch, self.patch))
        m = self.merge
        cut = values.reshape(down // m, m, self.patch, across // m, m, self.patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = cut.reshape(-1, 3, 1, self.patch, self.patch)
        return np.repeat(patches, self.frames, axis=2)


def processor_of(kind: str, config: JsonObject, vision: JsonObject) -> Processor:
    """The processor of preprocessor_config.json, with missing values from the encoder's config or the family's
    defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    read, encoder = Fields({**config, **config.get("media_proc_cfg", {})}), Fields(vision)
    size = Fields(read.optional("size", Mapping, {}))
    patch = read.count("patch_size", None, most=1 << 10) or encoder.count("patch_size", 16, most=1 << 10)
    if kind == "padded":
        least, most, merge = 1, read.count("in_patch_limit|max_patches", 16384), 2
    else:
        least = read.count("min_pixels", None) or size.count("shortest_edge|min_pixels", 1 << 16)
        most = read.count("max_pixels", None) or size.count("longest_edge|max_pixels", 1 << 24)
        merge = encoder.count("spatial_merge_size", 2, most=64)
    mean, deviation = (_colours(read, name) for name in ("image_mean", "image_std"))
    frames = encoder.count("temporal_patch_size", 2, most=64)
    return Processor(kind, patch, merge, frames, min(least, most), most, mean, deviation)


def _colours(read: Fields, name: str) -> tuple[float, ...]:
    values = read.optional(name, list, [0.5, 0.5, 0.5])
    if len(values) != 3 or not all(type(one) in (int, float) and 0 < one < 10 for one in values):
        raise ConfigError(f"config field {name!r} is {values!r}; expected a number for each of three colours")
    return tuple(float(one) for one in values)


def read_levels(data: bytes, processor: Processor, rows: int) -> np.ndarray:
    """Reads an image file in the encoder's size, as RGB levels uint8 [height, width, 3].

    Transparency becomes white; a picture is turned as its camera says; of several pictures the first is read.

    Raises:
        RequestError: the file is too large, is no image of a known format, or is damaged.
    """
    from PIL import Image, ImageOps

    with _opened(data) as file:
        picture = ImageOps.exif_transpose(file)
        resized, padded = processor.resized(Size(*picture.size), rows)
        picture = _on_white(picture).resize(resized, Image.Resampling.BICUBIC)
    levels = np.zeros((padded.height, padded.width, 3), np.uint8)
    levels[: resized.height, : resized.width] = np.asarray(picture)
    return levels


def count_pixels(data: bytes) -> int:
    """The pixels that decoding an image file makes. Raises RequestError: as `read_levels`."""
    with _opened(data) as file:
        return int(file.width * file.height)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """A context manager with a picture that is not decoded yet. Errors of decoding it become a RequestError."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > FILE_BYTES:
        raise RequestError(f"the image has {len(data)} bytes; at most {FILE_BYTES}")
    known = f"give an image as {', '.join(FORMATS)}"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            if file.width * file.height > PIXELS:
                raise RequestError(f"the image is {file.width} by {file.height}; at most {PIXELS} pixels")
            yield file
    except RequestError:
        raise
    except UnidentifiedImageError:  # whose message is the address of an object
        raise RequestError(f"the image cannot be read: it is damaged or of another format; {known}") from None
    except MemoryError:
        raise RequestError("there is no memory to read the image; give a smaller one") from None
    except Exception as error:  # Pillow's decoders raise various errors for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(f"the image cannot be read: {reason[:200]}; {known}") from None


def _on_white(picture: Any) -> Any:
    """The picture in RGB on a white background."""
    from PIL import Image

    if picture.mode.startswith("I"):
        return _of_high_bytes(picture).convert("RGB")
    if picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info:
        return picture.convert("RGB")
    clear = picture if picture.mode == "RGBA" else picture.convert("RGBA")
    white = Image.new("RGB", picture.size, (255, 255, 255))
    white.paste(clear, mask=clear.getchannel("A"))
    return white


def _of_high_bytes(picture: Any) -> Any:
    """A picture of 16-bit greys in 8 bits, which Pillow's `convert` would clip; its own RGB of 16 bits is cut like
    this.
    """
    from PIL import Image

    values = np.asarray(picture)
    levels = (values >> 8).astype(np.uint8)
    levels[values == picture.info.get("transparency", -1)] = 255
    return Image.fromarray(levels)
