"""The experts of a prompt's tokens as products of small matrices, on CUDA's matrix units or with Metal's
simdgroup_matrix: all rows of a layer, sorted by expert, take one launch for gate and up and one for down. On Metal only
`moeflux tune` chooses these kernels, because they have not been measured there.

The kernels unpack the codes where they multiply, so no matrix is written in floats, and they find an expert's rows
themselves, so the host does not wait for the router. A row's bits do not depend on the other rows, nor on where the
expert's record is.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..formats.record import Record
from ..kinds import FORMS
from . import backend
from .backend import FLOATS
from .forms import form_of
from .launch import NO_KERNELS, Kernel, Launch, Reason, Shape, Template, ceildiv, count, require
from .records import ONE_ARRAY, RecordArrays, Records, biases_of, check_blob, is_read, places_of, unread_reason
from .tiles import planned, tile_of

PLACES = Kernel("expert_places", "ids count", "starts source places")
EACH = 8  # experts, and simdgroups, of a threadgroup that sorts
SPLIT = 4  # threadgroups that share an expert's rows, so that an expert with very many does not keep others waiting
UNITS = {"cuda": "matrix", "metal": "simdgroup"}  # the header for products of small matrices
PIECE = 8  # columns that are unpacked at once; a tile's `ahead` is the number of such pieces, its `rows` that of eights


class Sorted(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert.

    Args:
        starts: [E + 1] int32, the place of each expert's first pair, and the number of pairs.
        source: [P] int32, the token of the pair in each place.
        places: [T, K] int32, the place of each pair.
    """

    starts: mx.array
    source: mx.array
    places: mx.array


def refusal(dtype: mx.Dtype, record: Record | None = None) -> Reason | None:
    """Why the kernels do not compute the experts of a prompt with activations of `dtype`. Without `record`: why those
    of no form.
    """
    return refusal_on(backend.name(), dtype, record)


@planned("expert_rows")
def refusal_on(target: str, dtype: mx.Dtype, record: Record | None) -> Reason | None:
    """As `refusal`, on the backend `target`."""
    if target == "metal" and (record is None or not tile_of(target, "prompt_experts").kernel):
        return Reason("moeflux tune has not chosen our kernel")
    if target == "cuda" and dtype == mx.float32:
        return Reason("the matrix units do not multiply float32")
    return None if record is None else form_refusal(record)


@planned("expert_rows")
def form_refusal(record: Record) -> Reason | None:
    """Why the kernels do not multiply records of this form."""
    return None if is_read(record) else unread_reason(record)


def sort_by_expert(ids: mx.array, experts: int) -> Sorted:
    """Sorts the pairs of ids [T, K], int32 or uint32, by expert, and an expert's pairs by token."""
    launch = plan_places(backend.name(), ids.shape, experts)
    assert not isinstance(launch, Reason)
    starts, source, places = launch(ids, count(ids.size))
    return Sorted(starts, source, places)


def expert_rows(x: mx.array, starts: mx.array, source: mx.array, slots: mx.array, records: Records) -> mx.array:
    """The output of each place's expert for its row of x, [P, H] in x's dtype.

    Args:
        x: [T, H] bfloat16 or float16, on Metal also float32, row-contiguous.
        starts: [n + 1], as `Sorted` has it, of n experts.
        source: [P], the row of x of each place.
        slots: [n] uint32 or int32, the experts' rows of the records.
        records: on MLX's side.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    return down_rows(_rows(x, starts, source, slots, records), starts, slots, records)


def down_rows(act: mx.array, starts: mx.array, slots: mx.array, records: Records) -> mx.array:
    """The last product of `expert_rows`: [P, rows of a matrix] of the row in each place of act [P, columns]."""
    return _rows(act, starts, None, slots, records)


def _rows(x: mx.array, starts: mx.array, source: mx.array | None, slots: mx.array, records: Records) -> mx.array:
    """The first products, or without `source` the last one."""
    memory, blob, arrays = records.inputs()
    is_last, places = source is None, x if source is None else source
    sizes = backend.name(), blob, slots.shape[0], len(places), x.dtype, records.record
    launch = plan_rows(*sizes, is_last, arrays)
    assert not isinstance(launch, Reason)
    return launch(x, *memory, slots, starts, starts if source is None else source)[0]


@planned("expert_rows", 256)
def plan_places(target: str, ids: Shape, experts: int) -> Launch | Reason:
    tokens, top_k = ids
    template = {"E": experts, "K": top_k, "SG": EACH}
    outputs = [((experts + 1,), mx.int32), ((tokens * top_k,), mx.int32), ((tokens, top_k), mx.int32)]
    return Launch(target, PLACES, template, (ceildiv(experts, EACH), 1), 32 * EACH, outputs)


@planned("expert_rows", 256, everywhere=True)
def plan_rows(
    target: str,
    blob: Shape,
    experts: int,
    pairs: int,
    dtype: mx.Dtype,
    record: Record,
    is_last: bool,
    arrays: RecordArrays = ONE_ARRAY,
) -> Launch | Reason:
    """The launch for gate and up, or for down (`is_last`)."""
    check_blob(blob, record)
    taken = FLOATS if target == "metal" else (mx.bfloat16, mx.float16)
    require(dtype in taken, f"x is {dtype}; the kernel multiplies {' and '.join(str(one) for one in taken)}")
    if target == "ops" or not is_read(record):
        return NO_KERNELS if target == "ops" else unread_reason(record)
    first, last = (record.down, record.down) if is_last else (record.gate, record.up)
    require(pairs * max(first.rows, first.columns) < 1 << 32, f"{pairs} rows are more than 32 bits can number")
    form, activation = form_of(first), record.activation
    tile = tile_of(target, "expert_rows")
    template: Template = {"X": dtype, "ROWS": first.rows, "COLS": first.columns, "WORDS": blob[1]}
    template["ROW_BITS"] = arrays.row_bits
    template |= places_of("FIRST", first) | places_of("LAST", last) | form.record_template
    template |= {"JOINED": int(not is_last), "GATHERED": int(not is_last), "TILES": tile.rows, "SPLIT": SPLIT}
    template |= {"SG": tile.simdgroups, "STEP": min(tile.ahead, form.chunk // PIECE)}
    template |= {"ACTIVATION": FORMS.index(activation.form), "LIMIT": float(activation.limit or 0)}
    template |= {"GATE_LIMIT": float(activation.gate_limit or 0)}
    template |= {"INTERLEAVED": int(record.interleaved and not is_last), **biases_of(FIRST=first, LAST=last)}
    groups = (ceildiv(first.rows, 16 * tile.simdgroups), experts, SPLIT)
    names = f"x {arrays.names} slots starts source"
    kernel = Kernel("expert_rows", names, "out", form.header, UNITS[target])
    return Launch(target, kernel, template, groups, 32 * tile.simdgroups, [((pairs, first.rows), dtype)])


def starts_of(counts: np.ndarray) -> np.ndarray:
    """The place of each expert's first row, and the number of rows, for these row counts: int32 [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
