"""The module of a layer's feed-forward part, by its kind: routed experts, also those whose output is added behind the
next layer, and parts without experts, which compute what `MoE` does of a layer.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..experts.routing import Pieces, RoutedExpertsCall
from ..kinds import Dense, Experts, Residual, Shortcut
from ..layers import MLP, OutputNorm, RMSNorm
from ..ops.backend import AnyArray, Array, has_kernels, library_of, of_kind, zeros_like
from ..ops.route import SCORES
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from .moe import (
    BeforeExperts,
    InputScalingMoE,
    LatentMoE,
    MoE,
    NormedMoE,
    Prepared,
)

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
        if part.scaled:
            self.output_scale = mx.ones((1,))
        self._adds = residual.connections is None and not residual.adds_itself  # otherwise the residual adds its output
        if residual.output_norms:
            self.output = OutputNorm(hidden_size, eps, residual.layer_scale)

    def forward(self, residual: Array, norm: RMSNorm | None, tokens: None = None) -> Array:
        """`residual` [B, L, D] plus the MLP's output for it, normed."""
        if "output" in self:
            return self.output(residual, self(residual, norm=norm))
        scale = of_kind(self.output_scale, residual) if "output_scale" in self else None
        return self(residual, scale, norm, residual if self._adds else None)

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: None = None) -> tuple[Array, ...]:
        """All of it."""
        return (self.forward(residual, norm),)

    def finish_span(self, parts: Sequence[Array]) -> Pieces[Array]:
        """Returns the result of `prepare`."""
        yield from ()
        return parts[0]


class SharingMoE(MoE):
    """An `MoE` whose shared experts are weighed with the routed ones (`Router.shared`). They are one MLP, in which each
    has as many rows; the routed experts add their output, and the stream unless the residual adds it.
    """

    keeps_stream: ClassVar[bool] = False

    def _add_parts(self, part: Experts, hidden_size: int, residual: Residual, eps: float) -> None:
        assert part.shared is not None and not part.shared.width % part.router.shared, "shared experts are equally wide"
        self._is_apart, self._adds = True, not residual.adds_itself
        self._each = part.shared.width // part.router.shared

    def choose(self, residual: Array, norm: RMSNorm | None, predict: bool, *more: AnyArray) -> BeforeExperts:
        before = super().choose(residual, norm, predict, *more)
        weights, beside = self._shares(before.x, before.logits, before.weights, residual)
        return before._replace(residual=beside, weights=weights, host_copy=[])

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None) -> tuple[Array, ...]:
        B, L, _ = residual.shape
        x, logits, _ = self._routed(residual, norm)
        ids, scores = self.route(logits, tokens)
        weights, beside = self._shares(x, logits, scores, residual)
        return tuple(part if B == 1 else part.reshape(B, L, -1) for part in (beside, x, ids, weights))

    def _shares(self, x: Array, logits: Array, scores: Array, residual: Array) -> tuple[Array, Array]:
        """The weights [T, K] of the routed experts by their scores, and the shared experts' output, which they add."""
        own = SCORES[self.rule.score](logits[:, self.rule.experts :])
        factor = self._scale / (_sum(scores) + _sum(own))
        if "output_scale" in self:
            factor = factor * of_kind(self.output_scale, factor)
        of_rows = library_of(x).repeat(own * factor, self._each, axis=-1)
        added_to = residual.reshape(x.shape) if self._adds else None
        return scores * factor, self.shared_expert(x, of_rows, residual=added_to).reshape(residual.shape)

    def _choice(self, logits: Array) -> None:
        """None: kernels that choose themselves know no shared experts' part of a sum."""

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> None:
        """None: their weights are not known yet."""


def _sum(scores: Array) -> Array:
    """[T, 1] of [T, K]; of the rows of a step on a GPU by additions, which a compiled step joins with what follows."""
    if not has_kernels() or len(scores) > MAX_TOKENS:
        return scores.sum(axis=-1, keepdims=True)
    return sum((scores[:, i : i + 1] for i in range(1, scores.shape[1])), scores[:, :1])


class MoEBetweenStreams(MoE):
    """An `MoE` that adds its output to nothing: a connection adds it to several streams, or a residual to a stream."""

    keeps_stream: ClassVar[bool] = False

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None) -> tuple[Array, ...]:
        """As `MoE.prepare`, without `residual`; the experts' input has its axes."""
        _, x, *more = super().prepare(residual, norm, tokens)
        return x.reshape(*residual.shape[:-1], -1), *more

    def finish_span(self, parts: Sequence[Array]) -> Pieces[Array]:
        return super().finish_span([zeros_like(parts[0]), *parts])

    def _added_to(self, residual: Array, x: Array) -> Array:
        return zeros_like(x).reshape(*residual.shape[:-1], -1)


class LatentMoEBetweenStreams(MoEBetweenStreams, LatentMoE):
    """A `LatentMoE` that adds its output to nothing."""

    def _shared_output(self, residual: Array, x: Array, gates: Array) -> Array | None:
        shared = self._shared(gates)
        return None if shared is None else shared.rows(x).reshape(residual.shape)

    def _joined(self, residual: Array | None, made: Array, beside: Array | None) -> Array:
        return super()._joined(None, made, beside)


class ShortcutMoE(MoE):
    """An `MoE` whose output is added behind the next layer: [..., 2 D], the shared expert's and then the routed
    experts'. Some of them return their input.

    A chosen expert that returns its input is replaced by another that the token has chosen, with the weight 0, so that
    no other is read; its own weight multiplies the input. A token that has chosen no other expert reads the first one
    of the layer, with the weight 0.
    """

    def __init__(
        self,
        part: Experts,
        hidden_size: int,
        layer: int,
        experts: RoutedExpertsCall | None,
        residual: Residual,
        eps: float,
    ):
        assert part.shared is not None, "no family has a shortcut beside nothing"
        super().__init__(part, hidden_size, layer, experts, residual, eps)
        self._is_apart, self._count = True, part.router.experts

    def choose(self, residual: Array, norm: RMSNorm | None, predict: bool, *more: AnyArray) -> BeforeExperts:
        before = super().choose(residual, norm, predict, *more)
        ids, weights, own = without_identities(before.ids, before.weights, self._count)
        returned = (own.astype(before.x.dtype) * before.x).reshape(residual.shape)
        return before._replace(residual=returned, ids=ids, weights=weights, host_copy=[])

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: Array | None = None) -> tuple[Array, ...]:
        parts = Prepared(*super().prepare(residual, norm, tokens))
        ids, weights, own = without_identities(parts.ids, parts.weights, self._count)
        returned = (own.astype(parts.x.dtype) * parts.x).reshape(residual.shape)
        return parts._replace(residual=returned, ids=ids, weights=weights)

    def _choice(self, logits: Array) -> None:
        """None: kernels that choose themselves know no expert that returns its input."""

    def _joined(self, residual: Array, made: Array, beside: Array) -> Array:
        return library_of(made).concatenate([beside.reshape(made.shape), made], axis=-1)


def without_identities(ids: Array, weights: Array, experts: int) -> Sequence[Array]:
    """The ids and weights [..., K] without those from `experts` on, and the sum of the weights [..., 1] of these."""
    library = library_of(ids)
    returns = ids >= experts
    first = library.argmax(returns == False, axis=-1)[..., None]  # noqa: E712 (arrays)
    read = library.take_along_axis(ids, first, axis=-1)
    read = library.where(read < experts, read, 0)
    own = library.where(returns, weights, 0).sum(axis=-1, keepdims=True)
    return library.where(returns, read, ids), library.where(returns, 0, weights), own


def feed_forward_of(args: ModelArgs, layer: int, experts: RoutedExpertsCall | None) -> MoE | DenseMLP | NoMLP:
    """The module of a layer's feed-forward part."""
    part, around = args.layers[layer].feed_forward, (args.layers[layer].residual, args.rms_norm_eps)
    match part:
        case Experts():
            return moe_of(part, args.hidden_size, layer, experts, *around)
        case Dense():
            return DenseMLP(part, args.hidden_size, *around)
        case None:
            assert around[0].connections is None, "a layer of several streams has a feed-forward part"
            return NoMLP()


def moe_of(
    part: Experts, hidden_size: int, layer: int, experts: RoutedExpertsCall | None, residual: Residual, eps: float
) -> MoE:
    """The `MoE` of a layer, of the kind that `part` and `residual` need."""
    kind: Any = MoE
    if part.latent is not None:
        kind = LatentMoE
    elif residual.output_norms or (part.shared is not None and part.shared.normed):
        kind = NormedMoE
    if part.router.shared:
        assert kind is MoE and residual.connections is None, "no family has latents or norms of experts that share"
        return SharingMoE(part, hidden_size, layer, experts, residual, eps)
    if part.scales_input:
        assert kind is MoE, "no family has latents or norms of experts whose input is scaled"
        kind = InputScalingMoE
    if isinstance(residual.connections, Shortcut):
        assert kind is MoE, "no family has latents or norms of experts, or scales their input, before a shortcut"
        kind = ShortcutMoE
    elif residual.connections is not None or residual.adds_itself:
        assert kind in (MoE, LatentMoE), (
            "no family has norms of experts, or scales their input, without a stream of its own"
        )
        kind = LatentMoEBetweenStreams if kind is LatentMoE else MoEBetweenStreams
    made: MoE = kind(part, hidden_size, layer, experts, residual, eps)
    return made
