"""The Mixture-of-Experts block: router, shared expert, and the one call behind which experts stream."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..experts.routing import Report, RoutedExpertsCall, Routing, ignore_report
from ..kinds import Experts
from ..ops.backend import Array
from ..ops.elementwise import float32, softcap
from ..ops.experts import Shared
from ..ops.route import Choice, route, route_with_host_copy, router_logits
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

    def set_next(self, following: "MoE", norm: RMSNorm) -> None:
        """`following` is the next MoE block, and `norm` the norm before it."""
        # Behind a function, so that the next layer does not become a part of this module.
        self._following = lambda: (following, norm)

    def forward(self, residual: Array, norm: RMSNorm) -> Array:
        """`residual` [B, L, D] and what the block makes of it, normed."""
        B, L, _ = residual.shape
        if B * L > MAX_TOKENS:
            return self.finish(self.prepare(residual, norm))
        return self.run_experts(self.choose(residual, norm, self.should_predict(B * L)))

    def choose(self, residual: Array, norm: RMSNorm, predict: bool) -> list[Any]:
        """What `run_experts` takes: of up to `MAX_TOKENS` tokens, residual [B, L, D], all before their experts.

        `predict`: with the experts of the next MoE block. Nothing here looks at a value.
        """
        x, logits, gates = self._routed(residual, norm)
        routed = self.route_with_host_copy(logits)
        return [residual, x, logits, gates, routed, self._predict_next(residual) if predict else None]

    def run_experts(self, parts: Sequence[Any]) -> Any:
        """The stream [B, L, D] that `choose` was given, and what the experts that it chose make of it."""
        residual, x, logits, gates, (ids, weights, host_copy), predicted = parts
        assert self.experts is not None
        choice = Choice(logits, self.rule, self._bias)
        routing = Routing(self.layer, ids, weights, self._as_routing(predicted), choice, host_copy)
        return self.experts(routing, x, residual, self._shared(gates))

    def prepare(self, residual: Array, norm: RMSNorm) -> tuple[Array, ...]:
        """What each token of many needs of itself alone; `finish` takes it, of one block of tokens or several joined.

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

    def finish(self, parts: Sequence[Array], report: Report = ignore_report) -> Array:
        """The routed experts over all tokens, from what `prepare` gave: [B, L, D].

        `report` is told what share of them is done.
        """
        B, L, _ = parts[0].shape
        rows = [part.reshape(B * L, -1) for part in parts]
        residual, x, ids, weights = rows[:4]
        assert self.experts is not None
        predicted = self._predict_next(residual) if self.should_predict(B * L) else None
        routing = Routing(self.layer, ids, weights, self._as_routing(predicted))
        return self.experts(routing, x, residual, rows[4] if len(rows) > 4 else None, report).reshape(B, L, -1)

    def should_predict(self, tokens: int) -> bool:
        """Whether to predict the experts of the next MoE block, now."""
        if self._following is None or self.experts is None:
            return False
        return self.experts.wants_guess(self._following()[0].layer, tokens)

    def _predict_next(self, rows: Array) -> tuple[Array, Array, Sequence[mx.array]]:
        """The next MoE layer's choice on this layer's hidden state, which its own norm rescales."""
        assert self._following is not None
        following, norm = self._following()
        return following.route_with_host_copy(following._routed(rows, norm)[1])

    def _as_routing(self, predicted: tuple[Array, Array, Sequence[mx.array]] | None) -> Routing | None:
        if predicted is None or self._following is None:
            return None
        ids, weights, host_copy = predicted
        return Routing(self._following()[0].layer, ids, weights, host_copy=host_copy)

    def _routed(self, residual: Array, norm: RMSNorm) -> tuple[Array, Array, Array]:
        """Of the stream [..., D] the T normed rows [T, D]; logits [T, O], the experts' first; and what has the shared
        expert's gate last."""
        gates = self._gates.stacked
        if gates is not None:
            bias = gates.bias if "bias" in gates else None
            x, logits = router_logits(residual, norm.weight, norm.eps, gates, bias)
            return x, softcap(logits, self.rule.softcap), logits
        x = norm(residual.reshape(-1, residual.shape[-1]))
        _, outputs = self._gates(float32(x))
        return x, softcap(outputs[0], self.rule.softcap), outputs[-1]

    def route(self, logits: Array) -> tuple[Array, Array]:
        """logits [T, O] float32 -> (ids [T, K], weights [T, K] float32)."""
        return route(logits, self.rule, self._bias)

    def route_with_host_copy(self, logits: Array) -> tuple[Array, Array, Sequence[mx.array]]:
        """The same, for a wait."""
        return route_with_host_copy(logits, self.rule, self._bias)

    @property
    def _bias(self) -> mx.array | None:
        return self.e_score_correction_bias if self.rule.correction_bias else None

    def _shared(self, gates: Array) -> Shared | None:
        if "shared_expert" not in self:
            return None
        mlp = self.shared_expert
        own = gates if "shared_expert_gate" in self else None
        return Shared(mlp, mlp.gate_up, mlp.down_proj, own, mlp.activation)
