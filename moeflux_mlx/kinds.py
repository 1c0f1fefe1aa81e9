"""What a layer can be made of: the kinds of token mixers, rotations and routers, as plain data.

A field is a switch that the model's code reads; it never asks which family a model belongs to.
"""

from dataclasses import dataclass

FULL, LINEAR = "full_attention", "linear_attention"


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
class Rotation:
    """Rotary position embedding of the first `dims` values of a head; `interleaved` pairs neighbours."""

    dims: int
    theta: float
    yarn: Yarn | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class GroupedQuery:
    """Attention with `heads` queries over `kv_heads` keys and values, each head normed and rotated.

    With `gate`, the query projection holds, for each head, the query and then a gate on the head's output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation
    gate: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that its operations take."""
        return (self.head_dim,)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once while `tokens` attend over `positions`, but for scores: queries, gates, results."""
        return 4 * self.heads * self.head_dim * tokens

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads."""
        return self.heads * tokens * positions


@dataclass(frozen=True)
class Latent:
    """Attention over a cached latent of `latent` values and one rotated key of `rotation.dims`, for all heads alike."""

    heads: int
    q_latent: int
    latent: int
    nope: int
    value: int
    rotation: Rotation

    @property
    def head_dim(self) -> int:
        """Values of a query: those that come from the latent, and the rotated ones."""
        return self.nope + self.rotation.dims

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that its operations take."""
        return self.q_latent, self.latent, self.nope, self.rotation.dims, self.value

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


Mixer = GroupedQuery | Latent | Delta


@dataclass(frozen=True)
class Router:
    """Which `top_k` of `experts` a token uses, and how they are weighed.

    `score` is "softmax" or "sigmoid" of the logits. A `correction_bias` takes part in the choice only. Of `groups`
    groups of experts the best `kept_groups` are looked at. Weights are made to sum to one if `normalise`, then
    multiplied by `scale`.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
