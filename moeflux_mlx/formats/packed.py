"""The files that hold a model's experts: `packed_experts/`, or experts in place in a checkpoint's safetensors files;
and the places of the bytes of an expert's record: pieces of files, joined into few reads.

Every length is checked before anything runs. Experts in place are pieces of several tensors, at any offset; their
scales and biases are searched for NaN and infinity, of which a single one would silently spoil every answer. This
module knows files and which of their bytes belong to which field of a record, and reads none. The contents of records
are defined in `record`, `packing` finds tensors in a checkpoint, and the source of experts decides when to read them.
Work that is done for every read of an expert is kept small.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ModelFileError
from ..files import read_json
from ..quant import GRID, MODES, NAN
from ..spec import ModelArgs
from .layout_file import directories_of, from_json
from .record import BLOCK_BYTES, ExpertLayout, Field, Record

GAP_BYTES = 64 << 10  # between two pieces: reading so much for nothing takes no longer than another read
ALONE_BYTES = 256 << 10  # a piece that could be read to its place, and is smaller, is better read with its neighbours
RUN_BYTES = 2 << 20  # the most bytes of a run through scratch memory, which each thread has
RUN_PIECES = 256  # a system call takes 1024 places to read to; with a gap before each piece these are half of it


class FilePiece(NamedTuple):
    """`length` bytes from `offset` on in the file `path`, which belong `place` bytes from a record's start."""

    path: Path
    offset: int
    length: int
    place: int

    def cut(self, start: int, stop: int) -> "FilePiece":
        """The part of the piece in bytes [start, stop) of the file."""
        first, last = max(start, self.offset), min(stop, self.offset + self.length)
        return FilePiece(self.path, first, last - first, self.place + first - self.offset)

    def moved(self, distance: int) -> "FilePiece":
        """The same bytes, `distance` later in memory."""
        return self._replace(place=self.place + distance)


class Run(NamedTuple):
    """Bytes [start, stop) of a file, which one read brings, and the pieces in them, ascending.

    `is_aligned` says that direct I/O can fill the place itself, in whole blocks: there is one piece, and what follows
    it up to the end of its last block may be overwritten.
    """

    path: Path
    start: int
    stop: int
    pieces: tuple[FilePiece, ...]
    is_aligned: bool = False

    @property
    def window(self) -> tuple[int, int]:
        """The whole blocks around it."""
        return self.start - self.start % BLOCK_BYTES, -(-self.stop // BLOCK_BYTES) * BLOCK_BYTES

    def with_gaps(self) -> Iterator[tuple[int, FilePiece]]:
        """Each piece, after the number of bytes between it and the one before."""
        end = self.start
        for piece in self.pieces:
            yield piece.offset - end, piece
            end = piece.offset + piece.length


def runs_of(pieces: Sequence[FilePiece], room: int, most: int = RUN_BYTES) -> list[Run]:
    """The reads that bring `pieces`, which do not overlap, into memory of `room` bytes.

    Neighbours in a file are read together. What cannot be read to its place directly is cut into runs of about equal
    length, of at most `most` bytes and a block, at the borders of blocks, so that no block is read twice.
    """
    runs: list[Run] = []
    end = max([piece.place + piece.length for piece in pieces])
    alone = ALONE_BYTES if len(pieces) > 1 else 0
    for piece in sorted(pieces, key=lambda one: (str(one.path), one.offset)):
        if piece.length >= alone and _fits_directly(piece, end, room):
            runs.append(Run(piece.path, piece.offset, piece.offset + piece.length, (piece,), is_aligned=True))
        else:
            for part in _parts(piece, most):
                _add(runs, part, most)
    return runs


def _fits_directly(piece: FilePiece, end: int, room: int) -> bool:
    """Whether the blocks that hold the piece can be read to its place, and spoil nothing behind it."""
    blocks = -(-piece.length // BLOCK_BYTES) * BLOCK_BYTES
    if piece.offset % BLOCK_BYTES or piece.place % BLOCK_BYTES:
        return False
    return blocks == piece.length or piece.place + piece.length == end and piece.place + blocks <= room


def _parts(piece: FilePiece, most: int) -> list[FilePiece]:
    """The piece, or about equal parts of it that end where blocks do."""
    if piece.length <= most:
        return [piece]
    first, stop = piece.offset - piece.offset % BLOCK_BYTES, piece.offset + piece.length
    step = -(-piece.length // (-(-piece.length // most) * BLOCK_BYTES)) * BLOCK_BYTES
    cuts = [piece.offset, *range(first + step, stop - BLOCK_BYTES + 1, step), stop]
    return [piece.cut(a, b) for a, b in pairwise(cuts)]


def _add(runs: list[Run], piece: FilePiece, most: int) -> None:
    """Adds a piece to the last run if it is near, else as a new run."""
    stop = piece.offset + piece.length
    last = runs[-1] if runs else None
    if (
        last is None
        or last.path != piece.path
        or last.is_aligned
        or piece.offset - last.stop > GAP_BYTES
        or stop - last.start > most
        or len(last.pieces) == RUN_PIECES
    ):
        runs.append(Run(piece.path, piece.offset, stop, (piece,)))
    else:
        runs[-1] = Run(last.path, last.start, stop, (*last.pieces, piece))


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
