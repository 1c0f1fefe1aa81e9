"""Computes the routed experts of a layer, from any source.

A few tokens (decode) use kernels that read records by slot; more tokens go in waves, or all at once if all experts are
in memory and `expert_rows` multiplies. The result has the same bits in every I/O mode: they depend only on the tokens
and the sizes, never on the contents of memory.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..formats.record import Record
from ..ops import backend
from ..ops.backend import AnyArray
from ..ops.combine import RowNorm, combined
from ..ops.expert_rows import expert_rows, refusal, sort_by_expert
from ..ops.experts import (
    MAX_SLOTS,
    Shared,
    chosen_ffn,
    expert_down_combine,
    expert_ffn,
    expert_gate_up,
    handed_over,
    native_refusal,
)
from ..ops.grouped import PIECE_ROWS, is_cut
from ..ops.records import Records, is_read
from ..ops.route import read_host_copy
from ..ops.tiles import LEASED_TOKENS
from .lookahead import Lookahead
from .routing import Pieces, Routing, in_parts
from .source import ExpertLoader, Lease, TooManyExpertsError
from .waves import expect, in_waves

Waiting = AbstractContextManager[None]


class RoutedExperts:
    """Implements `routing.RoutedExpertsCall` over a source of experts.

    Args:
        source: where the experts are.
        prefetch: "lookahead" or "off", as `Lookahead` has it.
        waiting: a context manager in which a step on a GPU waits for experts, if it has to.
    """

    def __init__(self, source: ExpertLoader, prefetch: str = "lookahead", waiting: Waiting | None = None):
        self.source, self._waiting = source, waiting or nullcontext()
        self.lookahead = Lookahead(source, prefetch)
        self._compiles = backend.has_kernels()  # single tokens
        self._compiled: dict[tuple[int, int], Any] = {}  # by thread (as in `DecodeStep`) and layer
        source.at_close(self._compiled.clear)

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return self.lookahead.wants_guess(layer, tokens)

    def expect(self, layer: int, tokens: int) -> None:
        if self.reads_ahead:
            expect(self.source, layer, tokens)

    def are_at_once(self, layer: int, dtype: mx.Dtype, rows: int) -> bool:
        return self._at_once(layer, dtype, rows) is not None

    def _at_once(self, layer: int, dtype: mx.Dtype, rows: int) -> Records | None:
        """All records of the layer, if `at_once` computes so many pairs of a token and an expert."""
        whole = self.source.whole(layer)
        return None if whole is None or refusal(dtype, whole.record) or is_cut(whole.record, rows) else whole

    def in_pieces(self, routing: Routing, x: AnyArray, residual: AnyArray, shared: AnyArray) -> Pieces[AnyArray]:
        whole = self._at_once(routing.layer, backend.dtype_of(x), routing.ids.size)
        if whole is not None:
            return at_once(routing, x, whole, residual, shared)
        return (yield from in_waves(self.source, routing, x, residual, shared, self.reads_ahead))

    def __call__(self, routing: Routing, x: AnyArray, residual: AnyArray, shared: AnyArray) -> AnyArray:
        records = self.source.whole(routing.layer)
        if records is not None:
            if routing.choice is not None:
                return chosen_ffn(x, routing.choice, records, residual, shared)
            return expert_ffn(x, routing.ids, records, routing.weights, residual, shared, routing.norm)
        on_host = _on_host(routing)
        ids = cast(np.ndarray, on_host.ids)
        is_native = backend.computes_at_once(x)
        records = self.source.without_lease(routing.layer, ids) if is_native else None
        if records is not None:
            slots, weights = ids.astype(np.int32, copy=False), routing.weights
            return expert_ffn(x, slots, records, weights, residual, shared, routing.norm)
        try:
            lease = self.source.request(routing.layer, ids)
        except TooManyExpertsError:
            if len(x) <= LEASED_TOKENS:
                raise
            return in_parts(self, on_host, x, residual, shared)
        with lease:
            self.lookahead.requested(on_host, ids)
            decode: Any = _overlapped if is_native else self._awaited
            return decode(lease, routing.weights, x, residual, shared, routing.norm)

    def reads_tables(self, layer: int, top_k: int) -> bool:
        return top_k <= MAX_SLOTS and is_read(self.source.layout.records[layer])

    def accepted(self, layer: int) -> None:
        self.lookahead.skipped(layer)

    @property
    def reads_ahead(self) -> bool:
        return self.lookahead.prefetch != "off"

    def from_table(
        self, layer: int, memory: mx.array, buffers: Sequence[mx.array], host_copy: list[mx.array]
    ) -> Callable[..., mx.array]:
        layout = self.source.layout
        kept = (tuple(buffers), layout.records[layer], False, memory) if buffers else (memory, layout.records[layer])
        records = Records(*kept)

        def compute(routing: Routing, x: mx.array, residual: mx.array, shared: Shared | None) -> mx.array:
            assert routing.choice is not None
            return chosen_ffn(x, routing.choice, records, residual, shared, layout.num_experts, host_copy)

        return compute

    def _awaited(
        self,
        lease: Lease,
        weights: mx.array,
        x: mx.array,
        residual: mx.array,
        shared: mx.array | Shared | None,
        norm: RowNorm | None,
    ) -> mx.array:
        """Computes all experts once they are in memory; the records are held until the result is computed."""
        with self._waiting:
            lease.wait()
        records, rows = lease.records()
        records, slots = handed_over(records, rows)
        out: mx.array
        if self._compiles and len(x) == 1 and not isinstance(shared, mx.array):
            gates = [] if shared is None or shared.gates is None else [shared.gates]
            compute = self._compiled_ffn(lease.keys[0][0], records.record, shared, norm)
            out = compute(records.memory, x, slots, weights, residual, *gates)
        else:
            out = expert_ffn(x, slots, records, weights, residual, shared, norm)
        lease.release(None if records.lasting else out)
        return out

    def _compiled_ffn(
        self, layer: int, record: Record, shared: Shared | None, norm: RowNorm | None
    ) -> Callable[..., mx.array]:
        """Compiles `expert_ffn` for one token, with its arrays as inputs and the weights of `shared` and `norm` as
        constants.
        """
        place = threading.get_ident(), layer
        if place not in self._compiled:
            own = shared and replace(shared, gates=None)  # otherwise this token's arrays would be kept

            def run(
                memory: Any, x: mx.array, slots: mx.array, weights: mx.array, residual: mx.array, *gates: mx.array
            ) -> mx.array:
                beside = replace(own, gates=gates[0]) if own is not None and gates else own
                return expert_ffn(x, slots, Records(memory, record), weights, residual, beside, norm)

            self._compiled[place] = mx.compile(run)
        return cast(Any, self._compiled[place])


def at_once(routing: Routing, x: mx.array, records: Records, residual: mx.array, shared: mx.array | None) -> mx.array:
    """All experts of a prompt, which are in memory; the host does not wait for the ids. The bits are those of
    `in_waves`.
    """
    experts = len(records.blob)
    starts, source, places = sort_by_expert(cast(mx.array, routing.ids), experts)
    rows = expert_rows(x, starts, source, backend.arange(experts, mx), records)
    made: mx.array = combined(rows, places, cast(mx.array, routing.weights), residual, shared, routing.norm)
    if len(source) > PIECE_ROWS:
        backend.finish(made)  # as if in waves: the outputs of one layer are in memory
    return made


def _on_host(routing: Routing) -> Routing:
    """The routing with ids and guess as numpy arrays; a GPU is waited for once."""
    guess = routing.guess
    if routing.host_copy:
        mx.eval(routing.host_copy, guess and guess.host_copy)
        guess = guess and Routing(guess.layer, *read_host_copy(guess.host_copy))
        return Routing(routing.layer, *read_host_copy(routing.host_copy), guess, norm=routing.norm)
    if guess is not None:
        mx.eval(routing.ids, guess.ids, guess.weights)
        guess = Routing(guess.layer, np.array(guess.ids), np.array(guess.weights))
    return Routing(routing.layer, np.array(routing.ids), routing.weights, guess, norm=routing.norm)


def _overlapped(
    lease: Lease,
    weights: np.ndarray,
    x: np.ndarray,
    residual: np.ndarray,
    shared: np.ndarray | Shared | None,
    norm: RowNorm | None,
) -> np.ndarray:
    """Computes the shared expert, and gate and up of the records in memory, while the other records are read."""
    rows = shared.rows(x) if isinstance(shared, Shared) else shared
    records, slots = lease.records()
    ready = lease.ready
    if ready.all() or not ready.any() or (len(x) > 1 and native_refusal(records.record)):
        lease.wait()
        act = expert_gate_up(x, slots, records)
    else:
        act = np.empty((*slots.shape, records.record.moe_intermediate_size), np.float32)
        act[ready] = _of_pairs(x, slots, records, ready)
        lease.wait()
        act[~ready] = _of_pairs(x, slots, records, ~ready)
    return expert_down_combine(act, slots, records, weights, residual, rows, norm=norm)


def _of_pairs(x: np.ndarray, slots: np.ndarray, records: Records, chosen: np.ndarray) -> np.ndarray:
    """`expert_gate_up` of the selected pairs of a token and a slot, bool [T, K] -> [pairs, I]. For several tokens it
    uses the native form, which takes any number of rows.
    """
    if len(x) == 1:
        return np.asarray(expert_gate_up(x, np.ascontiguousarray(slots[:, chosen[0]]), records))[0]
    tokens, _ = np.nonzero(chosen)
    return np.asarray(expert_gate_up(x[tokens], slots[chosen][:, None], records))[:, 0]
