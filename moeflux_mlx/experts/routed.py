"""Computes the routed experts of a layer, wherever their source keeps them.

A few tokens (decode) go through kernels that read records by slot; more go in waves. The result has the same bits in
every I/O mode: which path runs depends on the tokens and the sizes only, never on what happens to be in memory.
"""

from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..ops.backend import Array, computes_at_once
from ..ops.experts import Shared, chosen_ffn, expert_down_combine, expert_ffn, expert_gate_up
from ..ops.tiles import MAX_TOKENS
from .lookahead import Lookahead
from .routing import Report, Routing, unheard
from .source import ExpertLoader, Lease
from .waves import expect, in_waves


class RoutedExperts:
    """Implements `routing.RoutedExpertsCall` over a source of experts.

    Args:
        source: where the experts are.
        prefetch: "lookahead", "previous" or "off", as `Lookahead` has it.
    """

    def __init__(self, source: ExpertLoader, prefetch: str = "lookahead"):
        self.source = source
        self.lookahead = Lookahead(source, prefetch)

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return self.lookahead.wants_guess(layer, tokens)

    def expect(self, layer: int, tokens: int) -> None:
        if self.lookahead.prefetch != "off":
            expect(self.source, layer, tokens)

    def __call__(
        self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None, report: Report = unheard
    ) -> Array:
        if len(x) > MAX_TOKENS:
            assert not isinstance(shared, Shared)
            reads_ahead = self.lookahead.prefetch != "off"
            return in_waves(self.source, routing, x, residual, shared, reads_ahead, report)
        records = self.source.whole(routing.layer)
        if records is not None:
            if routing.choice is not None and isinstance(x, mx.array):
                return chosen_ffn(x, routing.choice, records, residual, shared)
            return expert_ffn(x, routing.ids, records, cast(Array, routing.weights), residual, shared)
        if routing.guess is not None:
            mx.eval(routing.ids, routing.guess.ids, routing.guess.weights)  # one wait for both
        ids = np.array(routing.ids)
        records = self.source.without_lease(routing.layer, ids) if computes_at_once(x) else None
        if records is not None:
            return expert_ffn(
                x, ids.astype(np.int32, copy=False), records, cast(Array, routing.weights), residual, shared
            )
        with self.source.request(routing.layer, ids) as lease:
            self.lookahead.requested(routing, ids)
            decode: Any = _overlapped if computes_at_once(x) else _awaited
            return decode(lease, routing.weights, x, residual, shared)


def _awaited(lease: Lease, weights: Array, x: Array, residual: Array, shared: Array | Shared | None) -> Array:
    """All experts once they are in memory; the records are held until the result is computed."""
    lease.wait()
    records, slots = lease.records()
    out = expert_ffn(x, slots, records, weights, residual, shared)
    lease.release(None if records.lasting else out)
    return out


def _overlapped(
    lease: Lease, weights: np.ndarray, x: np.ndarray, residual: np.ndarray, shared: np.ndarray | Shared | None
) -> np.ndarray:
    """The shared expert, and gate and up of those in memory, run while the others of a single token are read."""
    rows = shared.rows(x) if isinstance(shared, Shared) else shared
    records, slots = lease.records()
    ready = lease.ready[0]
    if len(x) > 1 or ready.all() or not ready.any():
        lease.wait()
        act = expert_gate_up(x, slots, records)
    else:
        act = np.empty((*slots.shape, records.record.moe_intermediate_size), np.float32)
        act[:, ready] = expert_gate_up(x, np.ascontiguousarray(slots[:, ready]), records)
        lease.wait()
        act[:, ~ready] = expert_gate_up(x, np.ascontiguousarray(slots[:, ~ready]), records)
    return expert_down_combine(act, slots, records, weights, residual, rows)
