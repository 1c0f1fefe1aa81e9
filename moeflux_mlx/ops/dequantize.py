"""Unpacks records for large products: into dense arrays of their fields, or floats."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from ..formats.record import FIXED, SCALE_DTYPES, Field, Record
from ..quant import TABLE
from . import backend
from .backend import FLOATS
from .forms import DTYPES, code_number, form_of, unpacked_float32
from .launch import NO_KERNELS, Kernel, Launch, Reason, Shape, ceildiv, require
from .records import ONE_ARRAY, RecordArrays, Records, check_blob, is_read, places_of, unread_reason, words_of
from .tiles import planned, tile_of

LARGEST_INDEX = 2**31 - 1

DenseParts = list[mx.array]  # the arrays of a projection's form, [n, rows, ...]; of a global scale [n, 1, 1]


def dequantized_records(records: Records, slots: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """The matrices of some records, computed in float32 with one rounding, and rounded once to `dtype`.

    The bits are those of `mx.dequantize` with scales and biases in float32, rounded.

    Args:
        records: on MLX's side.
        slots: [n] uint32 or int32, rows of the records in any order; they may repeat.
        dtype: float32, bfloat16 or float16.

    Returns:
        gate above up, [n, 2 * I, H], or up alone, [n, I, H], and down, [n, H, I].

    Raises:
        RequestError: a shape or dtype the kernel does not take.
    """
    record = records.record
    memory, blob, arrays = records.inputs()
    given = slots.shape, dtype, record
    plans = tuple(plan(backend.name(), blob, *given, which, arrays) for which in (0, 1))
    if isinstance(plans[0], Reason) or isinstance(plans[1], Reason):
        return _dequantized_ops(records, slots, dtype)
    return plans[0](*memory, slots)[0], plans[1](*memory, slots)[0]


@planned("dequantize", everywhere=True)
def plan(
    target: str,
    blob: Shape,
    slots: Shape,
    dtype: mx.Dtype,
    record: Record,
    which: int,
    arrays: RecordArrays = ONE_ARRAY,
) -> Launch | Reason:
    """The launch for gate and up, or up alone (0), or for down (1)."""
    check_blob(blob, record)
    require(len(slots) == 1 and slots[0] > 0, f"slots are {slots}; expected [n]")
    require(dtype in FLOATS, f"dtype is {dtype}; the kernel writes float32, bfloat16 or float16")
    if target == "ops" or not is_read(record):
        return NO_KERNELS if target == "ops" else unread_reason(record)
    matrices = (record.down,) if which else record.firsts
    first, last = matrices[0], matrices[-1]
    count, rows, columns = len(matrices), first.rows, first.columns
    form, is_table = form_of(first), first.quant.codes == TABLE
    tile = tile_of(target, "expert_dequantize")
    template = {"X": dtype, "COUNT": count, "ROWS": rows, "COLS": columns, "WORDS": blob[1]}
    template |= {"ROW_BITS": arrays.row_bits, **form.record_template}
    template |= {"R": tile.rows, "SG": tile.simdgroups} | ({} if is_table else {"KIND": code_number(first.quant)})
    template |= places_of("FIRST", first) | places_of("LAST", last)
    threads = 32 * tile.simdgroups
    groups = (ceildiv(count * rows * columns // (form.chunk if is_table else 8), tile.rows * threads), slots[0])
    name, header = ("expert_dequantize_chunks", form.header) if is_table else ("expert_dequantize", "")
    kernel = Kernel(name, f"{arrays.names} slots", "out", header)
    return Launch(target, kernel, template, groups, threads, [((slots[0], count * rows, columns), dtype)])


def _dequantized_ops(records: Records, slots: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    record, parts = records.record, dense(records, np.array(slots), mx.float32)
    *firsts, down = (
        unpacked_float32(projection.quant, *part).astype(dtype)
        for part, projection in zip(parts, record.projections, strict=True)
    )
    return mx.concatenate(firsts, axis=1), down


def dense(records: Records, where: np.ndarray, dtype: mx.Dtype) -> list[DenseParts]:
    """The matrices of the records in the rows `where`, each array dense; float scales and biases in `dtype`."""
    matrices = records.record.projections
    taken = iter(_taken(records, where, [field for matrix in matrices for field in matrix.codes], dtype))
    return [[next(taken) for _ in matrix.codes] for matrix in matrices]


def views(records: Records, dtype: mx.Dtype) -> list[DenseParts] | None:
    """The matrices of all records without a copy, as `dense` gives those of some; None if they cannot be read so.

    MLX's packed products on Metal and on the CPU take views whose records are far apart, except for one, of sorted
    single rows. Its scales have x's dtype `dtype`, and a global scale is gathered, which counts in 32 bits.
    """
    matrices = records.record.projections
    kinds = {field.dtype for matrix in matrices for field in matrix.codes if field.dtype in SCALE_DTYPES}
    if backend.name() == "cuda" or not isinstance(records.memory, mx.array):
        return None
    if any(DTYPES[kind] != dtype for kind in kinds) or any(matrix.quant.has_global_scale for matrix in matrices):
        return None
    return [[_viewed(records.blob, field) for field in matrix.codes] for matrix in matrices]


def _viewed(blob: mx.array, field: Field) -> mx.array:
    """This field of all records, [S, ...]."""
    words = blob[:, field.words]
    return (words if field.dtype == "U32" else mx.view(words, DTYPES[field.dtype])).reshape(len(blob), *field.beside)


def linear_biases(records: Records, where: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, ...] | None:
    """The biases of the products with a record's matrices, each [n, rows] in `dtype`; None: no biases."""
    fields = [projection.bias for projection in records.record.projections if projection.bias is not None]
    return tuple(_taken(records, where, fields, dtype)) or None


def _taken(records: Records, where: np.ndarray, fields: Sequence[Field], dtype: mx.Dtype) -> list[mx.array]:
    """These fields of the records in the rows `where`; floating ones in `dtype`."""
    if not fields:
        return []
    made = []
    for field, words in zip(fields, _words(records, where, fields), strict=True):
        if field.dtype != "U32":
            words = mx.view(words, DTYPES[field.dtype])
        if field.dtype in SCALE_DTYPES and field.part not in FIXED:
            words = words.astype(dtype)
        made.append(words.reshape(len(where), *field.beside))
    return made


def _words(records: Records, where: np.ndarray, fields: Sequence[Field]) -> Iterator[mx.array]:
    """The words [n, ...] of each of these fields of the records in the rows `where`."""
    slots = mx.array(where)
    if not records.in_buffers:
        blob, first = records.blob, int(where[0])
        if np.array_equal(where, np.arange(first, first + len(where))):  # copied faster
            yield from (mx.contiguous(blob[first : first + len(where), field.words]) for field in fields)
            return
        if blob.size > LARGEST_INDEX:
            # MLX's gather counts in 32 bits if the view is small, even if its rows are far apart.
            blob = mx.take(blob, slots, axis=0)
            yield from (mx.contiguous(blob[:, field.words]) for field in fields)
            return
    yield from (words_of(records, slots, field.words) for field in fields)
