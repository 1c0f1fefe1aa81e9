"""The places of the bytes of an expert's record: pieces of files, joined into few reads.

The runs cover every piece exactly once. This module reads nothing. Work that is done for every read of an expert is
kept small.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .record import BLOCK_BYTES

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
