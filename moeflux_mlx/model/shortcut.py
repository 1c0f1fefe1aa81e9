"""Experts whose output is added behind the next layer, some of which return their input."""

from collections.abc import Sequence

from ..experts.routing import RoutedExpertsCall
from ..kinds import Experts, Residual
from ..layers import RMSNorm
from ..ops.backend import AnyArray, Array, library_of
from .moe import BeforeExperts, MoE, Prepared


class ShortcutMoE(MoE):
    """An `MoE` that adds its output to nothing: [..., 2 D], the shared expert's and then the routed experts'.

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

    def choose(self, residual: AnyArray, norm: RMSNorm | None, predict: bool, tokens: AnyArray = None) -> BeforeExperts:
        before = super().choose(residual, norm, predict, tokens)
        ids, weights, own = without_identities(before.ids, before.weights, self._count)
        returned = (own.astype(before.x.dtype) * before.x).reshape(residual.shape)
        return before._replace(residual=returned, ids=ids, weights=weights, host_copy=[])

    def prepare(self, residual: Array, norm: RMSNorm | None, tokens: AnyArray = None) -> tuple[Array, ...]:
        parts = Prepared(*super().prepare(residual, norm, tokens))
        ids, weights, own = without_identities(parts.ids, parts.weights, self._count)
        return parts._replace(residual=own.astype(parts.x.dtype) * parts.x, ids=ids, weights=weights)

    def _choice(self, logits: AnyArray) -> None:
        """None: kernels that choose themselves know no expert that returns its input."""

    def _joined(self, residual: AnyArray, made: AnyArray, beside: AnyArray) -> AnyArray:
        return library_of(made).concatenate([beside.reshape(made.shape), made], axis=-1)


def without_identities(ids: AnyArray, weights: AnyArray, experts: int) -> Sequence[AnyArray]:
    """The ids and weights [..., K] without those from `experts` on, and the sum of the weights [..., 1] of these."""
    library = library_of(ids)
    returns = ids >= experts
    first = library.argmax(returns == False, axis=-1)[..., None]  # noqa: E712 (arrays)
    read = library.take_along_axis(ids, first, axis=-1)
    read = library.where(read < experts, read, 0)
    own = library.where(returns, weights, 0).sum(axis=-1, keepdims=True)
    return library.where(returns, read, ids), library.where(returns, 0, weights), own
