"""Computes the routed experts of a layer in floats, one after the other, each over all rows that chose it."""

import mlx.core as mx
import numpy as np

from ..experts.routing import Pieces, Routing, finished
from ..experts.source import IoMode
from ..experts.whole import WholeExperts
from ..kinds import Experts
from ..ops.backend import AnyArray, Array, as_dtype, library_of, of_kind
from ..ops.elementwise import float32
from ..ops.experts import Shared
from .seen import SeenLayer
from .weights import LayerWeights

ROWS_AT_ONCE = 16384  # rows of an expert in one product; limits temporary memory for any distribution of rows


class NoRecords(WholeExperts):
    """A source without records, for modules that ask the source for nothing else."""

    mode = IoMode.RESIDENT


class OneByOne:
    """Implements `routing.RoutedExpertsCall` with one expert in memory at a time.

    Sums are float32, in the order of the experts' numbers.

    Args:
        weights: where the experts are.
        dtype: in which experts are multiplied.

    Attributes:
        observer: sees the rows, those of an expert in parts; None: nobody does.
    """

    def __init__(self, weights: LayerWeights, dtype: mx.Dtype):
        self.source = NoRecords(weights.layout, "experts are read one by one")
        self._weights, self._dtype = weights, dtype
        self.observer: SeenLayer | None = None

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False

    def expect(self, layer: int, tokens: int) -> None:
        """Does nothing: each expert is read when it is computed."""

    def __call__(self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None) -> AnyArray:
        return finished(self.in_pieces(routing, x, residual, shared))

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None) -> Pieces[AnyArray]:
        ids, weights = np.array(routing.ids), np.array(routing.weights, np.float32)
        rows = as_dtype(x, self._dtype)
        added: AnyArray = shared.rows(x) if isinstance(shared, Shared) else shared
        out = _zeros(rows, (len(rows), residual.shape[-1]))
        used = np.unique(ids)
        if self.observer is not None:
            self.observer.observe_input(rows, ids, weights)
        for done, expert in enumerate(used.tolist()):
            out = self._added(out, routing.layer, expert, rows, np.where(ids == expert, weights, 0), ids == expert)
            yield (done + 1) / len(used)
        for part in (residual, added):
            if part is not None:
                out = out + float32(part.reshape(out.shape))
        made = out.reshape(residual.shape)
        return made.astype(residual.dtype)

    def _added(
        self, out: AnyArray, layer: int, expert: int, x: AnyArray, weights: np.ndarray, chosen: np.ndarray
    ) -> AnyArray:
        """`out` [T, H] plus the expert's output for the rows that chose it, times their weights [T, K]."""
        loaded = self._weights.expert(layer, expert, self._dtype)
        part = self._weights.args.layers[layer].feed_forward
        assert isinstance(part, Experts)
        tokens, factors = np.flatnonzero(chosen.any(axis=1)), weights.sum(axis=1)
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            some = tokens[start : start + ROWS_AT_ONCE]
            where = of_kind(some.astype(np.int32), x)
            rows = x[where]
            act = loaded.activations(rows, part.activation)
            if self.observer is not None:
                self.observer.observe_expert(act, factors[some])
            made = float32(loaded.down(act))
            if isinstance(made, np.ndarray):
                out[where] += made * factors[some, None]
                continue
            out = out.at[where].add(made * mx.array(factors[some, None]))
            mx.eval(out)
        return out


def _zeros(like: AnyArray, shape: tuple[int, int]) -> AnyArray:
    """float32, of the same kind of array as `like`."""
    library = library_of(like)
    return library.zeros(shape, library.float32)
