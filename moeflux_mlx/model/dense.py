"""Feed-forward parts without experts, which compute what `MoE` does of a layer."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.nn as nn

from ..experts.routing import Pieces
from ..kinds import Dense, Residual
from ..layers import MLP, OutputNorm, RMSNorm
from ..ops.backend import Array

PLAIN = Residual()


class NoMLP(nn.Module):
    """The feed-forward part of a layer without one: the stream does not change."""

    reads_tokens: ClassVar[bool] = False

    def forward(self, residual: Array, norm: None, tokens: None = None) -> Array:
        return residual

    def prepare(self, residual: Array, norm: None, tokens: None = None) -> tuple[Array, ...]:
        return (residual,)

    def finish_span(self, parts: Sequence[Array]) -> Pieces[Array]:
        yield from ()
        return parts[0]


class DenseMLP(MLP):
    """A dense layer, as the first ones of DeepSeek-V3: one wide MLP for every token. `residual` and `eps` as for
    `MoE`.
    """

    reads_tokens: ClassVar[bool] = False

    def __init__(self, part: Dense, hidden_size: int, residual: Residual = PLAIN, eps: float = 1e-6):
        super().__init__(hidden_size, part.width, part.activation)
        self._adds = residual.connections is None and not residual.parallel  # otherwise the residual adds its output
        if residual.output_norms:
            self.output = OutputNorm(hidden_size, eps, residual.layer_scale)

    def forward(self, residual: Array, norm: RMSNorm | None, tokens: None = None) -> Array:
        """`residual` [B, L, D] plus the MLP's output for it, normed."""
        if "output" in self:
            return self.output(residual, self(residual, norm=norm))
        return self(residual, norm=norm, residual=residual if self._adds else None)

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: None = None) -> tuple[Array, ...]:
        """All of it."""
        return (self.forward(residual, norm),)

    def finish_span(self, parts: Sequence[Array]) -> Pieces[Array]:
        """Returns the result of `prepare`."""
        yield from ()
        return parts[0]
