"""The Mixture-of-Experts block: router, shared expert, and the one call behind which experts stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..ops import cpu
from ..ops.route import noaux_tc_topk, softmax_topk
from ..spec import DEEPSEEK_V3, ModelArgs
from .linear import MLP, Linear, RMSNorm, Stack


@dataclass
class Routing:
    """Which experts each token of one layer uses, ids [T, K] uint32, and weights [T, K] float32.

    `guess` is the same for the next MoE layer, foreseen from this layer's hidden state; it is computed only
    when asked for, and may be wrong.
    """

    layer: int
    ids: mx.array
    weights: mx.array
    guess: "Routing | None" = None


class RoutedExpertsCall(Protocol):
    """The seam: whoever implements it knows where expert weights are; the model does not."""

    def __call__(self, routing: Routing, x: mx.array, h_mid: mx.array, shared: mx.array | None) -> mx.array:
        """h_mid + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, all [T, H]."""
        ...

    def wants_guess(self, layer: int, tokens: int) -> bool:
        """Whether foreseeing the experts of `layer` would be of use now."""
        ...


class MoE(nn.Module):
    """Replaces the dense MLP. `experts` is given by whoever loads the model."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None):
        super().__init__()
        self.args, self.layer = args, layer
        self.experts: Any = experts  # None in a model that is made for its shapes only
        D, width = args.hidden_size, args.shared_expert_intermediate_size
        self.gate = Linear(D, args.num_experts)
        if args.model_type == DEEPSEEK_V3:
            self.e_score_correction_bias = mx.zeros((args.num_experts,))
        if width:
            self.shared_expert = MLP(D, width)
            if args.model_type != DEEPSEEK_V3:
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

    def __call__(self, x: mx.array, h_mid: mx.array) -> mx.array:
        """x: the normed input [B, L, D]; h_mid: the residual stream it was taken from, same shape."""
        B, L, D = x.shape
        flat = x.reshape(B * L, D)
        mid = h_mid.reshape(B * L, D)
        logits, *open_ = self._gates(cpu.float32(flat))
        routing = Routing(self.layer, *self.route(logits), self._guess(mid))
        shared = self._shared(flat, *open_) if "shared_expert" in self else None
        return self.experts(routing, flat, mid, shared).reshape(B, L, D)

    def _guess(self, h_mid: mx.array) -> Routing | None:
        """The next MoE layer's router on this layer's hidden state, which its own norm rescales."""
        if self._following is None:
            return None
        following, norm = self._following()
        if not self.experts.wants_guess(following.layer, len(h_mid)):
            return None
        logits = following.gate(cpu.float32(norm(h_mid)))
        return Routing(following.layer, *following.route(logits))

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits [T, E] float32 -> (ids [T, K] uint32, weights [T, K] float32)."""
        args = self.args
        if args.model_type != DEEPSEEK_V3:
            return softmax_topk(logits, args.num_experts_per_tok, args.norm_topk_prob)
        return noaux_tc_topk(
            logits,
            self.e_score_correction_bias,
            args.num_experts_per_tok,
            args.n_group,
            args.topk_group,
            args.norm_topk_prob,
            args.routed_scaling_factor,
        )

    def _shared(self, x: mx.array, gate: mx.array | None = None) -> mx.array:
        """Every token's expert: scaled by the sigmoid of `gate` [T, 1] in the Qwen families, plain in DeepSeek's."""
        if gate is not None:
            gate = cpu.sigmoid(gate) if cpu.takes(x) else mx.sigmoid(gate)
        return self.shared_expert(x, gate)
