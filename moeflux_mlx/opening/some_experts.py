"""Routed experts of zeros, in each way in which a backend may hold them, to list what a layer launches."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ..experts.places import BUFFERS
from ..experts.routing import Pieces, Routing
from ..experts.values import ValuesOf
from ..experts.whole import HeldExperts
from ..formats.record import ExpertLayout, Record
from ..kinds import Dense, FeedForward
from ..ops import backend
from ..ops.backend import AnyArray, Array, computes_at_once, of_kind
from ..ops.expert_rows import refusal, sort_by_expert
from ..ops.experts import chosen_ffn, expert_ffn
from ..ops.grouped import GroupedRows
from ..ops.launch import LEAST_ELEMENTS
from ..ops.records import Records, is_read, with_record
from ..spec import ModelArgs

RESIDENT, STREAMED, QUEUED = "resident", "streamed", "queued ahead"  # where routed experts are


def values_of_zeros(layout: ExpertLayout, number: int) -> ValuesOf:
    """The value experts of a record set, which are in memory; MLX's array is not made before it is read."""
    source, shape = HeldExperts(layout, {}), (layout.count(number), layout.records[number].stride // 4)
    source.add(number, mx.zeros(shape, mx.uint32) if backend.has_kernels() else np.zeros(shape, np.uint32))
    return ValuesOf(source, number)


class SomeExperts:
    """Routed experts of one layer, as many as a token uses, so that every token uses all of them.

    Args:
        record: the geometry.
        experts: number of experts of the layer.
        top_k: of a token.
        place: RESIDENT: a kernel chooses them, as if every expert were on a GPU; STREAMED: as a pool holds them;
            QUEUED: in a table of a layer that is queued ahead.
    """

    def __init__(self, record: Record, experts: int, top_k: int, place: str):
        self.experts, self.count = experts, top_k
        self.is_resident, self.is_queued = place == RESIDENT, place == QUEUED
        shape = experts if self.is_resident else top_k, record.stride // 4
        self.memory = np.zeros(shape, np.uint32)
        memory: Any = mx.zeros(shape, mx.uint32)
        slots = None
        if place != RESIDENT and backend.name() == "metal":
            memory = (mx.zeros((top_k, record.held_bytes // 4), mx.uint32),) * BUFFERS  # slots of a pool
            slots = mx.zeros(max(experts, LEAST_ELEMENTS), mx.uint32) if self.is_queued else None
        elif place == STREAMED and backend.name() == "cuda":
            memory = (mx.zeros(record.held_bytes // 4, mx.uint32),) * top_k
        elif self.is_queued:
            memory = mx.zeros(experts, mx.uint64)  # addresses
        self.array = Records(memory, record, slots=slots)

    def _inputs(self, x: Array) -> tuple[Records, np.ndarray, AnyArray, AnyArray]:
        """The records, and for the rows x slots [T, K], the same as the kernels take them, and weights."""
        slots = np.tile(np.arange(self.count, dtype=np.int32), (len(x), 1))
        weights = of_kind(np.zeros(slots.shape, np.float32), x)
        if computes_at_once(x):
            return Records(self.memory, self.array.record), slots, slots, weights
        return self.array, slots, mx.array(slots.astype(np.uint32)), weights  # texts depend on the dtype

    def __call__(self, routing: Routing, x: AnyArray, residual: AnyArray, shared: AnyArray) -> AnyArray:
        records, _, at, weights = self._inputs(x)
        if self.is_queued and routing.choice is not None:
            if records.slots is None:
                with_record(records.memory, 0, mx.zeros(records.record.held_bytes // 4, mx.uint32))
            return chosen_ffn(x, routing.choice, records, residual, shared, self.experts, [])
        if self.is_resident and routing.choice is not None:
            return chosen_ffn(x, routing.choice, records, residual, shared)
        return expert_ffn(x, at, records, weights, residual, shared, routing.norm)

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | None) -> Pieces[Array]:
        yield from ()
        records, slots, _, weights = self._inputs(x)
        on_units = not refusal(backend.dtype_of(x), records.record)
        if on_units and self.is_resident:
            sort_by_expert(mx.array(slots.astype(np.uint32)), len(self.memory))
        slots[1:] = self.count - 1  # so some experts have few rows, and one has many
        counts = np.bincount(slots.reshape(-1))
        rows = GroupedRows(x, slots, counts, [slots[0]], records.record, on_units=on_units)
        rows.multiply(0, slots[0], records)
        return rows.combined(weights, residual, shared, routing.norm)

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False


def ways_of_experts(
    part: FeedForward, record: Record | None, args: ModelArgs
) -> Iterator[tuple[str, SomeExperts | None, bool]]:
    """The ways of computing a feed-forward part's routed experts, by name, and whether each is special; on a GPU they
    depend on where the experts are.
    """
    if isinstance(part, Dense) or record is None:
        yield "dense MLP", None, False
        return
    of = record, part.router.experts, args.num_experts_per_tok
    if not backend.has_kernels():
        yield "experts", SomeExperts(*of, STREAMED), False
        return
    for place in (RESIDENT, STREAMED):
        yield f"experts, {place}", SomeExperts(*of, place), False
    may_be_queued = args.connections is None and part.router.table is None and is_read(record)
    if may_be_queued:  # at least where `DecoderLayer.may_be_queued`
        yield f"experts, {QUEUED}", SomeExperts(*of, QUEUED), True
