"""Packed records as dense matrices, for products large enough to pay for unpacking."""

from functools import cache

import mlx.core as mx

from ..formats.record import Projection, Record
from . import backend
from .backend import FLOATS
from .experts import Records, check_blob, is_read, places_of
from .launch import Kernel, Launch, Shape, ceildiv, require
from .tiles import TILES

DEQUANTIZE = Kernel("expert_dequantize", "blob slots", "gate_up down")


def dequantized_records(records: Records, slots: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """The matrices of some records: weight = scale * code + bias in float32, rounded once to `dtype`.

    The same bits as `mx.dequantize` with scales and biases in float32 gives, rounded.

    Args:
        records: on MLX's side.
        slots: [n] uint32 or int32, rows of the records in any order; they may repeat.
        dtype: float32, bfloat16 or float16.

    Returns:
        gate above up, [n, 2 * I, H], and down, [n, H, I].

    Raises:
        RequestError: a shape or dtype the kernel does not take.
    """
    launch = _plan(backend.name(), records.blob.shape, slots.shape, dtype, records.record)
    if launch is None:
        return _ops(records, slots, dtype)
    gate_up, down = launch(records.blob, slots)
    return gate_up, down


@cache
def _plan(target: str, blob: Shape, slots: Shape, dtype: mx.Dtype, record: Record) -> Launch | None:
    check_blob(blob, record)
    require(len(slots) == 1 and slots[0] > 0, f"slots are {slots}; expected [n]")
    require(dtype in FLOATS, f"dtype is {dtype}; the kernel writes float32, bfloat16 or float16")
    if target == "ops" or not is_read(record):
        return None
    (n,), hidden, inner = slots, record.hidden_size, record.moe_intermediate_size
    tile = TILES[target]["expert_dequantize"]
    template = {"X": dtype, "H": hidden, "I": inner, "WORDS": blob[1], "R": tile.rows, "SG": tile.simdgroups}
    template |= places_of("GATE", record.gate) | places_of("UP", record.up) | places_of("DOWN", record.down)
    threads = 32 * tile.simdgroups
    groups = (ceildiv(3 * hidden * inner // 8, tile.rows * threads), n)
    outputs = [((n, 2 * inner, hidden), dtype), ((n, hidden, inner), dtype)]
    return Launch(target, DEQUANTIZE, template, groups, threads, outputs)


def _ops(records: Records, slots: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    # Whole records first: MLX's gather counts in 32 bits where the view is small, whatever lies between its rows.
    words = mx.take(records.blob, slots, axis=0)

    def matrix(projection: Projection) -> mx.array:
        parts = []
        for field in projection.fields:
            part = mx.contiguous(words[:, field.words])
            part = part if field.dtype == "U32" else part.view(mx.bfloat16).astype(mx.float32)
            parts.append(part.reshape(len(slots), field.shape[0], -1))
        codes, scales, biases = parts
        quant = projection.quant
        return mx.dequantize(codes, scales, biases, quant.group_size, quant.bits).astype(dtype)

    gate, up, down = (matrix(part) for part in (records.record.gate, records.record.up, records.record.down))
    return mx.concatenate([gate, up], axis=1), down
