"""What a layer is made of, as plain data: a token mixer, a feed-forward part, and how the residual runs.

Each part is a frozen dataclass whose fields are switches that the model's code reads; no code asks which family a model
belongs to. A switch that is described here and not computed yet is refused by `unsupported`, and nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling (arXiv:2309.00071), with DeepSeek's two magnitude scales."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's frequency scaling: slow frequencies are divided by `factor`, with a ramp between two wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of the first `dims` values of a head; `interleaved` pairs neighbours."""

    dims: int
    theta: float
    yarn: Yarn | None = None
    interleaved: bool = False
    llama3: Llama3 | None = None


@dataclass(frozen=True)
class GroupedQuery:
    """Attention with `heads` queries over `kv_heads` keys and values.

    Attributes:
        rotation: of queries and keys; None: positions are not encoded.
        norm: RMS norm of queries and keys: of each "head" (weight [head_dim]), of all heads at once ("flat", weight
            [heads * head_dim]), or none.
        bias, output_bias: whether the projections to q, k and v, and the one from the heads, add a bias.
        gate: "joined": the query projection holds, for each head, the query and then a gate whose sigmoid multiplies
            the head's output. "sigmoid head", "softplus head": one gate for each head, from a projection of its own
            (`g_proj`), whose sigmoid or softplus multiplies the head's output.
        window: how many of the newest positions a query sees, itself included; None: all.
        sinks: whether each head has a learned logit in the softmax's denominator.
        value_dim: width of a value head; None: head_dim.
        scale: of the scores; None: head_dim ** -0.5.
        value_scale: multiplies the values, that is, what comes of attention.
        value_is_key: whether keys, before norm and rotation, serve as values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    norm: Literal["head", "flat"] | None = "head"
    bias: bool = False
    output_bias: bool = False
    gate: Literal["joined", "sigmoid head", "softplus head"] | None = None
    window: int | None = None
    sinks: bool = False
    value_dim: int | None = None
    scale: float | None = None
    value_scale: float = 1.0
    value_is_key: bool = False

    @property
    def value_width(self) -> int:
        """Of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that its operations take."""
        flat = (self.heads * self.head_dim, self.kv_heads * self.head_dim) if self.norm == "flat" else ()
        return (self.head_dim, self.value_width, *flat)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once while `tokens` attend over `positions`, but for scores: queries, gates, results,
        and keys and values that lie in no cache because a window has passed them."""
        seen = self.kv_heads * (self.head_dim + self.value_width) * (tokens + self.window) if self.window else 0
        return 4 * self.heads * max(self.head_dim, self.value_width) * tokens + seen

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads."""
        return self.heads * tokens * (min(positions, tokens + self.window) if self.window else positions)


@dataclass(frozen=True)
class QueryScale:
    """What multiplies a query at position p: 1 + beta * ln(1 + floor(p / original_max_position_embeddings)).

    Llama 4 has it (transformers, `Llama4TextAttention`), and others with longer contexts than they were trained on.
    """

    beta: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Latent:
    """Attention over a cached latent of `latent` values and one rotated key of `rotation.dims`, for all heads alike.

    Queries come from a latent of `q_latent` values, which is normed; None: from the hidden state at once.
    """

    heads: int
    q_latent: int | None
    latent: int
    nope: int
    value: int
    rotation: Rotation
    query_scale: QueryScale | None = None

    @property
    def head_dim(self) -> int:
        """Values of a query: those that come from the latent, and the rotated ones."""
        return self.nope + self.rotation.dims

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values once the latent is expanded: as many as there are queries."""
        return self.heads

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that its operations take."""
        queries = () if self.q_latent is None else (self.q_latent,)
        return (*queries, self.latent, self.nope, self.rotation.dims, self.value)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once, but for scores: the latents expanded to keys and values of every head, queries,
        results."""
        return self.heads * (positions * (self.head_dim + self.value) + 3 * tokens * self.head_dim)

    def scores(self, tokens: int, positions: int) -> int:
        """Two sums of scores of all heads."""
        return 2 * self.heads * tokens * positions


@dataclass(frozen=True)
class Delta:
    """The gated delta rule behind a causal convolution of `taps` inputs."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that its operations take."""
        return self.key_dim, self.value_dim, self.channels

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once: the projections, the convolution's results, queries and keys in float32."""
        return 4 * (self.channels + self.value_width) * tokens

    def scores(self, tokens: int, positions: int) -> int:
        """It has none."""
        return 0


Attention = GroupedQuery | Latent
Mixer = Attention | Delta


@dataclass(frozen=True)
class Router:
    """Which `top_k` of `experts` a token uses, and how they are weighed.

    `score` is "softmax" or "sigmoid" of the logits. A `correction_bias` takes part in the choice only. Of `groups`
    groups of experts the best `kept_groups` are looked at. Weights are made to sum to one if `normalise`, then
    multiplied by `scale`. `logit_bias`: the router adds a bias to its logits. `softcap`: no logit is further from zero,
    since each becomes softcap * tanh(logit / softcap).
    """

    experts: int
    top_k: int
    score: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    logit_bias: bool = False
    softcap: float | None = None


ActivationForm = Literal["silu", "gelu", "clip then silu", "silu then clip", "clip then swish"]
FORMS: tuple[ActivationForm, ...] = get_args(ActivationForm)  # in the order in which kernels number them


@dataclass(frozen=True)
class Activation:
    """How a gated MLP joins its two products, gate g and up u; L is `limit`, which the last three forms need.

    Attributes:
        form: one of
            "silu": silu(g) * u (SwiGLU, arXiv:2002.05202)
            "gelu": gelu(g) * u, gelu by tanh (arXiv:1606.08415)
            "clip then silu": silu(min(g, L)) * clip(u, -L, L)
            "silu then clip": min(silu(g), L) * clip(u, -L, L)
            "clip then swish": g' * sigmoid(1.702 g') * (u' + 1), where g' = min(g, L) and u' = clip(u, -L, L)
    """

    form: ActivationForm = "silu"
    limit: float | None = None

    def __post_init__(self) -> None:
        assert (self.limit is None) == (self.form in ("silu", "gelu")), f"{self.form!r} with limit {self.limit}"


SILU = Activation()


@dataclass(frozen=True)
class Dense:
    """One gated MLP of `width` for every token: down(activation(gate x, up x))."""

    width: int
    activation: Activation = SILU

    @property
    def row_width(self) -> int:
        """Of the rows that every token makes."""
        return self.width


@dataclass(frozen=True)
class SharedExpert:
    """An MLP beside the routed experts that every token uses; `gated`: times the sigmoid of a gate of its own."""

    width: int
    gated: bool = False
    activation: Activation = SILU


@dataclass(frozen=True)
class Experts:
    """Routed experts, each a gated MLP of `width` chosen by `router`, and perhaps a shared one.

    `biases`: whether each of an expert's matrices adds one. `matrices`: three with a gate, two without.
    """

    router: Router
    width: int
    shared: SharedExpert | None = None
    activation: Activation = SILU
    biases: bool = False
    matrices: int = 3

    @property
    def row_width(self) -> int:
        """Of the rows that every token makes."""
        return self.shared.width if self.shared else 0


FeedForward = Dense | Experts


@dataclass(frozen=True)
class Residual:
    """How a layer's parts meet the stream: h = x + mixer(norm(x)), out = h + feed_forward(norm(h)).

    `scale` multiplies what a part adds; `streams` of them run side by side.
    """

    scale: float = 1.0
    streams: int = 1


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder."""

    mixer: Mixer
    feed_forward: FeedForward
    residual: Residual = Residual()


# Switches that not every value of is computed, and the values that are.
COMPUTED: dict[type, dict[str, tuple[Any, ...]]] = {
    GroupedQuery: {"value_is_key": (False,)},
    Experts: {"matrices": (3,)},
    Residual: {"scale": (1.0,), "streams": (1,)},
}


def unsupported(layer: LayerSpec) -> Iterator[tuple[str, Any]]:
    """Switches of a layer that are not computed, as (name, value)."""
    for part in (layer.mixer, layer.feed_forward, layer.residual):
        for name, computed in COMPUTED.get(type(part), {}).items():
            if getattr(part, name) not in computed:
                yield name, getattr(part, name)
