"""Several parallel residual streams, and how the parts of a layer are connected with them."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class HyperConnections:
    """`streams` parallel residual streams: a part of a layer gets a weighted sum of them, and its output is added to a
    mixture of them. All weights are computed from the streams; those of the mixture are made doubly stochastic by
    `iterations` of Sinkhorn's method, with `eps` in each division (manifold-constrained hyper-connections,
    arXiv:2512.24880). After the last layer the streams are summed with weights of the same kind, or averaged if `mean`.

    `shifted` (DeepSeek-V4.1; mlx-lm, `deepseek_v41.py`): the weights of a part's sum are made of the streams before the
    part ahead of it, but applied to those behind. The first part's sum is the embedding. The weights of a layer's first
    sum stand behind the streams, and so do those of the sum after the last layer.
    """

    streams: int
    iterations: int
    eps: float
    mean: bool = False
    shifted: bool = False
    copies: ClassVar[int] = 2  # of the streams, in each part of a layer; measured on an H200
    has_own_norm: ClassVar[bool] = False  # in place of the norm before each part and after the last layer
    kinds: ClassVar[int] = 3  # of weights: those of the sum, those of the output, those of the mixture
    magnitude: ClassVar[float] = 2.0  # factor of the output's weights

    @property
    def weights(self) -> int:
        """The weights of a part of a layer."""
        return self.streams * (self.streams + 2)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take, besides the streams."""
        return ()


@dataclass(frozen=True)
class GatedConnections:
    """`streams` parallel residual streams: a part of a layer gets the mean of the normed streams, each value weighted
    by a sigmoid, and its output is added to each stream with another weight. The weights of values are computed from
    the streams through `rank` values (transformers, `Qwen4ExpTextGatedResidual`). There is no other norm before a part.
    """

    streams: int
    rank: int
    copies: ClassVar[int] = 7  # of the streams, in each part of a layer; measured on an H200
    has_own_norm: ClassVar[bool] = True  # in place of the norm before each part and after the last layer
    mean: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take, besides the streams."""
        return (self.rank,)


@dataclass(frozen=True)
class IndependentConnections:
    """`streams` parallel residual streams that are never mixed: a part of a layer gets a weighted sum of them, and its
    output is added to each with another weight. The weights of the sum are sigmoids, those of the output sigmoids times
    `magnitude`, each plus `eps`, of numbers that are computed from the streams (transformers, `HYV4HyperConnection`).
    After the last layer the streams are summed with weights of the same kind.
    """

    streams: int
    eps: float
    magnitude: float = 2.0
    copies: ClassVar[int] = 3  # of the streams in float32, in each part of a layer
    has_own_norm: ClassVar[bool] = False  # in place of the norm before each part and after the last layer
    mean: ClassVar[bool] = False
    kinds: ClassVar[int] = 2  # of weights: those of the sum, and those of the output

    @property
    def weights(self) -> int:
        """The weights of a part of a layer."""
        return 2 * self.streams

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take, besides the streams."""
        return ()


@dataclass(frozen=True)
class Shortcut:
    """One residual stream, and beside it the output of routed experts, which is added behind the next layer
    (ScMoE, arXiv:2509.01322, section 2.2). The shared expert's output is added at once.
    """

    streams: ClassVar[int] = 2
    copies: ClassVar[int] = 3  # of both, in each part of a layer
    has_own_norm: ClassVar[bool] = False  # in place of the norm before each part and after the last layer
    mean: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]] = ()  # of the rows that its operations take, besides the streams


@dataclass(frozen=True)
class Messages:
    """What a pass over the layers from `first` to `end` - 1, whole blocks, tells the next pass over them (transformers,
    `Inkling2LoopMessageGate`).

    Each pass begins with the sums before the first of these layers. A layer has four more queries, which mix the normed
    sums that the pass before has made to messages for its queries, keys, values and feed-forward part. Of an input x
    and its message m, both normed, a matrix makes `rank` values, and two matrices a and b of these:
    (1 - tanh(a)) x + tanh(b) m takes the input's place.
    """

    first: int
    end: int
    rank: int


@dataclass(frozen=True)
class BlockSums:
    """Sums of the outputs of blocks of layers in place of streams (Kimi K3's attention residuals; mlx-lm's
    `kimi_k3.py`).

    The sum over all parts so far is split where a layer begins one of the blocks of `block` layers, of a model of
    `layers`: that layer's mixer begins a new sum, behind those of the blocks before, of which the first is the
    embedding alone. A part gets the sums weighed by a softmax, whose logits a learned weight makes of each normed sum,
    and so does the norm after the last layer. A part's output is added to the last sum.

    `normed` (transformers, `Inkling2BlockAttentionResidual`): it gets the normed sums, weighed so, where `eps` is that
    of the norm. The learned weight is a query, whose products are divided by the root of its length. The first part of
    all takes the embedding as it is. A part with several inputs has a query for each. `messages`: between passes.
    """

    block: int
    layers: int
    normed: bool = False
    eps: float | None = None
    messages: Messages | None = None
    copies: ClassVar[int] = 4  # of the sums in float32, in each part of a layer
    has_own_norm: ClassVar[bool] = False  # in place of the norm before each part and after the last layer

    @property
    def streams(self) -> int:
        """The most sums, which are there after the last layer or after the last one that runs several times."""
        most = streams_before(self, self.layers)
        return most if self.messages is None else max(most, streams_before(self, self.messages.end) + self.told)

    @property
    def told(self) -> int:
        """The sums of a pass over layers that the next one reads: those that it made."""
        return 0 if self.messages is None else (self.messages.end - self.messages.first) // self.block

    def begins(self, layer: int) -> bool:
        """Whether a layer begins a block."""
        return layer % self.block == 0

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take, besides the streams."""
        return () if self.messages is None else (self.messages.rank,)


Connections = HyperConnections | GatedConnections | IndependentConnections | Shortcut | BlockSums


def streams_before(rule: Connections | None, layer: int) -> int:
    """The streams or sums of which a layer's input consists; `rule` None: there is one stream."""
    if isinstance(rule, BlockSums):
        return 1 + -(-layer // rule.block)
    if isinstance(rule, HyperConnections) and rule.shifted:
        return rule.streams + 1
    return rule.streams if rule else 1
