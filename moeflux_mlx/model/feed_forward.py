"""The module of a layer's feed-forward part, by its kind."""

from typing import Any

from ..experts.routing import RoutedExpertsCall
from ..kinds import Dense, Experts, Residual, Shortcut
from ..spec import ModelArgs
from .dense import DenseMLP, NoMLP
from .moe import InputScalingMoE, LatentMoE, LatentMoEBetweenStreams, MoE, MoEBetweenStreams, NormedMoE
from .shortcut import ShortcutMoE


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
    if part.scales_input:
        assert kind is MoE, "no family has latents or norms of experts whose input is scaled"
        kind = InputScalingMoE
    if isinstance(residual.connections, Shortcut):
        assert kind is MoE, "no family has latents or norms of experts, or scales their input, before a shortcut"
        kind = ShortcutMoE
    elif residual.connections is not None or residual.parallel:
        assert kind in (MoE, LatentMoE), (
            "no family has norms of experts, or scales their input, without a stream of its own"
        )
        kind = LatentMoEBetweenStreams if kind is LatentMoE else MoEBetweenStreams
    made: MoE = kind(part, hidden_size, layer, experts, residual, eps)
    return made
