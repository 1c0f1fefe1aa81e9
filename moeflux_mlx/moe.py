"""The Mixture-of-Experts block: router, shared expert, and the one call behind which experts stream."""

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from .config import DEEPSEEK_V3, ModelArgs
from .linear import MLP, Linear
from .router import noaux_tc_topk, softmax_topk


class RoutedExpertsCall(Protocol):
    """The seam: whoever implements it knows where expert weights are; the model does not."""

    def __call__(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        h_mid: mx.array,
        shared: mx.array | None,
    ) -> mx.array:
        """h_mid + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, all [T, H]; ids, weights [T, K]."""
        ...


class MoE(nn.Module):
    """Replaces the dense MLP. `experts` is given by whoever loads the model."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall):
        super().__init__()
        self.args, self.layer, self.experts = args, layer, experts
        D, width = args.hidden_size, args.shared_expert_intermediate_size
        self.gate = Linear(D, args.num_experts)
        if args.model_type == DEEPSEEK_V3:
            self.e_score_correction_bias = mx.zeros((args.num_experts,))
        if width:
            self.shared_expert = MLP(D, width)
            if args.model_type != DEEPSEEK_V3:
                self.shared_expert_gate = Linear(D, 1)

    def __call__(self, x: mx.array, h_mid: mx.array) -> mx.array:
        """x: the normed input [B, L, D]; h_mid: the residual stream it was taken from, same shape."""
        B, L, D = x.shape
        flat = x.reshape(B * L, D)
        ids, weights = self.route(flat)
        shared = self._shared(flat) if "shared_expert" in self else None
        out = self.experts(self.layer, flat, ids, weights, h_mid.reshape(B * L, D), shared)
        return out.reshape(B, L, D)

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, D] -> (ids [T, K] uint32, weights [T, K] float32)."""
        args = self.args
        logits = self.gate(x.astype(mx.float32))
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

    def _shared(self, x: mx.array) -> mx.array:
        """Every token's expert: scaled by a sigmoid gate in the Qwen families, plain in DeepSeek's."""
        out = self.shared_expert(x)
        if "shared_expert_gate" in self:
            out = mx.sigmoid(self.shared_expert_gate(x)) * out
        return out
