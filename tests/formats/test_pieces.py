"""Joining pieces into reads: every byte once, neighbours together, whole blocks only where nothing is overwritten."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.formats import packed as module
from moeflux_mlx.formats.packed import ALONE_BYTES, GAP_BYTES, RUN_BYTES, RUN_PIECES, FilePiece, runs_of
from moeflux_mlx.formats.record import BLOCK_BYTES

A, B = Path("a"), Path("b")


@st.composite
def scattered(draw):
    """Draws pieces of two files that do not overlap, in any order, and the memory that they fill."""
    pieces, place = [], 0
    ends = {A: draw(st.integers(0, 2 * BLOCK_BYTES)), B: draw(st.sampled_from([0, BLOCK_BYTES, 17]))}
    for _ in range(draw(st.integers(1, 9))):
        path = draw(st.sampled_from([A, B]))
        length = draw(
            st.sampled_from([1, 100, BLOCK_BYTES, ALONE_BYTES, ALONE_BYTES + 1, RUN_BYTES + 3, 3 * RUN_BYTES])
        )
        gap = draw(st.sampled_from([0, 1, GAP_BYTES, GAP_BYTES + 1]))
        pieces.append(FilePiece(path, ends[path] + gap, length, place))
        ends[path] += gap + length
        place += length
    return draw(st.permutations(pieces)), place + draw(st.sampled_from([0, BLOCK_BYTES]))


@given(scattered(), st.sampled_from([GAP_BYTES, ALONE_BYTES, RUN_BYTES]))
def test_runs_bring_every_byte_once_and_overwrite_none(case, most):
    wanted, room = case
    written = np.zeros(room, np.uint8)
    for run in runs_of(wanted, room, most):
        first, last = run.window
        assert run.start == run.pieces[0].offset and run.stop == run.pieces[-1].offset + run.pieces[-1].length
        assert first <= run.start < run.stop <= last and first % BLOCK_BYTES == last % BLOCK_BYTES == 0
        assert {piece.path for piece in run.pieces} == {run.path}
        assert all(0 <= gap <= GAP_BYTES for gap, _ in run.with_gaps())
        if run.is_aligned:
            (piece,) = run.pieces
            assert piece.offset == first and piece.place % BLOCK_BYTES == 0
            end = piece.place + last - first
            assert end <= room and not any(
                one.place < end and one.place >= piece.place + piece.length for one in wanted
            )
        else:
            assert last - first <= most + 2 * BLOCK_BYTES
        for piece in run.pieces:
            (whole,) = [one for one in wanted if one.place <= piece.place < one.place + one.length]
            assert piece.offset - whole.offset == piece.place - whole.place
            written[piece.place : piece.place + piece.length] += 1
    assert written.max() == 1 and written.sum() == sum(piece.length for piece in wanted)


def test_neighbours_and_small_gaps_are_one_read():
    near = [FilePiece(A, 5, 100, 0), FilePiece(A, 105, 100, 100), FilePiece(A, 205 + GAP_BYTES, 100, 200)]
    assert [len(run.pieces) for run in runs_of(near, 300)] == [3]
    far = [*near, FilePiece(A, 306 + 2 * GAP_BYTES, 100, 300), FilePiece(B, 0, 100, 400)]
    assert [len(run.pieces) for run in runs_of(far, 500)] == [3, 1, 1]


def test_long_pieces_are_cut_where_blocks_end():
    (first, *middle, last) = runs_of([FilePiece(A, 7, 3 * RUN_BYTES, 0)], 3 * RUN_BYTES)
    assert first.window[1] == first.stop and last.window[0] == last.start and middle
    assert all(run.window == (run.start, run.stop) for run in middle)


@given(st.integers(0, BLOCK_BYTES - 1), st.integers(1, 40 * BLOCK_BYTES), st.integers(1, 4))
def test_parts_are_equal_and_few(offset, length, blocks):
    most = blocks * BLOCK_BYTES
    runs = runs_of([FilePiece(A, offset, length, 1)], length + 1, most)
    sizes = [run.stop - run.start for run in runs]
    assert len(runs) <= -(-length // most) + 1 and sum(sizes) == length
    assert len(runs) == 1 or min(sizes) >= BLOCK_BYTES - offset % BLOCK_BYTES
    assert all(one.stop == other.start and one.stop % BLOCK_BYTES == 0 for one, other in pairwise(runs))


def test_a_run_has_no_more_pieces_than_a_system_call_accepts():
    many = [FilePiece(A, 20 * i, 10, 10 * i) for i in range(2 * RUN_PIECES + 1)]
    runs = runs_of(many, 10 * len(many))
    assert [len(run.pieces) for run in runs] == [RUN_PIECES, RUN_PIECES, 1]
    assert 2 * RUN_PIECES <= 1024


def test_an_aligned_piece_is_read_to_its_place():
    size = ALONE_BYTES + 1
    blocks = ALONE_BYTES + BLOCK_BYTES
    assert runs_of([FilePiece(A, BLOCK_BYTES, size, 0)], blocks)[0].is_aligned
    assert not runs_of([FilePiece(A, BLOCK_BYTES, size, 0)], size)[0].is_aligned  # there is no room for the last block
    assert not runs_of([FilePiece(A, BLOCK_BYTES + 1, size, 0)], blocks)[0].is_aligned
    both = runs_of([FilePiece(A, 0, size, 0), FilePiece(B, 0, size, size)], 2 * blocks)
    assert not any(run.is_aligned for run in both)  # the first piece would overwrite the second, whose place is odd


def test_what_is_read_to_scratch_memory_fits_it():
    assert RUN_BYTES >= GAP_BYTES and RUN_BYTES % BLOCK_BYTES == 0
    assert module.ALONE_BYTES <= RUN_BYTES
