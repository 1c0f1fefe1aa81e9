"""The Mixture-of-Experts block: router, shared expert, and the one call to the routed experts."""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..experts.routing import Pieces, RoutedExpertsCall, Routing, finished
from ..kinds import Experts, Residual
from ..layers import MLP, Linear, OutputNorm, RMSNorm, ScaledNorm, Stack
from ..ops import backend
from ..ops.add_normed import Pair
from ..ops.backend import AnyArray, Array
from ..ops.elementwise import float32, softcap
from ..ops.experts import Shared
from ..ops.norm import ConstantNorm
from ..ops.route import Choice, route, route_by_table, route_with_host_copy, router_logits, table_rows
from ..ops.tiles import MAX_TOKENS

PLAIN = Residual()


class Prepared(NamedTuple):
    """What `MoE.prepare` gives for `MoE.finish_span`: arrays of many tokens; `shared`: the shared expert's output."""

    residual: AnyArray
    x: AnyArray
    ids: AnyArray
    weights: AnyArray
    shared: AnyArray = None


class BeforeExperts(NamedTuple):
    """The result of `MoE.choose`, for `MoE.run_experts`.

    Attributes:
        residual: what the block's output is added to, [B, L, D].
        x: the routed experts' input [T, D] or [T, latent].
        logits: of the router, [T, O], those of the experts first.
        gates: the array whose last column is the shared expert's gate.
        ids, weights, host_copy: the choice (`Routing`).
        predicted: the choice of the next MoE block; None: it is not predicted.
        beside: the output of a shared expert that the routed experts' kernels do not take; None: there is none.
    """

    residual: AnyArray
    x: AnyArray
    logits: AnyArray
    gates: AnyArray
    ids: AnyArray
    weights: AnyArray
    host_copy: Sequence[mx.array]
    predicted: tuple[AnyArray, AnyArray, Sequence[mx.array]] | None
    beside: AnyArray


class MoE(nn.Module):
    """Replaces the dense MLP. The kernels of the routed experts also add the stream and the shared expert's output.

    The loader of the model provides `experts`; None if only shapes are needed. `residual` says how the output is added
    to the stream; `eps` is that of the block's own norms.
    """

    keeps_stream: ClassVar[bool] = True  # whether the residual among what `prepare` gives is the stream
    kept_float32: ClassVar[tuple[str, ...]] = ("e_score_correction_bias", "expert_scales", "output_scale")

    def __init__(
        self,
        part: Experts,
        hidden_size: int,
        layer: int,
        experts: RoutedExpertsCall | None,
        residual: Residual = PLAIN,
        eps: float = 1e-6,
    ):
        super().__init__()
        self.layer, self.rule, self.experts = layer, part.router.of_choices, experts
        self._scale = part.router.scale
        self.reads_tokens = self.rule.table is not None  # whether it needs the tokens' ids
        self.gate = Linear(hidden_size, self.rule.experts + part.router.shared, self.rule.logit_bias)
        if self.rule.table is not None:
            self.tid2eid = mx.zeros((self.rule.table, self.rule.top_k), mx.uint32)
        if self.rule.correction_bias:
            self.e_score_correction_bias = mx.zeros((self.rule.experts,))
        if part.shared is not None:
            self.shared_expert = MLP(hidden_size, part.shared.width, part.shared.activation, part.shared.matrices)
            if part.shared.gated:
                self.shared_expert_gate = Linear(hidden_size, 1)
        if self.rule.own_norm:
            self.gate_norm = RMSNorm(hidden_size, eps)
        if self.rule.learned_scale:
            self.output_scale = mx.ones((1,))
        if self.rule.expert_scales:
            self.expert_scales = mx.ones((self.rule.experts,))
        if part.output_eps is not None:
            self.expert_norm = ScaledNorm(part.latent or hidden_size, part.output_eps)
        self._averages = part.shared is not None and part.shared.averaged
        self._is_apart = False  # whether the kernels of the routed experts do not take the shared expert
        self._add_parts(part, hidden_size, residual, eps)
        self.arrange()
        self._following: Callable[[], tuple[MoE, Callable[[AnyArray], AnyArray]]] | None = None

    def _add_parts(self, part: Experts, hidden_size: int, residual: Residual, eps: float) -> None:
        """The parameters of the kind."""

    def arrange(self) -> None:
        """Joins the gates, which read x in float32; called again once they have their tensors."""
        gates = (self.gate, self.shared_expert_gate) if "shared_expert_gate" in self else (self.gate,)
        self._gates = Stack(*gates)
        if self.rule.own_norm:
            weight = self.gate_norm.weight.astype(mx.float32) * self.gate_norm.weight.size**-0.5
            mx.eval(weight)
            self._gate_norm = ConstantNorm(weight, self.gate_norm.eps)

    def set_next(self, following: "MoE", norm: Callable[[AnyArray], AnyArray]) -> None:
        """`following` is the next MoE block, and `norm` the norm before it."""
        # In a function, so that the next layer does not become a submodule.
        self._following = lambda: (following, norm)

    def forward(
        self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None, stream: Array | None = None
    ) -> Array:
        """`residual` [B, L, D] plus the block's output for it, normed; `tokens` as in `prepare`, `stream` as in
        `choose`.
        """
        B, L, _ = residual.shape
        if B * L > MAX_TOKENS:
            return finished(self.finish_span(self.prepare(residual, norm, tokens)))
        return self.run_experts(self.choose(residual, norm, self.should_predict(B * L), tokens, stream))

    def choose(
        self,
        residual: Array,
        norm: RMSNorm | None,
        predict: bool,
        tokens: Array | None = None,
        stream: Array | None = None,
    ) -> BeforeExperts:
        """Everything before the experts, for up to `MAX_TOKENS` tokens, residual [B, L, D]. `predict`: also predicts
        the experts of the next MoE block. `tokens`: ids [B, L], if it `reads_tokens`. `stream`: what `residual` was
        made of, if it is normed; None: itself. It reads no value, so it can be traced.
        """
        x, logits, gates = self._routed(residual, norm)
        choice = self.route_with_host_copy(logits, tokens)
        predicted = self._predict_next(residual if stream is None else stream, tokens) if predict else None
        beside = self._shared_output(residual, x, gates) if self._is_apart else None
        return BeforeExperts(residual, self._latent(x), logits, gates, *choice, predicted, beside)

    def run_experts(self, before: BeforeExperts, experts: Callable[..., AnyArray] | None = None) -> AnyArray:
        """The residual [B, L, D] plus the output of the chosen experts. `experts`: computes them, called as a
        `RoutedExpertsCall`; None: the model's.
        """
        experts = experts or self.experts
        assert experts is not None
        predicted, choice = self._as_routing(before.predicted), self._choice(before.logits)
        norm = self.get("expert_norm")
        routing = Routing(self.layer, before.ids, before.weights, predicted, choice, before.host_copy, norm)
        shared = None if self._is_apart else self._shared(before.gates)
        added_to = self._added_to(before.residual, before.x)
        return self._joined(before.residual, experts(routing, before.x, added_to, shared), before.beside)

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None) -> tuple[Array, ...]:
        """Computes for many tokens what depends on each token alone; `finish` takes the results of one block of tokens,
        or of several joined.

        Args:
            residual: the stream [B, L, D].
            norm: the norm of the block's input; None: no norm.
            tokens: ids [B, L], where it `reads_tokens`.

        Returns:
            `residual`, the routed experts' input [B, L, D] or [B, L, latent], ids and weights [B, L, K], and the shared
            expert's output [B, L, D] if there is one; but for `residual`, [L, .] of a single text.
        """
        B, L, _ = residual.shape
        x, logits, gates = self._routed(residual, norm)
        ids, weights = self.route(logits, tokens)
        prepared = Prepared(residual, self._latent(x), ids, weights, self._shared_output(residual, x, gates))
        return tuple(part if B == 1 else part.reshape(B, L, -1) for part in prepared if part is not None)

    def finish_span(self, parts: Sequence[Array]) -> Pieces[Array]:
        """The routed experts over all tokens, from what `prepare` gave: [B, L, D]."""
        B, L, _ = parts[0].shape
        rows = Prepared(*(part if part.ndim == 2 else part.reshape(B * L, -1) for part in parts))
        assert self.experts is not None
        shared, beside = (None, rows.shared) if self._is_apart else (rows.shared, None)
        predicts = self.keeps_stream and self.should_predict(B * L)
        predicted = self._predict_next(rows.residual) if predicts else None
        guess, norm = self._as_routing(predicted), self.get("expert_norm")
        routing = Routing(self.layer, rows.ids, rows.weights, guess, norm=norm)
        added_to = self._added_to(rows.residual, rows.x)
        given = routing, rows.x, added_to, shared
        made = self.experts(*given) if B * L <= MAX_TOKENS else (yield from self.experts.in_pieces(*given))
        return self._joined(rows.residual, made, beside).reshape(B, L, -1)

    def _choice(self, logits: Array) -> Choice | None:
        """What kernels need to choose themselves; None: they take ids and weights."""
        may = self.rule.table is None and "expert_norm" not in self
        return Choice(logits, self.rule, self._bias, self._scales) if may else None

    def _latent(self, x: Array) -> Array:
        """The routed experts' input for the normed rows."""
        return x

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> Array | None:
        """The shared expert's output for the stream or its normed rows x; None: there is no shared expert."""
        shared = self._shared(gates)
        return None if shared is None else shared.rows(x)

    def _added_to(self, residual: Array, x: Array) -> Array:
        """What the routed experts' kernels add to their output for x."""
        return residual

    def _joined(self, residual: Array, made: Array, beside: AnyArray) -> Array:
        """The stream after the block, from the routed experts' output including `_added_to`. `beside`: the output of a
        shared expert that the kernels do not take, or None.
        """
        return made

    def should_predict(self, tokens: int) -> bool:
        """Whether to predict the experts of the next MoE block, now."""
        if self._following is None or self.experts is None:
            return False
        return self.experts.wants_guess(self._following()[0].layer, tokens)

    def _predict_next(self, rows: Array, tokens: AnyArray = None) -> tuple[Array, Array, Sequence[mx.array]]:
        """The next MoE layer's choice for this layer's hidden state, rescaled by that layer's norm. If that layer has a
        table, its experts, all equally likely.
        """
        assert self._following is not None
        following, norm = self._following()
        if following.rule.table is not None:
            ids = table_rows(following.tid2eid, tokens.reshape(-1))
            return ids, (ids * 0 + 1).astype(backend.library_of(ids).float32), []
        # Norms of other kinds are launches of their own.
        given = (rows, norm) if isinstance(norm, RMSNorm) else (norm(rows), None)
        return following.route_with_host_copy(following._routed(*given)[1])

    def _as_routing(self, predicted: tuple[Array, Array, Sequence[mx.array]] | None) -> Routing | None:
        if predicted is None or self._following is None:
            return None
        ids, weights, host_copy = predicted
        return Routing(self._following()[0].layer, ids, weights, host_copy=host_copy)

    def _routed(self, residual: Array, norm: RMSNorm | None) -> tuple[Array, Array, Array]:
        """From the stream [..., D]: the T normed rows [T, D]; logits [T, O], those of the experts first; and the array
        whose last column is the shared expert's gate.
        """
        gates = self._gates.stacked
        own = self._gate_norm if self.rule.own_norm else norm
        if gates is not None and (norm is not None or own is None):
            bias = gates.bias if "bias" in gates else None
            x_norm = norm.weight if norm is not None and self.rule.own_norm else None
            weight, eps = (None, 0.0) if own is None else (own.weight, own.eps)
            x, logits = router_logits(residual, weight, eps, gates, bias, x_norm)
            return x, self._limited(logits), logits
        rows = residual.reshape(-1, residual.shape[-1])
        x = rows if norm is None else norm(rows)
        if self.rule.own_norm:
            logits = self.gate(float32(self._gate_norm(rows)))
            return x, self._limited(logits), logits
        joined, outputs = self._gates(float32(x))
        logits = outputs[0] if joined is None else joined
        return x, self._limited(logits), outputs[-1] if joined is None else joined

    def _limited(self, logits: Array) -> Array:
        """The logits, multiplied and limited as the rule says."""
        factor = self.rule.logit_scale
        return softcap(logits if factor == 1.0 else logits * factor, self.rule.softcap)

    def route(self, logits: Array, tokens: AnyArray = None) -> tuple[Array, Array]:
        """logits [T, O] float32 and, where the rule has a table, T ids -> (ids [T, K], weights [T, K] float32)."""
        if self.rule.table is not None:
            return route_by_table(logits, self.rule, self.tid2eid, tokens.reshape(-1))
        return route(logits, self.rule, self._bias, self._scales)

    def route_with_host_copy(
        self, logits: Array, tokens: Array | None = None
    ) -> tuple[Array, Array, Sequence[mx.array]]:
        """The same with a copy for a host that waits."""
        if self.rule.table is not None:
            ids, weights = self.route(logits, tokens)
            return ids, weights, []
        return route_with_host_copy(logits, self.rule, self._bias, self._scales)

    @property
    def _bias(self) -> mx.array | None:
        return self.e_score_correction_bias if self.rule.correction_bias else None

    @property
    def _scales(self) -> mx.array | None:
        return self.expert_scales if self.rule.expert_scales else None

    def _shared(self, gates: Array) -> Shared | None:
        if "shared_expert" not in self:
            return None
        mlp = self.shared_expert
        own = gates if "shared_expert_gate" in self else None
        if self._averages:
            own = backend.zeros_like(gates[:, :1])  # whose sigmoid is 1/2
        return Shared(mlp, mlp.gate_up, mlp.down_proj, own, mlp.activation)


class NormedMoE(MoE):
    """An `MoE` with norms between experts and stream: of the whole output (`Residual.output_norms`), or of the routed
    experts' and of the shared expert's (`SharedExpert.normed`), or of all three.
    """

    def _add_parts(self, part: Experts, hidden_size: int, residual: Residual, eps: float) -> None:
        self._is_apart = part.shared is not None and part.shared.normed
        if self._is_apart:
            self.shared_input_norm = RMSNorm(hidden_size, eps)
            self.shared_output_norm, self.routed_output_norm = (RMSNorm(hidden_size, eps) for _ in range(2))
        if residual.output_norms:
            self.output = OutputNorm(hidden_size, eps, residual.layer_scale)

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> Array | None:
        """Of the stream with a norm of its own if the shared expert is normed; its last norm follows later."""
        if self._is_apart:
            return self.shared_expert(residual, norm=self.shared_input_norm)
        return super()._shared_output(residual, x, gates)

    def _added_to(self, residual: Array, x: Array) -> Array:
        return backend.zeros_like(residual)

    def _joined(self, residual: AnyArray, made: AnyArray, beside: AnyArray) -> AnyArray:
        if self._is_apart:
            made = Pair(made, self.routed_output_norm, beside, self.shared_output_norm)
        if "output" in self:
            return self.output(residual, made)
        return residual + made.sum()


class LatentMoE(MoE):
    """An `MoE` whose routed experts work between two projections. The shared expert adds the stream to its output, and
    the last projection adds both.
    """

    def _add_parts(self, part: Experts, hidden_size: int, residual: Residual, eps: float) -> None:
        assert part.latent is not None
        self._is_apart = part.shared is not None
        self.fc1_latent_proj = Linear(hidden_size, part.latent)
        self.fc2_latent_proj = Linear(part.latent, hidden_size)
        if part.latent_input_norm:
            self.latent_input_norm = RMSNorm(part.latent, eps)
        if part.latent_norm:
            self.latent_norm = RMSNorm(part.latent, eps)

    def _latent(self, x: Array) -> Array:
        latent = self.fc1_latent_proj(x)
        return self.latent_input_norm(latent) if "latent_input_norm" in self else latent

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> Array | None:
        """Including the stream."""
        shared = self._shared(gates)
        return None if shared is None else shared.rows(x, residual.reshape(x.shape)).reshape(residual.shape)

    def _added_to(self, residual: Array, x: Array) -> Array:
        return backend.zeros_like(x).reshape(*residual.shape[:-1], -1)

    def _joined(self, residual: Array | None, made: Array, beside: Array | None) -> Array:
        return self.fc2_latent_proj(made, self.get("latent_norm"), residual if beside is None else beside)


class InputScalingMoE(MoE):
    """An `MoE` that multiplies the input of a token's only expert by its weight, but not that of the shared expert. The
    shared expert adds the stream to its output, and the routed experts add both.
    """

    def _add_parts(self, part: Experts, hidden_size: int, residual: Residual, eps: float) -> None:
        assert part.shared is not None, "no family scales the input of experts without a shared one"
        self._is_apart = True

    def choose(self, residual: Array, norm: RMSNorm | None, predict: bool, *more: AnyArray) -> BeforeExperts:
        before = super().choose(residual, norm, predict, *more)
        x, weights = scaled_input(before.x, before.weights)
        return before._replace(residual=before.beside, x=x, weights=weights, host_copy=[], beside=None)

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None) -> tuple[Array, ...]:
        _, x, ids, weights, beside = super().prepare(residual, norm, tokens)
        x, weights = scaled_input(x, weights)
        return beside, x, ids, weights

    def _choice(self, logits: Array) -> None:
        """None: kernels that choose themselves would weigh outputs."""

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> Array | None:
        """Including the stream."""
        shared = self._shared(gates)
        return None if shared is None else shared.rows(x, residual.reshape(x.shape)).reshape(residual.shape)


def scaled_input(x: Array, weights: Array) -> tuple[Array, Array]:
    """x [..., D] times weights [..., 1], and as many weights of 1."""
    few = weights.size <= MAX_TOKENS
    ones = backend.constant(1.0, weights.shape) if few else mx.ones(weights.shape)
    return x * weights.astype(x.dtype), backend.of_kind(ones, x)
