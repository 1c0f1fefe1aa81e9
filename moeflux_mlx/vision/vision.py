"""A model's images: the encoder on disk (`VisionFiles`) and in memory (`Vision`), or why there is none; and files that
become pixels in the encoder's size, without it.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, ModelFileError, RequestError
from ..files import JsonObject, read_json
from ..formats.checkpoint import Tensor, merge_tensors, read_header, safetensors_files
from ..model.images import ImageEncoder, ImageRows, ImageSource
from ..ops.limits import within_limits
from ..packing.located import Located
from ..packing.resident import ASIDE
from ..spec import ModelArgs, family_name
from .encoder import KINDS, SCORES_COPIES, Encoder, EncoderKind, is_installed, not_installed, plain_name
from .pixels import IMAGE_ROWS, Processor, processor_of, read_levels
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


PREPROCESSOR = "preprocessor_config.json"
MOST_ROWS = 1 << 16  # the most rows that may be requested


@dataclass(frozen=True)
class VisionFiles:
    """A model's image encoder on disk.

    Args:
        kind: of the family.
        config: the model's config.json.
        tensors: of the encoder, by their names without what stands before them.
        processor: how pictures become patches.
        token: the id that stands for an image's rows.
        by_axes: whether rotary positions follow an image's rows and columns.
    """

    kind: EncoderKind
    config: JsonObject
    tensors: Mapping[str, Tensor]
    processor: Processor
    token: int
    by_axes: bool

    def nbytes(self, dtype: mx.Dtype) -> int:
        """Bytes of the encoder in memory."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.tensors.values()) * dtype.size

    def work_bytes(self, dtype: mx.Dtype, rows: int) -> int:
        """Temporary bytes of encoding an image of `rows` rows, with the resulting rows."""
        patches = rows * self.processor.merge**2
        vision = self.config["vision_config"]
        width, inner = (_size(vision, names) for names in (("hidden_size", "vt_hidden_size"), ("intermediate_size",)))
        heads = _size(vision, ("num_heads", "vt_num_attention_heads"))
        pixels = 3 * self.processor.frames * self.processor.patch**2
        return dtype.size * patches * (SCORES_COPIES * heads * patches + 8 * width + 2 * inner + 2 * pixels)

    def load(self, dtype: mx.Dtype, rows: int = IMAGE_ROWS) -> "Vision | NoVision":
        """Reads the encoder; `rows` of an image, at most. If it is incomplete, the text part runs without it.

        Raises:
            ConfigError: as `Encoder`.
        """
        quantization = self.config.get("quantization") or {}
        try:
            encoder = Encoder(self.kind, self.config["vision_config"], self.tensors, quantization, dtype)
        except ModelFileError as error:
            return NoVision(str(error))
        return Vision(encoder, self.reader(rows))

    def reader(self, rows: int = IMAGE_ROWS) -> PictureReader:
        """Reads images of at most `rows` rows; it needs no tensors."""
        return PictureReader(self.processor, self.token, self.by_axes, rows)


def find_vision(located: Located, args: ModelArgs) -> VisionFiles | None:
    """The image encoder of a packed model or of a checkpoint; None: it has none, or one that is not known.

    Raises:
        ConfigError: a value that the encoder needs is not usable. ModelFileError: a file cannot be read.
    """
    path, config = located.path, located.config
    if _kind_of(config) is None:
        return None
    aside = path / ASIDE
    packed = any(path.glob("resident*.safetensors"))
    files = ([aside] if aside.exists() else []) if packed else safetensors_files(path, located.shards_in)
    settings = read_json(path / PREPROCESSOR) if (path / PREPROCESSOR).exists() else {}
    return vision_of(config, settings, merge_tensors(map(read_header, files)), args)


def _kind_of(config: JsonObject) -> EncoderKind | None:
    return KINDS.get(config["model_type"]) or KINDS.get(family_name(config))


def vision_of(
    config: JsonObject, settings: JsonObject, merged: Mapping[str, Tensor], args: ModelArgs
) -> VisionFiles | None:
    """`find_vision`, of what config.json, preprocessor_config.json and the headers of a model's files say."""
    kind, vision = _kind_of(config), config.get("vision_config")
    if kind is None or not isinstance(vision, dict):
        return None
    named = ((name.removeprefix("language_model."), tensor) for name, tensor in merged.items())
    tensors = {plain: tensor for name, tensor in named if (plain := plain_name(name))}
    token = next((config[name] for name in kind.token.split("|") if type(config.get(name)) is int), None)
    if not tensors or token is None:
        return None
    if not 0 <= token < args.vocab_size:
        raise ConfigError(f"the token of images is {token}, outside the vocabulary of {args.vocab_size}")
    rotation = args.attention.rotation if args.attention else None
    processor = processor_of(kind.processor, settings, vision)
    return VisionFiles(kind, config, tensors, processor, token, bool(rotation and rotation.axes))


def _size(vision: JsonObject, names: Sequence[str]) -> int:
    return next((vision[name] for name in names if type(vision.get(name)) is int), 0)


class Vision:
    """A model's images: a reader of pictures and the encoder of what it read. Any number of threads may use it."""

    def __init__(self, encoder: Encoder, reader: PictureReader):
        self.encoder, self.reader, self.token, self.image = encoder, reader, reader.token, reader.image
        self._lock = threading.Lock()

    @within_limits()
    def encode(self, levels: np.ndarray) -> ImageRows:
        """Rows of a picture in the encoder's size. Raises DeviceError: memory is at an end."""
        processor = self.reader.processor
        grid = levels.shape[0] // processor.patch, levels.shape[1] // processor.patch
        with self._lock:
            return self.encoder(processor.patches(levels), grid)


class NoVision:
    """Replaces `Vision` if a model's images cannot be read; using it raises an error with the reason."""

    token = -1  # no prompt has it

    def __init__(self, reason: str):
        self.reason = reason

    @property
    def reader(self) -> "NoVision":
        return self

    def image(self, source: ImageSource) -> ReadImage:
        raise RequestError(self.reason)

    def encode(self, levels: np.ndarray) -> ImageRows:
        raise RequestError(self.reason)


def checked_rows(rows: int) -> int:
    """Raises RequestError if an image cannot have this number of rows."""
    if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
        raise RequestError(f"image_tokens is {rows!r}; expected a number from 1 to {MOST_ROWS}")
    return rows


def open_vision(located: Located, args: ModelArgs, wanted: bool = True) -> "VisionFiles | NoVision":
    """The `Vision` of a model, or a `NoVision` with the reason.

    Raises:
        ConfigError, ModelFileError: as `find_vision`.
    """
    return usable(find_vision(located, args) if wanted else None, args, wanted)


def open_reader(located: Located, wanted: bool = True, rows: int = IMAGE_ROWS) -> "PictureReader | NoVision":
    """The reader that a model's `Vision` has, without the encoder's tensors.

    Raises:
        ConfigError, ModelFileError: as `find_vision`.
    """
    files = open_vision(located, located.args, wanted)
    return files if isinstance(files, NoVision) else files.reader(rows)


def usable(files: VisionFiles | None, args: ModelArgs, wanted: bool = True) -> "VisionFiles | NoVision":
    """The encoder, or the reason why it cannot be used here."""
    if not wanted:
        return NoVision("images are off (--no-vision); start without it")
    if files is None:
        return NoVision(f"this {args.model_type} model has no image encoder that is known here; send text alone")
    return files if is_installed() else NoVision(not_installed())
