"""The interface between a model and its experts: a layer's routing, and the call that computes the chosen experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..ops.backend import Array, join
from ..ops.experts import Shared
from ..ops.route import Choice
from ..ops.tiles import LEASED_TOKENS
from .source import ExpertLoader

Report = Callable[[float], Any]  # gets the share of the work that is done; an exception from it stops the work


def ignore_report(share: float) -> None:
    """A `Report` to nobody."""


@dataclass
class Routing:
    """Which experts each token of one layer uses, ids [T, K], and weights [T, K] float32.

    `guess` is the same for the next layer with experts, predicted from this layer's hidden state; it is computed only
    when asked for, and may be wrong. `choice`: what ids and weights come of, for who can choose as he computes.
    `host_copy`: the choice once more, as `ops.route.read_host_copy` reads it; nothing where the host reads ids and
    weights as soon.
    """

    layer: int
    ids: mx.array | np.ndarray
    weights: mx.array | np.ndarray
    guess: "Routing | None" = None
    choice: Choice | None = None
    host_copy: Sequence[mx.array] = ()

    def part(self, rows: slice) -> "Routing":
        """Of some of the tokens, without `guess`, `choice` and `host_copy`."""
        return Routing(self.layer, self.ids[rows], self.weights[rows])


class RoutedExpertsCall(Protocol):
    """An implementation knows where expert weights are; the model does not."""

    @property
    def source(self) -> ExpertLoader:
        """Where they are: for turns, and for who asks the model."""
        ...

    def __call__(
        self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None, report: Report = ignore_report
    ) -> Array:
        """residual + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, in residual's shape.

        `shared` is the shared expert's output, or of up to `MAX_TOKENS` tokens that expert itself.
        """
        ...

    def expect(self, layer: int, tokens: int) -> None:
        """So many tokens are about to reach the experts of `layer`, in a moment."""
        ...

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether predicting the experts of `layer` would be of use now."""
        ...


def in_parts(
    experts: RoutedExpertsCall, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None
) -> Array:
    """`experts` of parts of a step's rows, about equal and none above `LEASED_TOKENS`, joined."""
    parts, rest = -(-len(x) // LEASED_TOKENS), residual.reshape(len(x), -1)
    ends, made = [len(x) * part // parts for part in range(parts + 1)], []
    for rows in map(slice, ends, ends[1:]):
        own: Any = shared
        if isinstance(shared, Shared):
            own = replace(shared, gates=None if shared.gates is None else shared.gates[rows])
        elif shared is not None:
            own = shared[rows]
        made.append((experts(routing.part(rows), x[rows], rest[rows], own),))
    return join(made, axis=0)[0].reshape(residual.shape)
