"""The routed experts of a few tokens, read straight from their packed records by slot, and what sums them.

Two kernels: gate and up, and down with the weighted sum. All sums are float32. The result of a token does not depend
on the slots its experts lie in, nor on what else the records hold.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..formats.record import Projection, Record
from . import backend, forms, native
from .backend import Array, view
from .combine import combine_types, moe_combine_ops
from .forms import form_of, matmul_float32
from .launch import Kernel, Launch, Shape, ceildiv, require
from .linear import check_activations
from .tiles import down_lanes, lanes_of, planned, tile_of

Slots = mx.array | np.ndarray
MAX_SLOTS = 16  # the down projection gives each slot a simdgroup of one threadgroup


@dataclass(frozen=True)
class Records:
    """Records in memory: `blob` [S, words] uint32, one in each row, with the geometry `record`.

    The blob is numpy where the CPU reads it in place, and an mx.array on a GPU. `lasting`: what refers to it may go on
    reading when the lease is over, because it is never written to.
    """

    blob: Any  # mx.array | np.ndarray
    record: Record
    lasting: bool = False

    def for_mlx(self, slots: np.ndarray) -> "tuple[Records, np.ndarray]":
        """Records that MLX's operations can index, and where in them those of `slots` are: copies, where need be."""
        if isinstance(self.blob, mx.array):
            return self, slots
        used, local = np.unique(slots, return_inverse=True)
        return Records(mx.array(self.blob[used]), self.record, lasting=True), local.reshape(slots.shape)


def expert_ffn(
    x: Array, slots: Slots, records: Records, weights: Array, residual: Array, shared: Array | None
) -> Array:
    """residual + sum_k weights[:, k] * expert(slots[:, k])(x) + shared, all [T, H], for up to 8 tokens on MLX's side.

    Args:
        x: [T, H], as for `expert_gate_up`.
        slots: [T, K] integers, rows of the records.
        weights: [T, K] float32.
        residual, shared: [T, H]; no shared expert: None.
    """
    if isinstance(x, mx.array) and isinstance(slots, np.ndarray):
        records, slots = records.for_mlx(slots)
        slots = mx.array(slots.astype(np.uint32))
    act = expert_gate_up(x, slots, records)
    return expert_down_combine(act, slots, records, weights, residual, shared)


def expert_gate_up(x: Array, slots: Slots, records: Records) -> Array:
    """silu(gate x) * (up x) for every slot of every token.

    Args:
        x: [T, H] float32, bfloat16 or float16; on MLX's side up to 8 tokens, each at a multiple of 16 bytes.
        slots: [T, K], rows of the records: int32 or uint32, K from 1 to 16; beside numpy int32 and any K.
        records: whose gate and up are [I, H].

    Returns:
        [T, K, I] in x's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    if isinstance(x, np.ndarray):
        if is_read(records.record):
            return native.expert_gate_up(x, records.blob, slots, records.record)
        copies, index = records.for_mlx(np.asarray(slots))
        return view(_gate_up_ops(mx.array(x), mx.array(index), copies))
    assert isinstance(slots, mx.array)
    launch = _plan_gate_up(backend.name(), x.shape, x.dtype, records.blob.shape, slots.shape, records.record)
    return launch(x, records.blob, slots)[0] if launch else _gate_up_ops(x, slots, records)


def expert_down_combine(
    act: Array,
    slots: Slots,
    records: Records,
    weights: Array,
    residual: Array,
    shared: Array | None = None,
) -> Array:
    """residual + sum_k weights[k] * (down_k act[k]) + shared, k ascending, rounded once.

    Args:
        act: [T, K, I], as `expert_gate_up` returns it.
        slots, records: as there.
        weights: [T, K] float32.
        residual: [T, H], the stream before the experts.
        shared: [T, H], the shared expert's output, or None.

    Returns:
        [T, H] in residual's dtype.

    Raises:
        RequestError: a shape or dtype the kernels do not take.
    """
    if isinstance(act, np.ndarray):
        if is_read(records.record):
            return native.expert_down_combine(act, records.blob, slots, records.record, weights, residual, shared)
        copies, index = records.for_mlx(np.asarray(slots))
        other = None if shared is None else mx.array(shared)
        sums = _down_combine_ops(mx.array(act), mx.array(index), copies, mx.array(weights), mx.array(residual), other)
        return view(sums)
    assert isinstance(slots, mx.array)
    other = residual if shared is None else shared  # an input cannot be left out; it is not read
    dtypes = act.dtype, residual.dtype, None if shared is None else other.dtype
    shapes = act.shape, residual.shape, records.blob.shape, slots.shape
    launch = _plan_down(backend.name(), *shapes, dtypes, records.record)
    weights = weights.astype(mx.float32)
    if launch is None:
        return _down_combine_ops(act, slots, records, weights, residual, shared)
    return launch(act, records.blob, slots, weights, residual, other)[0]


@cache
def is_read(record: Record) -> bool:
    """Whether kernels and native forms read such records; the twins read all. One kernel reads gate and up."""
    alike = form_of(record.gate) == form_of(record.up)
    return alike and all(forms.is_read(part.quant, part.columns) for part in (record.gate, record.down))


def check_blob(blob: Shape, record: Record) -> None:
    """Raises RequestError: the kernels do not take a blob of such a shape."""
    least = record.size // 4
    good = len(blob) == 2 and blob[1] >= least and blob[1] % 4 == 0
    require(good, f"blob is {blob}; expected [S, words], words a multiple of 4 and at least {least}")


def _check_slots(blob: Shape, slots: Shape, tokens: int, record: Record) -> None:
    check_blob(blob, record)
    good = len(slots) == 2 and slots[0] == tokens and 1 <= slots[1] <= MAX_SLOTS
    require(good, f"slots are {slots}; expected [{tokens}, K], K from 1 to {MAX_SLOTS}")


def places_of(name: str, projection: Projection) -> dict[str, int]:
    """Where a matrix lies in a record, as the text's constants say it: words to its codes, scales and biases.

    Where it has no biases, their place is that of the scales; they are not read.
    """
    codes, scales = projection.words[:2]
    return {f"{name}_W": codes, f"{name}_S": scales, f"{name}_B": projection.words[-1]}


@planned()
def _plan_gate_up(target: str, x: Shape, dtype: mx.Dtype, blob: Shape, slots: Shape, record: Record) -> Launch | None:
    check_activations("x", x, dtype)
    tokens, hidden = x
    inner = record.moe_intermediate_size
    require(hidden == record.hidden_size, f"x is {x}; the records' experts take {record.hidden_size} columns")
    _check_slots(blob, slots, tokens, record)
    if target == "ops" or not is_read(record):
        return None
    top_k, form = slots[1], form_of(record.gate)
    tile = tile_of(target, "expert_gate_up", f"{inner}x{hidden} {form}")
    lanes = lanes_of(form.chunks(hidden), tile.lanes)
    template = {"X": dtype, "H": hidden, "I": inner, "K": top_k, "WORDS": blob[1], **form.template}
    template |= places_of("GATE", record.gate) | places_of("UP", record.up)
    template |= {"R": tile.rows, "L": lanes, "SG": tile.simdgroups, "AHEAD": form.ahead(tile.ahead)}
    groups = (ceildiv(inner * lanes, tile.rows * 32 * tile.simdgroups), tokens * top_k)
    kernel = Kernel("expert_gate_up", "x blob slots", "act", form.header)
    return Launch(target, kernel, template, groups, 32 * tile.simdgroups, [((tokens, top_k, inner), dtype)])


@planned()
def _plan_down(
    target: str,
    act: Shape,
    residual: Shape,
    blob: Shape,
    slots: Shape,
    dtypes: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None],
    record: Record,
) -> Launch | None:
    check_activations("act", act, dtypes[0], rank=3)
    check_activations("residual", residual, dtypes[1])
    tokens, top_k, inner = act
    hidden = residual[1]
    fits = (hidden, inner) == (record.hidden_size, record.moe_intermediate_size)
    require(
        fits, f"act is {act}, residual {residual}; the records' down is {record.down.rows} by {record.down.columns}"
    )
    _check_slots(blob, slots, tokens, record)
    require(slots[1] == top_k, f"act is {act} but slots are {slots}; both hold [T, K]")
    if target == "ops" or not is_read(record):
        return None
    form = form_of(record.down)
    tile = tile_of(target, "expert_down_combine", f"{hidden}x{inner} {form}")
    lanes = down_lanes(tile, hidden, form.chunks(inner))
    template: dict[str, Any] = {"H": hidden, "I": inner, "K": top_k, "WORDS": blob[1], **places_of("DOWN", record.down)}
    template |= {"R": tile.rows, "L": lanes, "AHEAD": form.ahead(tile.ahead), **combine_types(dtypes), **form.template}
    groups = (ceildiv(hidden * lanes, tile.rows * 32), tokens)
    kernel = Kernel("expert_down_combine", "act blob slots weights h_mid shared", "out", form.header)
    return Launch(target, kernel, template, groups, 32 * top_k, [((tokens, hidden), dtypes[1])])


def _multiply(x: mx.array, slots: mx.array, records: Records, projection: Projection) -> mx.array:
    """[P, columns] x, each row times its own record's matrix: float32 [P, rows]."""
    pairs = len(x)
    start, stop = projection.fields[0].words.start, projection.fields[-1].words.stop
    words = mx.take(records.blob[:, start:stop], slots.reshape(-1), axis=0)
    parts = []
    for field in projection.fields:
        part = words[:, field.words.start - start : field.words.stop - start]
        parts.append(part.view(forms.DTYPES[field.dtype]).reshape(pairs, *field.shape))
    return matmul_float32(x[:, None], projection.quant, *parts)[:, 0]


def _gate_up_ops(x: mx.array, slots: mx.array, records: Records) -> mx.array:
    each = mx.repeat(x, slots.shape[1], axis=0)
    gate, up = (_multiply(each, slots, records, part) for part in (records.record.gate, records.record.up))
    return (gate * mx.sigmoid(gate) * up).astype(x.dtype).reshape(*slots.shape, -1)


def _down_combine_ops(
    act: mx.array,
    slots: mx.array,
    records: Records,
    weights: mx.array,
    residual: mx.array,
    shared: mx.array | None,
) -> mx.array:
    down = _multiply(act.reshape(-1, act.shape[-1]), slots, records, records.record.down)
    return moe_combine_ops(down.reshape(*slots.shape, -1), weights, residual, shared)
