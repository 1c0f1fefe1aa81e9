"""Computes the experts of many rows: rows are sorted by expert, and each expert is multiplied with all of its rows at
once.

Where `expert_rows` is chosen, it multiplies the rows from the codes. Otherwise, with MLX, an expert with few rows is
multiplied from its codes, in blocks of rows. An expert with many rows is dequantised, and experts with similar row
counts share one batched product. Only the number of an expert's rows decides between the two. On the CPU the native
kernels read records in place.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..formats.record import Projection, Record
from . import backend, gpu_time
from .arrangement import Among, Batch, arrange
from .backend import AnyArray, Array, EitherArray
from .chips import M5_GENERATION, generation_of
from .combine import RowNorm, combined
from .dequantize import DenseParts, dense, dequantized_records, linear_biases, views
from .expert_rows import expert_rows, starts_of
from .experts import activated, expert_down_combine, expert_gate_up, native_refusal
from .forms import factors, is_computed, settings
from .gather_rows import gather_rows
from .interrupt import check
from .records import Records
from .tiles import tile_of

# Rows of an expert that one packed product takes: CUDA's reads an expert once for each block, at the price of 16 rows
# or more, and its bits do not depend on the other blocks (results.tsv, "prefill"). Metal's reads an expert once for
# each tile of 32 rows, from the M5 on of 64, if a block has as many (`get_qmv_batch_limit` of MLX's quantized.cpp), and
# takes views of records if they are in one array; its product of sorted single rows would copy them. Not measured on
# Metal.
BLOCK_ROWS = {"cuda": 16, "metal": 32, "ops": 1}
M5_BLOCK = 64
PLAIN_DENSE = 32  # rows from which an expert is dequantised where there are no kernels
PIECE_ROWS = 16384  # the most rows of one product; limits a wave's memory for any distribution of rows
NATIVE_ROWS = 1024  # the same for the native kernels, which are as fast with it


class GroupedRows:
    """The rows of a layer's tokens sorted by expert, and the experts' outputs.

    Args:
        x: [T, H].
        ids: [T, K], the experts of each token.
        counts: [E] rows of each expert.
        waves: the experts in use, in those groups, and in that order, in which they are multiplied.
        record: the geometry of the experts.
        tokens: [T], the rows of x that `ids` belong to, if not all.
        among: what a single process would multiply in each wave, if this is one of several.
        on_units: whether `expert_rows` multiplies them.
    """

    def __init__(
        self,
        x: Array,
        ids: np.ndarray,
        counts: np.ndarray,
        waves: Sequence[np.ndarray],
        record: Record,
        tokens: np.ndarray | None = None,
        among: Sequence[Among] | None = None,
        on_units: bool = False,
    ):
        flat, experts = ids.reshape(-1), np.concatenate(waves)
        rank = np.zeros(len(counts), np.uint8 if len(experts) <= 256 else np.uint16)  # sorted by radix: short is fast
        rank[experts] = np.arange(len(experts))
        order = np.argsort(rank[flat], kind="stable")  # an expert's rows are in token order
        rows = order.astype(np.int32) // np.int32(ids.shape[1])
        if tokens is not None:
            rows = tokens[rows].astype(np.int32)
        self._ends = np.cumsum(counts[experts])
        self._firsts = np.cumsum([0, *map(len, waves)])
        self._is_native = backend.native_takes(x, native_refusal, record)
        self._x: Any = x
        self._waves, self._on_units, starts = waves, on_units, np.zeros(0, np.int32)
        if self._is_native:
            self._rows, own = rows, np.arange(flat.size, dtype=np.int32)
            self._outputs: list[Any] = [np.empty((flat.size, x.shape[1]), np.float32)]
        else:
            self._x, self._outputs = backend.leave(x), []
        self._batches: list[list[Batch]] = [[]] * len(waves)
        if on_units:
            own = source = np.arange(flat.size, dtype=np.int32)
            starts = np.concatenate([starts_of(counts[wave]) for wave in waves])
        elif not self._is_native:
            target = backend.name()
            parts, dense = [counts[wave] for wave in waves], dense_from(target, record)
            self._batches, own, source = arrange(parts, block_rows(target), dense, among)
        places = np.empty(flat.size, np.int32)
        places[order] = own
        self._places = places.reshape(ids.shape)
        if not self._is_native:
            # In one array: on CUDA the first kernel that reads an array of the host waits for a page fault, which
            # took 0.1 ms on an H200.
            numbers = [rows[source], places, experts, starts]
            ends = np.cumsum([len(part) for part in numbers[:-1]]).tolist()
            given = mx.split(mx.array(np.concatenate(numbers).astype(np.int32)), ends)
            self._source, where, self._experts, self._starts = given
            self._where = where.reshape(ids.shape)

    def multiply(
        self, index: int, slots: np.ndarray, records: Records, between: Callable[[], object] | None = None
    ) -> EitherArray:
        """Multiplies the rows of the next wave, `index`, whose experts are in the rows `slots` of the records.

        The returned array is computed when the wave is; a numpy array is computed already.
        """
        if self._is_native:
            return self._multiply_native(index, slots, records, between)
        records, slots = records.for_mlx(slots)
        first, last = self._firsts[index : index + 2]
        numbers = self._experts[first:last] if slots is self._waves[index] else mx.array(slots.astype(np.int32))
        made: list[mx.array] = []
        most, gathered = piece_rows(records.record), 0
        for piece in self._pieces(index, slots, numbers, records):
            gathered += len(piece)
            if gathered > most:
                gpu_time.commit(gathered, *made)
                gathered = len(piece)
            made.append(piece)
        backend.start(*made)  # all of them, because a lazy result would read the records after they are overwritten
        self._outputs += made
        return made[-1]

    def _pieces(self, index: int, slots: np.ndarray, numbers: mx.array, records: Records) -> Iterator[mx.array]:
        """The outputs of a wave's rows, in the order of their places."""
        for batch in self._batches[index]:
            some = batch.experts
            yield from _products(self._x, self._source, batch, slots[some], numbers[some], records)
        if self._on_units:
            first, last = self._firsts[index : index + 2]
            starts = self._starts[first + index : last + index + 1]  # each wave has one more than experts
            begin, stop = self._rows_of(index)
            most = most_rows(records.record) or stop - begin
            for part in _parts(stop - begin, most):
                own = starts if most >= stop - begin else mx.clip(starts - part.start, 0, part.stop - part.start)
                source = self._source[begin + part.start : begin + part.stop]
                yield expert_rows(self._x, own, source, numbers, records)

    def _rows_of(self, index: int) -> tuple[int, int]:
        """The first row of a wave, and the one after its last."""
        start, stop = self._firsts[index : index + 2]
        return (int(self._ends[start - 1]) if start else 0), int(self._ends[stop - 1])

    def _multiply_native(
        self, index: int, slots: np.ndarray, records: Records, between: Callable[[], object] | None
    ) -> np.ndarray:
        experts, (first, last) = slice(self._firsts[index], self._firsts[index + 1]), self._rows_of(index)
        for start in range(first, last, NATIVE_ROWS):
            check()
            if between is not None:
                between()
            stop = min(start + NATIVE_ROWS, last)
            owners = np.searchsorted(self._ends[experts], np.arange(start, stop), side="right")
            taken, where = self._x[self._rows[start:stop]], slots[owners].astype(np.int32)
            self._outputs[0][start:stop] = native_rows(taken, where, records)
        return self._outputs[0]

    def outputs(self) -> EitherArray:
        """The experts' outputs in the order of the ids, [T * K, H] in x's dtype. Every wave must have been
        multiplied.
        """
        if self._is_native:
            return self._outputs[0][self._places.reshape(-1)]
        return gather_rows(mx.concatenate(self._outputs), self._where.reshape(-1))

    def combined(self, weights: Array, residual: Array, shared: Array | None, norm: RowNorm | None = None) -> Array:
        """residual + sum_k weights[:, k] * norm(output of expert ids[:, k]) + shared, all [T, H].

        Every wave must have been multiplied.
        """
        out: AnyArray = self._outputs[0] if self._is_native else mx.concatenate(self._outputs)
        self._outputs.clear()
        where = self._places if self._is_native else self._where
        return combined(out, where, weights, residual, shared, norm)


def native_rows(x: np.ndarray, slots: np.ndarray, records: Records, alone: bool = False) -> np.ndarray:
    """expert(slots[n])(x[n]) for every row of x [N, H], by the native kernels.

    `alone`: with the bits of a row of a step, else with those of a prompt's.
    """
    ones, zeros = np.ones((len(x), 1), np.float32), np.zeros((len(x), records.record.hidden_size), np.float32)
    where = slots.reshape(-1, 1)
    act = expert_gate_up(x, where, records, alone=alone)
    return expert_down_combine(act, where, records, ones, zeros, alone=alone)


# ---- where rows go on MLX's side


def dense_from(target: str, record: Record) -> int:
    """The number of rows from which such an expert is dequantised in a prompt."""
    if not all(part.quant.is_of_mlx and is_computed(target, part.quant) for part in record.projections):
        return 1
    return PLAIN_DENSE if target == "ops" else tile_of(target, "prompt_experts").dense


def block_rows(target: str) -> int:
    """The rows of a block of an expert with few rows."""
    if target == "metal":
        architecture = str(mx.device_info().get("architecture", ""))
        return M5_BLOCK if generation_of(architecture) >= M5_GENERATION else BLOCK_ROWS[target]
    return BLOCK_ROWS[target]


# ---- products on MLX's side


def _products(
    x: mx.array, source: mx.array, batch: Batch, slots: np.ndarray, numbers: mx.array, records: Records
) -> Iterator[mx.array]:
    """The outputs [n, H] of a batch's rows, in pieces, in the order of their places.

    Args:
        x: [T, H].
        source: [P] the row of x at each place.
        slots: where the batch's experts lie in the records, on the host.
        numbers: the same, int32.
    """
    start, H, most = batch.start, x.shape[1], piece_rows(records.record)
    if not batch.rows:
        size, local = batch.block, mx.array(batch.owners)
        biases = linear_biases(records, slots, x.dtype)
        whole = views(records, x.dtype)
        matrices = whole or dense(records, slots, x.dtype)
        owners = numbers[local].astype(mx.uint32) if whole else local
        for part in _parts(len(batch.owners), most // size):
            at, own = start + part.start * size, owners[part]
            taken = gather_rows(x, source[at : at + own.size * size].reshape(own.size, size))
            added = biases and tuple(bias[local[part]][:, None] for bias in biases)
            yield grouped_ffn(taken, matrices, records.record, own, added).reshape(-1, H)
        return
    for part, width in batch.parts(most // batch.rows):
        count, own = part.stop - part.start, numbers[part]
        if width > count:  # the places of others
            own = mx.concatenate([own, mx.broadcast_to(own[:1], (width - count,))])
        gate_up, down = dequantized_records(records, own, x.dtype)
        some = np.concatenate([slots[part], np.repeat(slots[part][:1], width - count)])
        biases = linear_biases(records, some, x.dtype)
        for rows in _parts(batch.rows, most):
            length = rows.stop - rows.start
            at = start + part.start * batch.rows + rows.start
            places = source[at : at + count * length]
            if width > count:
                places = mx.concatenate([places, mx.broadcast_to(places[:1], ((width - count) * length,))])
            taken = gather_rows(x, places.reshape(width, length))
            made = dense_ffn(taken, gate_up, down, records.record, biases)
            yield made[:count].reshape(-1, H)


def most_rows(record: Record) -> int | None:
    """The most rows that one command buffer multiplies; None: any number."""
    return gpu_time.rows_at_once(record.hidden_size, len(record.projections) * record.moe_intermediate_size)


def is_cut(record: Record, rows: int) -> bool:
    """Whether so many rows are multiplied in several command buffers."""
    return rows > (most_rows(record) or rows)


def piece_rows(record: Record) -> int:
    """The most rows of one product of MLX, and on Metal of one command buffer."""
    return min(PIECE_ROWS, most_rows(record) or PIECE_ROWS)


def _parts(n: int, size: int) -> Iterator[slice]:
    """0 to n, `size` at a time, or one."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(start + max(size, 1), n))


def dense_ffn(
    x: mx.array, gate_up: mx.array, down: mx.array, record: Record, biases: tuple[mx.array, ...] | None = None
) -> mx.array:
    """down(activation(gate x, up x)) of each expert on its own rows: [n, rows, H].

    Args:
        x: [n, rows, H].
        gate_up: [n, 2 I, H], the rows of gate, then those of up; of records of two matrices [n, I, H].
        down: [n, H, I].
        record: says how gate and up are joined.
        biases: added to the products with gate and up [n, I] and down [n, H].
    """
    made: list[mx.array] = list(mx.split(x @ gate_up.swapaxes(-1, -2), len(record.firsts), axis=-1))
    if biases is None:
        return activated(made[0], made[-1], record) @ down.swapaxes(-1, -2)
    *of_firsts, of_down = (bias[:, None] for bias in biases)
    made = [product + bias for product, bias in zip(made, of_firsts, strict=True)]
    return activated(made[0], made[-1], record) @ down.swapaxes(-1, -2) + of_down


def grouped_ffn(
    x: mx.array,
    parts: Sequence[DenseParts],
    record: Record,
    owners: mx.array,
    biases: tuple[mx.array, ...] | None = None,
) -> mx.array:
    """down(activation(gate x, up x)) with each block's own expert: [B, size, H].

    Args:
        x: [B, size, H], sorted by expert.
        parts: the records' matrices, as `dense` or `views` gives them.
        record: how they are stored and joined.
        owners: [B] uint32 index into them.
        biases: added to the products of each block, each [B, 1, rows].
    """

    def product(x: mx.array, which: int) -> mx.array:
        made = _multiply(x, parts[which], record.projections[which], owners)
        return made if biases is None else made + biases[which]

    firsts = [product(x, i) for i in range(len(record.firsts))]
    return product(activated(firsts[0], firsts[-1], record), -1)


def _multiply(x: mx.array, part: DenseParts, projection: Projection, owners: mx.array) -> mx.array:
    quant, third = projection.quant, part[2] if len(part) > 2 else None
    biases = third if quant.has_biases else None
    product = mx.gather_qmm(x, part[0], part[1], biases, None, owners, True, **settings(quant))
    if third is None or not quant.has_global_scale:
        return product
    return (product * factors(third)[owners]).astype(x.dtype)
