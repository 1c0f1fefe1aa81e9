"""The Mixture-of-Experts block: router, shared expert, and the one call behind which experts stream."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..experts.routing import RoutedExpertsCall, Routing
from ..ops.backend import Array
from ..ops.elementwise import float32, sigmoid
from ..ops.route import route
from ..spec import ModelArgs
from .layers import MLP, Linear, RMSNorm, Stack


class MoE(nn.Module):
    """Replaces the dense MLP. `experts` is given by whoever loads the model; None where only shapes are wanted."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None):
        super().__init__()
        self.layer, self.rule, self.experts = layer, args.router, experts
        D, width = args.hidden_size, args.shared_expert_intermediate_size
        self.gate = Linear(D, args.num_experts)
        if self.rule.correction_bias:
            self.e_score_correction_bias = mx.zeros((args.num_experts,))
        if width:
            self.shared_expert = MLP(D, width)
            if args.shared_expert_gate:
                self.shared_expert_gate = Linear(D, 1)
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

    def __call__(self, x: Array, residual: Array) -> Array:
        """x: the normed input [B, L, D]; residual: the stream it was taken from, same shape."""
        B, L, D = x.shape
        flat = x.reshape(B * L, D)
        mid = residual.reshape(B * L, D)
        found = self._gates(float32(flat))  # the router's logits, and the shared expert's gate
        routing = Routing(self.layer, *self.route(found[0]), self._guess(mid))
        shared = self._shared(flat, found[1] if len(found) > 1 else None) if "shared_expert" in self else None
        assert self.experts is not None
        return self.experts(routing, flat, mid, shared).reshape(B, L, D)

    def _guess(self, residual: Array) -> Routing | None:
        """The next MoE layer's router on this layer's hidden state, which its own norm rescales."""
        if self._following is None or self.experts is None:
            return None
        following, norm = self._following()
        if not self.experts.wants_guess(following.layer, len(residual)):
            return None
        logits = following.gate(float32(norm(residual)))
        return Routing(following.layer, *following.route(logits))

    def route(self, logits: Array) -> tuple[Array, Array]:
        """logits [T, E] float32 -> (ids [T, K], weights [T, K] float32)."""
        return route(logits, self.rule, self.e_score_correction_bias if self.rule.correction_bias else None)

    def _shared(self, x: Array, gate: Array | None = None) -> Array:
        """Every token's expert, scaled by the sigmoid of `gate` [T, 1] where there is one."""
        return self.shared_expert(x, None if gate is None else sigmoid(gate))
