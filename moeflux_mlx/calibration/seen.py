"""What a layer's matrices multiply in a run, kept in memory until the layer is rounded or measured."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np

from ..ops.backend import Array, library_of
from .statistics import LayerStatistics, Sums, experts_path, rows_at, rows_of, sums


class Rows(NamedTuple):
    """The rows of one expert: their inputs [n, H], numpy's or MLX's, and their routing weights, float32 [n]."""

    x: Any
    weights: np.ndarray


class SeenLayer(LayerStatistics):
    """The statistics of one layer, and the inputs of its routed experts.

    Attributes:
        down: sums over the inputs of all experts' down projections; None: no row has been seen.
    """

    def __init__(self, layer: int, module: nn.Module, hessians: bool):
        super().__init__(layer, module, Path(), hessians)
        self.down: Sums | None = None
        self._inputs = list[Any]()
        self._ids, self._weights = list[np.ndarray](), list[np.ndarray]()

    def observe_input(self, x: Array, ids: np.ndarray, weights: np.ndarray) -> None:
        """Keeps rows of the routed experts' input [N, H], with the experts and weights [N, K] of each."""
        super().observe_input(x, ids, weights)
        self._inputs.append(x)
        self._ids.append(ids)
        self._weights.append(weights)

    def observe_expert(self, expert: int, x: Array, activations: Array) -> None:
        """Adds rows to the sums over all experts; each expert's own rows are asked for by `rows`."""
        if self.down is None:
            self.down = sums(activations.shape[1], self._hessians)
        self.down.add(rows_of(activations))

    def write(self) -> None:
        """Does nothing: what has been seen stays in memory."""

    def of(self, path: str) -> Sums | None:
        """The sums over the inputs of the matrix at a module path; None: it has multiplied nothing."""
        return self._dense.get(self._alike.get(path, path))

    @property
    def input(self) -> Sums | None:
        """The sums over all inputs of the layer's routed experts; None: it has none."""
        return self._dense.get(f"{experts_path(self.layer)}.input")

    def rows(self, expert: int) -> Rows:
        """The rows that chose an expert."""
        xs, weights = [], []
        for x, ids, of_ids in zip(self._inputs, self._ids, self._weights, strict=True):
            tokens, places = np.nonzero(ids == expert)
            xs.append(rows_at(x, tokens))
            weights.append(of_ids[tokens, places])
        return Rows(library_of(xs[0]).concatenate(xs), np.concatenate(weights))
