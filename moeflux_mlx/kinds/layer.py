"""A layer, and how its residual runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .attention import Attention
from .feed_forward import Dense, Experts
from .recurrent import Recurrent

Mixer = Attention | Recurrent
FeedForward = Dense | Experts


@dataclass(frozen=True)
class HyperConnections:
    """`streams` that run side by side: a part of a layer gets a sum of them, and what it makes is added to a mixture of
    them. All weights come of the streams; those of the mixture are made doubly stochastic by `iterations` of
    Sinkhorn's method, with `eps` in each division (manifold-constrained hyper-connections, arXiv:2512.24880). Behind
    the last layer one stream is made of all by weights of the same kind, or it is their `mean`."""

    streams: int
    iterations: int
    eps: float
    mean: bool = False


@dataclass(frozen=True)
class GatedConnections:
    """`streams` that run side by side: a part of a layer gets the mean of them, normed and each value weighed by a
    sigmoid, and what it makes is added to each of them, weighed by another. The weights of values come of the streams
    through `rank` values (transformers, `Qwen4ExpTextGatedResidual`). No other norm stands before a part."""

    streams: int
    rank: int


Connections = HyperConnections | GatedConnections


@dataclass(frozen=True)
class Residual:
    """How a layer's parts meet the stream: h = x + mixer(norm(x)), out = h + feed_forward(norm(h)).

    `scale` multiplies what a part adds. `connections`: there are several streams; None: one. `output_norms`: what a
    part makes is normed before it is added. `layer_scale`, beside these norms: a learned number multiplies what the
    layer gives.
    """

    scale: float = 1.0
    connections: Connections | None = None
    output_norms: bool = False
    layer_scale: bool = False

    @property
    def streams(self) -> int:
        return self.connections.streams if self.connections else 1


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder; without a `feed_forward` part it ends behind its mixer."""

    mixer: Mixer
    feed_forward: FeedForward | None
    residual: Residual = Residual()

    @property
    def row_width(self) -> int:
        """The width of the rows that every token makes in its feed-forward part."""
        return self.feed_forward.row_width if self.feed_forward else 0


# Switches that not every value of is computed, and the values that are.
COMPUTED: dict[type, dict[str, tuple[Any, ...]]] = {
    Residual: {"scale": (1.0,)},
}


def unsupported(layer: LayerSpec) -> Iterator[tuple[str, Any]]:
    """Switches of a layer that are not computed, as (name, value)."""
    for part in (layer.mixer, layer.feed_forward, layer.residual):
        for name, computed in COMPUTED.get(type(part), {}).items():
            if getattr(part, name) not in computed:
                yield name, getattr(part, name)
