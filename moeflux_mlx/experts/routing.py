"""The seam between a model and its experts: what a layer's router decides, and who computes what it chose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..ops.backend import Array
from ..ops.experts import Shared
from ..ops.route import Choice
from .source import ExpertLoader

Report = Callable[[float], Any]  # told the share of the work that is done; whatever it raises stops the work


def unheard(share: float) -> None:
    """A `Report` to nobody."""


@dataclass
class Routing:
    """Which experts each token of one layer uses, ids [T, K], and weights [T, K] float32.

    `guess` is the same for the next layer with experts, foreseen from this layer's hidden state; it is computed only
    when asked for, and may be wrong. `choice`: what ids and weights come of, for who can choose as he computes. `told`:
    the choice once more, as `ops.route.heard` reads it; nothing where the host reads ids and weights as soon.
    """

    layer: int
    ids: mx.array | np.ndarray
    weights: mx.array | np.ndarray
    guess: "Routing | None" = None
    choice: Choice | None = None
    told: Sequence[mx.array] = ()


class RoutedExpertsCall(Protocol):
    """Whoever implements it knows where expert weights are; the model does not."""

    @property
    def source(self) -> ExpertLoader:
        """Where they are: for turns, and for who asks the model."""
        ...

    def __call__(
        self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None, report: Report = unheard
    ) -> Array:
        """residual + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, in residual's shape.

        `shared` is the shared expert's output, or of up to `MAX_TOKENS` tokens that expert itself.
        """
        ...

    def expect(self, layer: int, tokens: int) -> None:
        """So many tokens are about to reach the experts of `layer`, in a moment."""
        ...

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether foreseeing the experts of `layer` would be of use now."""
        ...
