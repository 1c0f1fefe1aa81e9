"""A layer, and how its residual runs."""

from dataclasses import dataclass

from .feed_forward import Dense, Experts
from .mixer import Mixer
from .streams import Connections

FeedForward = Dense | Experts


@dataclass(frozen=True)
class WeighedSum:
    """Adds a part to the stream with weights for both: a h + b norm(part), where a = sqrt(max(1 - b^2, `least`)). Each
    value of the stream has its own b, as which a checkpoint may store a gate g: b = sigmoid(g / temperature)
    (transformers, `MuseSparkResidualGate`). `eps`: epsilon of the norm. The mixer's output is normed without a weight,
    that of the feed-forward part is multiplied by a weight before it is normed.
    """

    temperature: float
    eps: float
    least: float = 1e-3


@dataclass(frozen=True)
class Residual:
    """How a layer's parts are added to the stream: h = x + mixer(norm(x)), out = h + feed_forward(norm(h)).

    `scale` multiplies a part's output before it is added. The model keeps the stream divided by `scale`: then parts are
    added as they are, embeddings are divided by it, and everything that reads the stream norms it with an epsilon that
    is divided by its square. `connections`: the connections of several streams; None: one stream.
    `output_norms`: a part's output is normed before it is added. `layer_scale`, only with these norms: a learned number
    multiplies the layer's output. `averaged`: the n-th part of the stream, of which the embedding is the first, is
    added as h * sqrt((n - 1) / n) + part / sqrt(n) (transformers, `depth_scaled_residual_add`). The result is the plain
    sum of the n parts, divided by sqrt(n). Everything that reads the stream norms it, so the model keeps the plain sum
    and multiplies the epsilon of these norms by n. `parallel`: both parts take the same normed stream, and both outputs
    are added to it: out = x + mixer(norm(x)) + feed_forward(norm(x)). `centred`: norms of the stream also take its mean
    away (arXiv:1607.06450). `norm_groups`: norms of the stream take each of so many equal parts of it by itself.
    `gate_rank`: the norms before mixers and experts multiply each value of their result by the sigmoid of a gate, which
    two matrices make of the result through so many values; 0: they have no gates.
    `convolved`: a part's output passes the convolution `branches` of the layer's mixer before it is added.
    `weighed`: how parts are added to it with weights; None: they are added as they are.
    """

    scale: float = 1.0
    connections: Connections | None = None
    output_norms: bool = False
    layer_scale: bool = False
    averaged: bool = False
    parallel: bool = False
    centred: bool = False
    norm_groups: int = 1
    gate_rank: int = 0
    convolved: bool = False
    weighed: WeighedSum | None = None

    @property
    def adds_itself(self) -> bool:
        """Whether the feed-forward part's output is added by itself."""
        return self.norms_apart or self.convolved or self.weighed is not None

    @property
    def norms_apart(self) -> bool:
        """Whether its norms are computed by themselves."""
        return self.parallel or self.norm_groups > 1 or self.gate_rank > 0

    @property
    def streams(self) -> int:
        return self.connections.streams if self.connections else 1

    def eps(self, eps: float, parts: int) -> float:
        """The epsilon of a norm of a stream that is the sum of so many parts."""
        return eps * (parts if self.averaged else 1) / self.scale**2


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder; without a `feed_forward` part it ends after its mixer. `passes`: how often a token passes
    it; layers side by side that have several are passed in turn, all of them, and then all again. Each visit of a layer
    has caches of its own.
    """

    mixer: Mixer
    feed_forward: FeedForward | None
    residual: Residual = Residual()
    passes: int = 1

    @property
    def row_width(self) -> int:
        """The width of the rows that every token makes in its feed-forward part."""
        return max(self.feed_forward.widths, default=0) if self.feed_forward else 0

    @property
    def widths(self) -> frozenset[int]:
        """The widths of the rows that its operations take."""
        parts = self.mixer, self.feed_forward, self.residual.connections
        of_parts = frozenset(width for part in parts if part is not None for width in part.widths)
        return of_parts | {self.residual.gate_rank}
