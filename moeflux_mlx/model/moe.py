"""The Mixture-of-Experts block: router, shared expert, and the one call behind which experts stream."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..experts.routing import Report, RoutedExpertsCall, Routing, unheard
from ..kinds import Experts
from ..ops.backend import Array
from ..ops.elementwise import float32
from ..ops.experts import Shared
from ..ops.route import Choice, route, route_told, router_logits
from ..ops.tiles import MAX_TOKENS
from .layers import MLP, Linear, RMSNorm, Stack


class MoE(nn.Module):
    """Replaces the dense MLP. `experts` is given by whoever loads the model; None where only shapes are wanted."""

    def __init__(self, part: Experts, hidden_size: int, layer: int, experts: RoutedExpertsCall | None):
        super().__init__()
        self.layer, self.rule, self.experts = layer, part.router, experts
        self.gate = Linear(hidden_size, self.rule.experts, self.rule.logit_bias)
        if self.rule.correction_bias:
            self.e_score_correction_bias = mx.zeros((self.rule.experts,))
        if part.shared is not None:
            self.shared_expert = MLP(hidden_size, part.shared.width, part.shared.activation)
            if part.shared.gated:
                self.shared_expert_gate = Linear(hidden_size, 1)
        self.arrange()
        self._following: Callable[[], tuple[MoE, RMSNorm]] | None = None

    def arrange(self) -> None:
        """Joins the gates, which read x in float32; called again once they have their tensors."""
        gates = (self.gate, self.shared_expert_gate) if "shared_expert_gate" in self else (self.gate,)
        self._gates = Stack(*gates)

    def foresee(self, following: "MoE", norm: RMSNorm) -> None:
        """`following` is the next MoE block, and `norm` the norm before it."""
        # Behind a function, so that the next layer does not become a part of this module.
        self._following = lambda: (following, norm)

    def add_to(self, residual: Array, norm: RMSNorm) -> Array:
        """`residual` [B, L, D] and what the block makes of it, normed."""
        B, L, _ = residual.shape
        if B * L > MAX_TOKENS:
            return self.end(self.begin(residual, norm))
        return self.add_chosen(self.choose(residual, norm, self.foresees(B * L)))

    def choose(self, residual: Array, norm: RMSNorm, foresees: bool) -> list[Any]:
        """What `add_chosen` takes: of up to `MAX_TOKENS` tokens, residual [B, L, D], all before their experts.

        `foresees`: with the experts of the next MoE block. Nothing here looks at a value.
        """
        x, logits, gates = self._routed(residual, norm)
        return [residual, x, logits, gates, self.tell(logits), self._foreseen(residual) if foresees else None]

    def add_chosen(self, parts: Sequence[Any]) -> Any:
        """The stream [B, L, D] that `choose` was given, and what the experts that it chose make of it."""
        residual, x, logits, gates, (ids, weights, told), foreseen = parts
        assert self.experts is not None
        choice = Choice(logits, self.rule, self._bias)
        routing = Routing(self.layer, ids, weights, self._guessed(foreseen), choice, told)
        return self.experts(routing, x, residual, self._shared(gates))

    def begin(self, residual: Array, norm: RMSNorm) -> tuple[Array, ...]:
        """What each token of many needs of itself alone; `end` takes it, of one block of tokens or of several joined.

        Args:
            residual: the stream [B, L, D].
            norm: what the block's input is normed with.

        Returns:
            `residual`, the normed input [B, L, D], ids and weights [B, L, K], and the shared expert's output [B, L, D]
            if there is one.
        """
        B, L, _ = residual.shape
        x, logits, gates = self._routed(residual, norm)
        ids, weights = self.route(logits)
        parts = [residual, x, ids, weights]
        shared = self._shared(gates)
        if shared is not None:
            parts.append(shared.rows(x))
        return tuple(part.reshape(B, L, -1) for part in parts)

    def end(self, parts: Sequence[Array], report: Report = unheard) -> Array:
        """The routed experts over all tokens, from what `begin` gave: [B, L, D].

        `report` is told what share of them is done.
        """
        B, L, _ = parts[0].shape
        rows = [part.reshape(B * L, -1) for part in parts]
        residual, x, ids, weights = rows[:4]
        assert self.experts is not None
        foreseen = self._foreseen(residual) if self.foresees(B * L) else None
        routing = Routing(self.layer, ids, weights, self._guessed(foreseen))
        return self.experts(routing, x, residual, rows[4] if len(rows) > 4 else None, report).reshape(B, L, -1)

    def foresees(self, tokens: int) -> bool:
        """Whether to foresee the experts of the next MoE block, now."""
        if self._following is None or self.experts is None:
            return False
        return self.experts.wants_guess(self._following()[0].layer, tokens)

    def _foreseen(self, rows: Array) -> tuple[Array, Array, Sequence[mx.array]]:
        """The next MoE layer's choice on this layer's hidden state, which its own norm rescales."""
        assert self._following is not None
        following, norm = self._following()
        return following.tell(following._routed(rows, norm)[1])

    def _guessed(self, foreseen: tuple[Array, Array, Sequence[mx.array]] | None) -> Routing | None:
        if foreseen is None or self._following is None:
            return None
        ids, weights, told = foreseen
        return Routing(self._following()[0].layer, ids, weights, told=told)

    def _routed(self, residual: Array, norm: RMSNorm) -> tuple[Array, Array, Array]:
        """Of the stream [..., D] the T normed rows [T, D]; logits [T, O], the experts' first; and what has the shared
        expert's gate last."""
        gates = self._gates.stacked
        if gates is not None:
            bias = gates.bias if "bias" in gates else None
            x, logits = router_logits(residual, norm.weight, norm.eps, gates, bias)
            return x, logits, logits
        x = norm(residual.reshape(-1, residual.shape[-1]))
        _, found = self._gates(float32(x))
        return x, found[0], found[-1]

    def route(self, logits: Array) -> tuple[Array, Array]:
        """logits [T, O] float32 -> (ids [T, K], weights [T, K] float32)."""
        return route(logits, self.rule, self._bias)

    def tell(self, logits: Array) -> tuple[Array, Array, Sequence[mx.array]]:
        """The same, for a wait."""
        return route_told(logits, self.rule, self._bias)

    @property
    def _bias(self) -> mx.array | None:
        return self.e_score_correction_bias if self.rule.correction_bias else None

    def _shared(self, gates: Array) -> Shared | None:
        if "shared_expert" not in self:
            return None
        mlp = self.shared_expert
        own = gates if "shared_expert_gate" in self else None
        return Shared(mlp, mlp.gate_up, mlp.down_proj, own, mlp.activation)
