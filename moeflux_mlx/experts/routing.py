"""The interface between a model and its experts: a layer's routing, and the call that computes the chosen experts."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import mlx.core as mx
import numpy as np

from ..ops.backend import Array, join
from ..ops.combine import RowNorm
from ..ops.experts import Shared
from ..ops.route import Choice
from ..ops.tiles import LEASED_TOKENS
from .source import ExpertLoader

Made = TypeVar("Made")
Done = TypeVar("Done")
Pieces: TypeAlias = Generator[float, None, Made]  # yields the share that is done after each piece


def finished(pieces: Generator[Done, None, Made], report: Callable[[Done], object] = lambda done: None) -> Made:
    """The result of all pieces; `report` is called with what each yields."""
    with closing(pieces):
        try:
            while True:
                report(next(pieces))
        except StopIteration as end:
            return end.value


def as_share(pieces: Pieces[Made], start: float, share: float) -> Pieces[Made]:
    """The pieces as `share` of a larger work, behind what is done at its `start`."""
    with closing(pieces):
        try:
            while True:
                yield start + share * next(pieces)
        except StopIteration as end:
            return end.value


@dataclass
class Routing:
    """The experts that each token uses in one layer: ids [T, K] and weights [T, K] float32.

    `guess` is the same for the next layer with experts, predicted from this layer's hidden state; it is computed only
    if requested, and may be wrong. `choice`: the input of the choice, for kernels that make it themselves. `host_copy`:
    a copy of the choice for `ops.route.read_host_copy`; empty if the host can read ids and weights just as soon.
    `norm`: of each expert's output before it is weighed; None: no norm.
    """

    layer: int
    ids: mx.array | np.ndarray
    weights: mx.array | np.ndarray
    guess: "Routing | None" = None
    choice: Choice | None = None
    host_copy: Sequence[mx.array] = ()
    norm: RowNorm | None = None

    def part(self, rows: slice) -> "Routing":
        """The routing of some of the tokens, without `guess`, `choice` and `host_copy`."""
        return Routing(self.layer, self.ids[rows], self.weights[rows], norm=self.norm)


class RoutedExpertsCall(Protocol):
    """Computes routed experts. An implementation knows where expert weights are; the model does not."""

    @property
    def source(self) -> ExpertLoader:
        """The source of the experts, for turns and statistics."""

    def __call__(self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None) -> Array:
        """residual + sum_k weights[:, k] * norm(expert(ids[:, k])(x)) + shared, in residual's shape, for up to
        `MAX_TOKENS` tokens. `shared` is the shared expert or its output.
        """

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | None) -> Pieces[Array]:
        """The same for more tokens. Between two pieces no record is leased."""

    def expect(self, layer: int, tokens: int) -> None:
        """Announces that `tokens` tokens are about to reach the experts of `layer`."""

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether a prediction of the experts of `layer` would be used now."""


@runtime_checkable
class AtOnce(Protocol):
    """A `RoutedExpertsCall` that can compute a prompt's experts without a wait for their ids."""

    def are_at_once(self, layer: int, dtype: mx.Dtype, rows: int) -> bool:
        """Whether `in_pieces` computes so with activations of `dtype` and so many pairs of a token and an expert."""


@runtime_checkable
class FromTables(Protocol):
    """A `RoutedExpertsCall` that can compute a token's experts without a request."""

    def reads_tables(self, layer: int, top_k: int) -> bool:
        """Whether kernels compute `top_k` experts of the layer from a table."""

    def from_table(
        self, layer: int, memory: mx.array, buffers: Sequence[mx.array], host_copy: list[mx.array]
    ) -> Callable[..., mx.array]:
        """Computes what a call does from the memory and the buffers of the layer's `RecordTable`; it can be traced.
        `host_copy` gets the arrays of the chosen ids that the host should read (`ops.route.read_ids`).
        """

    def accepted(self, layer: int) -> None:
        """To be called when a token has used experts of the layer without a request."""

    @property
    def reads_ahead(self) -> bool:
        """Whether records are read before they are requested."""


def in_parts(
    experts: RoutedExpertsCall, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None
) -> Array:
    """Calls `experts` with parts of a step's rows, about equal and at most `LEASED_TOKENS` each, and joins the
    results.
    """
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
