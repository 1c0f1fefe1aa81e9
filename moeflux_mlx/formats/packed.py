"""The files that hold a model's experts: `packed_experts/`, or experts in place in a checkpoint's safetensors files.

Every length is checked before anything runs. Experts in place are pieces of several tensors, at any offset; their
scales and biases are searched for NaN and infinity, of which a single one would silently spoil every answer. This
module knows files and which of their bytes belong to which field of a record. The contents of records are defined in
`record`, `packing` finds tensors in a checkpoint, and the source of experts decides when to read them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ModelFileError
from ..files import read_json
from ..quant import GRID, MODES, NAN
from ..spec import ModelArgs
from .layout_file import directories_of, from_json
from .pieces import FilePiece
from .record import ExpertLayout, Field, Record

FOLDER = "packed_experts"
LAYOUT = "layout.json"  # the file name in it
FINISHED = f"{FOLDER}/{LAYOUT}"  # a directory that has it is a finished model
STATE = "convert_state.json"  # the state file of an unfinished conversion


def is_packed(path: Path) -> bool:
    """Whether a directory holds a packed model, whose last file is written."""
    return (path / FINISHED).exists()


class PackedExperts:
    """The layer files of one model. Records may lie in several directories by turns, so that each drive reads a part of
    every layer.

    Args:
        folders: of n of them, number i has a file of each layer with the experts i, i + n, i + 2n, ...
    """

    def __init__(self, layout: ExpertLayout, folders: Sequence[Path]):
        self.layout, self.folders = layout, tuple(folders)
        self._files = {i: [folder / layout.file_name(i) for folder in self.folders] for i in layout.records}

    @property
    def paths(self) -> dict[int, Path]:
        """The first file of each layer, which is the only one if there is one directory."""
        return {layer: files[0] for layer, files in self._files.items()}

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of every file."""
        count, stride = self.layout.count, {layer: record.stride for layer, record in self.layout.records.items()}
        return {
            file: stride[layer] * len(range(number, count(layer), len(files)))
            for layer, files in self._files.items()
            for number, file in enumerate(files)
        }

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The expert's record, which is a single piece."""
        index, number = divmod(expert, len(self.folders))
        start, size = self.layout.start(layer, index), self.layout.records[layer].size
        return (FilePiece(self._files[layer][number], start, size, 0),)


def open_packed(model_path: str | Path, args: ModelArgs) -> PackedExperts:
    """The experts of a packed model directory.

    Raises:
        ModelFileError: a file or a directory is missing, a file has the wrong length, or layout.json disagrees.
    """
    folder = Path(model_path) / FOLDER
    layout_file = folder / LAYOUT
    content = read_json(layout_file)
    layout = from_json(content, args, layout_file)
    also = [Path(other) for other in directories_of(content, layout_file)]
    for other in also:
        if not other.is_dir():
            raise ModelFileError(
                f"{other}, which has some of the experts, does not exist: connect its drive, or, if it is elsewhere "
                f"now, change its path in {layout_file}"
            )
    experts = PackedExperts(layout, [folder, *also])
    for path, size in experts.sizes.items():
        check_length(path, size)
    return experts


def check_length(path: Path, wanted: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist; it should hold {wanted} bytes") from None
    if size != wanted:
        raise ModelFileError(f"{path} has {size} bytes; the layout needs {wanted}")


# Of a dtype, or of a kind of scale: the type of a value's bits, and those that are all set in NaN and infinity.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    **{scale: ("<u1", bits) for scale, bits in NAN.items()},
}


def not_finite(record: Record, rows: np.ndarray) -> tuple[int, Field] | None:
    """The first row and field of `rows`, uint8 [n, at least the record's size], that hold NaN or infinity, if any."""
    for projection in record.projections:
        for field in (one for one in projection.fields[1:] if one.part != GRID):
            is_nested = projection.quant.is_nested and field.dtype == "U8"
            small = "F16" if is_nested else projection.quant.scale
            kind, exponent = EXPONENTS[small if field.dtype == "U8" else field.dtype]
            bits = rows[:, field.offset : field.end].view(kind)
            if is_nested:
                mode = MODES[projection.quant.mode]
                bits = bits.reshape(len(rows), -1, mode.nested // 2)[..., : mode.header].reshape(len(rows), -1)
            spoilt = (bits & exponent == exponent).any(axis=1)
            if spoilt.any():
                return int(spoilt.argmax()), field
    return None


class Spread(NamedTuple):
    """One field of the records of a layer's experts: by expert its file and where in it its `length` bytes begin."""

    paths: Sequence[Path]
    offsets: Sequence[int]
    length: int
    place: int

    def piece(self, expert: int) -> FilePiece:
        return FilePiece(self.paths[expert], self.offsets[expert], self.length, self.place)


class InPlaceExperts:
    """Args:
    layout: of the records that are made in memory.
    fields: by layer, all fields of its records.
    sizes: bytes of each file, as its header was checked against them.
    """

    def __init__(self, layout: ExpertLayout, fields: Mapping[int, Sequence[Spread]], sizes: Mapping[Path, int]):
        self.layout, self.sizes = layout, sizes
        self._fields = fields

    def pieces(self, layer: int, expert: int) -> tuple[FilePiece, ...]:
        """The pieces of the expert's record, one for each of its fields."""
        return tuple([spread.piece(expert) for spread in self._fields[layer]])

    def check_scales(self, layer: int, first: int, rows: np.ndarray) -> None:
        """Checks the records [experts, words] from expert `first` on, because no conversion has checked them.

        Raises:
            ModelFileError: a scale or bias is NaN or infinite.
        """
        self._check(layer, first, rows.view(np.uint8))

    def check_record(self, layer: int, expert: int, memory: memoryview) -> None:
        """The same for the record of one expert, in `memory`."""
        self._check(layer, expert, np.frombuffer(memory, np.uint8)[None])

    def _check(self, layer: int, first: int, rows: np.ndarray) -> None:
        fault = not_finite(self.layout.records[layer], rows)
        if fault is not None:
            expert, field = first + fault[0], fault[1]
            before = (piece for piece in self.pieces(layer, expert) if piece.place <= field.offset)
            path = max(before, key=lambda piece: piece.place).path
            raise ModelFileError(
                f"{path}: {field.name} of {self.layout.named((layer, expert))} holds NaN or infinite values; "
                "download it again"
            )


ExpertFiles = PackedExperts | InPlaceExperts  # the files that hold one model's experts
