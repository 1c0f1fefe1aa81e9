"""Many rows through the experts they are sorted by: each expert is multiplied with all of its rows.

On MLX's side records are taken apart into dense stacks, and rows go in blocks of one expert each; on the CPU the native
kernels read records in place.
"""

import mlx.core as mx
import numpy as np

from ..formats.record import Projection
from . import backend, native
from .backend import Array, view
from .elementwise import silu_mul
from .experts import Records, is_read

LARGEST_INDEX = 2**31 - 1
# Rows of an expert that one product takes: CUDA's packed product reads an expert once for each block, at the price of
# 16 rows or more, and its bits do not depend on the other blocks (results.tsv, "prefill"). Metal's has tiles for sorted
# single rows; not measured.
BLOCK_ROWS = {"cuda": 16, "metal": 1, "ops": 1}

Dense = list[mx.array]  # a projection's codes, scales and biases [n, rows, ...]


def expert_rows(x: Array, rows: np.ndarray, slots: np.ndarray, records: Records) -> tuple[Array, np.ndarray]:
    """expert(slots[n])(x[rows[n]]) for every n.

    When it returns, records that are not `lasting` have been read. The same slots give the same bits wherever they are.

    Args:
        x: [T, H].
        rows: [N] rows of x.
        slots: [N] rows of the records, equal ones side by side.

    Returns:
        [P, H] outputs, and where among them those of the N rows are, [N].
    """
    if isinstance(x, np.ndarray):
        return _native(x[rows], slots, records), np.arange(len(rows))
    used, local = _numbered(slots)
    size = BLOCK_ROWS[backend.name()]
    source, owners, places = in_blocks(local, size)
    parts = dense(records, used, x.dtype)
    if not records.lasting:
        mx.eval(parts)
    blocks = x[mx.array(rows[source])].reshape(len(owners), size, -1)
    out = grouped_ffn(blocks, parts, records, mx.array(owners))
    mx.async_eval(out)
    return out.reshape(len(source), -1), places


def waves_show() -> bool:
    """Whether the bits of a row depend on which other experts' rows are multiplied with it."""
    return BLOCK_ROWS[backend.name()] == 1


def _native(x: np.ndarray, slots: np.ndarray, records: Records) -> np.ndarray:
    if not is_read(records.record):
        out, places = expert_rows(mx.array(x), np.arange(len(x)), slots, records)
        return view(out)[places]
    ones, zeros = np.ones((len(x), 1), np.float32), np.zeros((len(x), records.record.hidden_size), np.float32)
    where = slots.reshape(-1, 1)
    act = native.expert_gate_up(x, records.blob, where, records.record)
    return native.expert_down_combine(act, records.blob, where, records.record, ones, zeros)


def _numbered(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ones in the order in which they come, and for each slot its number there."""
    starts = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
    return slots[starts], np.repeat(np.arange(len(starts)), np.diff(starts, append=len(slots)))


def in_blocks(local: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts rows into blocks of `size` that have one expert each; what an expert's last block lacks repeats row 0.

    Args:
        local: [N] each row's expert, ascending from 0 without gaps.

    Returns:
        The row at each place of the B blocks, int32 [B * size]; each block's expert, uint32 [B]; each row's place,
        int32 [N].
    """
    counts = np.bincount(local)
    blocks = -(-counts // size)
    starts, firsts = np.cumsum(counts) - counts, np.cumsum(blocks) - blocks
    places = firsts[local] * size + np.arange(len(local)) - starts[local]
    source = np.zeros(blocks.sum() * size, np.int32)
    source[places] = np.arange(len(local))
    return source, np.repeat(np.arange(len(counts)), blocks).astype(np.uint32), places.astype(np.int32)


def dense(records: Records, where: np.ndarray, dtype: mx.Dtype) -> tuple[Dense, Dense, Dense]:
    """gate, up and down of the records in the rows `where`, each array dense; scales and biases in `dtype`."""
    if isinstance(records.blob, np.ndarray):  # the CPU without native kernels
        records, where = Records(mx.array(records.blob[where]), records.record), np.arange(len(where))
    blob, record, first = records.blob, records.record, int(where[0])
    run = np.array_equal(where, np.arange(first, first + len(where)))  # copied faster
    if not run and blob.size > LARGEST_INDEX:
        # MLX's gather counts in 32 bits where the view is small, whatever lies between its rows.
        blob, first, run = mx.take(blob, mx.array(where), axis=0), 0, True

    def matrix(projection: Projection) -> Dense:
        made = []
        for field in projection.fields:
            columns = blob[:, field.words]
            words = (
                mx.contiguous(columns[first : first + len(where)]) if run else mx.take(columns, mx.array(where), axis=0)
            )
            if field.dtype == "BF16":
                words = mx.view(words, mx.bfloat16).astype(dtype)
            made.append(words.reshape(len(where), field.shape[0], -1))
        return made

    return matrix(record.gate), matrix(record.up), matrix(record.down)


def grouped_ffn(x: mx.array, parts: tuple[Dense, Dense, Dense], records: Records, owners: mx.array) -> mx.array:
    """down(silu(gate x) * up x) with each block's own expert: [B, size, H].

    Args:
        x: [B, size, H], sorted by expert.
        parts: gate, up and down, as `dense` gives them.
        owners: [B] uint32 index into them, ascending.
    """
    record = records.record
    gate, up = (_multiply(x, part, of, owners) for part, of in zip(parts, (record.gate, record.up), strict=False))
    return _multiply(silu_mul(gate, up), parts[2], record.down, owners)


def _multiply(x: mx.array, part: Dense, projection: Projection, owners: mx.array) -> mx.array:
    quant = projection.quant
    codes, scales, biases = part
    return mx.gather_qmm(
        x,
        codes,
        scales,
        biases,
        rhs_indices=owners,
        transpose=True,
        group_size=quant.group_size,
        bits=quant.bits,
        sorted_indices=True,
    )
