"""Computes the routed experts of a layer in floats, one after the other, each over all rows that chose it."""

from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..experts.routing import Report, Routing, ignore_report
from ..experts.source import IoMode
from ..experts.whole import WholeExperts
from ..kinds import Experts
from ..ops import backend
from ..ops.backend import Array
from ..ops.experts import Shared
from .weights import LayerWeights

ROWS_AT_ONCE = 16384  # rows of an expert in one product; limits temporary memory for any distribution of rows


class ExpertObserver(Protocol):
    """Sees what a layer's routed experts multiply."""

    def observe_input(self, x: mx.array) -> None:
        """All rows [N, H], each once."""
        ...

    def observe_expert(self, expert: int, x: mx.array, activations: mx.array) -> None:
        """Rows [N, H] that chose an expert, and its activations [N, I]."""
        ...


class NoRecords(WholeExperts):
    """A source without records, for modules that ask the source for nothing else."""

    mode = IoMode.RESIDENT


class OneByOne:
    """Implements `routing.RoutedExpertsCall` with one expert in memory at a time.

    Sums are float32, in the order of the experts' numbers.

    Args:
        weights: where the experts are.
        dtype: in which experts are multiplied.
        observer: sees the rows, those of an expert in parts; None: nobody does.
    """

    def __init__(self, weights: LayerWeights, dtype: mx.Dtype, observer: ExpertObserver | None = None):
        self.source = NoRecords(weights.layout, "experts are read one by one")
        self._weights, self._dtype, self._observer = weights, dtype, observer

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False

    def expect(self, layer: int, tokens: int) -> None:
        """Does nothing: each expert is read when it is computed."""

    def __call__(
        self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None, report: Report = ignore_report
    ) -> Any:
        ids, weights = np.array(routing.ids), np.array(routing.weights, np.float32)
        rows = backend.leave(x).astype(self._dtype)
        added: Any = shared.rows(x) if isinstance(shared, Shared) else shared
        out = mx.zeros((len(rows), residual.shape[-1]), mx.float32)
        used = np.unique(ids)
        if self._observer is not None:
            self._observer.observe_input(rows)
        for done, expert in enumerate(used.tolist()):
            out = self._added(out, routing.layer, expert, rows, np.where(ids == expert, weights, 0), ids == expert)
            report((done + 1) / len(used))
        parts = [out, *(backend.leave(part).astype(mx.float32) for part in (residual, added) if part is not None)]
        total = sum(part.reshape(out.shape) for part in parts[1:]) + parts[0]
        made = total.reshape(residual.shape).astype(backend.dtype_of(residual))
        return np.array(made) if isinstance(residual, np.ndarray) else made

    def _added(
        self, out: mx.array, layer: int, expert: int, x: mx.array, weights: np.ndarray, chosen: np.ndarray
    ) -> mx.array:
        """`out` [T, H] plus the expert's output for the rows that chose it, times their weights [T, K]."""
        loaded = self._weights.expert(layer, expert, self._dtype)
        part = self._weights.args.layers[layer].feed_forward
        assert isinstance(part, Experts)
        tokens, factors = np.flatnonzero(chosen.any(axis=1)), weights.sum(axis=1)
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            some = tokens[start : start + ROWS_AT_ONCE]
            where = mx.array(some.astype(np.int32))
            rows = x[where]
            act = loaded.activations(rows, part.activation)
            if self._observer is not None:
                self._observer.observe_expert(expert, rows, act)
            made = loaded.down(act).astype(mx.float32) * mx.array(factors[some])[:, None]
            out = out.at[where].add(made)
            mx.eval(out)
        return out
