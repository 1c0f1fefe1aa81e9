"""Reads a model's images without its encoder: files become pixels in the encoder's size."""

import hashlib
import threading

import numpy as np

from ..model.images import ImageEncoder, ImageRows, ImageSource
from .pixels import IMAGE_ROWS, Processor, read_levels
from .sources import bytes_of

KEPT_BYTES = 1 << 27  # of pixels that were read, which the same file needs again: 42 images of 1024 rows
DECODING = threading.Lock()  # one picture at a time in a process: it may be large before it is made smaller
# Pixels by the digest of the file and how it was read, in the order of their last use; for all models of a process.
_KEPT: dict[tuple[bytes, Processor, int], np.ndarray] = {}


class PictureReader:
    """Reads images for one model; any number of threads may use it.

    Args:
        processor: makes patches of pictures.
        token: the id of an image's rows in prompts; a template writes it once per image.
        by_axes: whether rotary positions follow rows and columns.
        rows: that an image has at most.
    """

    def __init__(self, processor: Processor, token: int, by_axes: bool, rows: int = IMAGE_ROWS):
        self.processor, self.token, self.by_axes, self.most = processor, token, by_axes, rows

    def image(self, source: ImageSource) -> "ReadImage":
        """An image to be encoded.

        Args:
            source: a path, a `file:` or `data:` URL, the bytes of a file, or a picture of Pillow's.

        Raises:
            RequestError: it is no image that can be read, or it is too large.
        """
        return ReadImage(self._levels(bytes_of(source)), self.processor, self.by_axes)

    def _levels(self, data: bytes) -> np.ndarray:
        key = hashlib.blake2b(data).digest(), self.processor, self.most
        with DECODING:
            levels = _KEPT.pop(key, None)
            if levels is None:
                levels = read_levels(data, self.processor, self.most)
            _KEPT[key] = levels
            while len(_KEPT) > 1 and sum(one.nbytes for one in _KEPT.values()) > KEPT_BYTES:
                del _KEPT[next(iter(_KEPT))]
        return levels


class ReadImage:
    """An image of a text, which is encoded when its rows are first requested.

    Attributes:
        levels: its pixels, uint8 [rows, columns, 3].
        digest: of its pixels and how they are cut.
        length: rows of embeddings.
        grid: rows and columns of them, where rotary positions follow these; else None.
    """

    def __init__(self, levels: np.ndarray, processor: Processor, by_axes: bool):
        self.levels = levels
        self._rows: ImageRows | None = None
        down, across = (length // processor.factor for length in levels.shape[:2])
        self.length, self.grid = down * across, (down, across) if by_axes else None
        sizes = f"{levels.shape} {processor}".encode()
        self.digest = hashlib.blake2b(sizes + levels.tobytes(), digest_size=32).digest()

    def rows(self, encoder: ImageEncoder | None) -> ImageRows:
        rows = self._rows
        if rows is None:
            assert encoder is not None  # a model that was loaded has one
            rows = self._rows = encoder.encode(self.levels)
        return rows

    def forget(self) -> None:
        self._rows = None
