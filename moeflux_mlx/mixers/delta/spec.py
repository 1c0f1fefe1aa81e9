"""The gated delta rule, as plain data."""

from dataclasses import dataclass
from typing import Literal

from ...kinds.limits import check_width, not_multiple
from ...kinds.mixer import Mixer
from ...kinds.ngrams import NGrams

LEAST_FLOOR = -5.0  # the least logarithm of a decay
DELTA_SHARE = 0.25  # share of a GPU's rate that the delta rule's sequential steps reach; 0.35 to 0.46 on an H200


@dataclass(frozen=True)
class ChannelDecay:
    """A decay for each value of a key (Kimi Delta Attention, arXiv:2510.26692): exp(-exp(A_log) * softplus(a +
    dt_bias)), or with a `floor`, the least logarithm, from LEAST_FLOOR on, exp(floor * sigmoid(exp(A_log) * (a +
    dt_bias))) (transformers, `Glm5NextTextForgetGate`). The projections from the hidden state to decays and gates have
    rank `rank`; None: each is one matrix, and so is that to gates alone if `has_full_gate`."""

    floor: float | None
    rank: int | None
    has_full_gate: bool = False


@dataclass(frozen=True)
class Delta(Mixer):
    """The gated delta rule behind a causal convolution of `taps` inputs.

    Attributes:
        gate: the factor of the normed result: silu or sigmoid of a projection.
        ngrams: the n-grams that are added before; None: none.
        channel_decay: the decay of each value of a key; None: one decay per head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate: Literal["silu", "sigmoid"] = "silu"
    ngrams: NGrams | None = None
    channel_decay: ChannelDecay | None = None

    def check(self) -> None:
        if self.ngrams is not None:
            self.ngrams.check()
        if self.value_heads % self.key_heads:
            raise not_multiple("linear_num_value_heads", self.value_heads, "linear_num_key_heads", self.key_heads)
        check_width("linear_num_heads * linear_head_dim", self.key_width)
        check_width("linear attention", self.channels)
        check_width("linear attention's convolution", self.channels * self.taps)

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of one text's last inputs of the convolution."""
        return self.taps - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of one text's matrices."""
        return self.value_heads, self.value_dim, self.key_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        grams = (self.ngrams.width,) if self.ngrams else ()
        rank = self.channel_decay.rank if self.channel_decay else None
        return (self.key_dim, self.value_dim, self.channels, *grams, *(() if rank is None else (rank,)))

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once: the projections, the convolution's results, queries and keys in float32; or those
        of the n-grams and of their convolution."""
        return max(4 * (self.channels + self.value_width) * tokens, self._of_grams(tokens))

    def _of_grams(self, tokens: int) -> int:
        return (8 * self.ngrams.channels + 2 * self.ngrams.embedded) * tokens if self.ngrams else 0

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it, as if none were of low rank."""
        return self.channels + 2 * self.value_width + 2 * self.value_heads

    def own_operations(self, tokens: int) -> float:
        """Those of the delta rule's steps: decay, S k, what is learned and S q are 7 for each value of S
        (arXiv:2412.06464). They count as if they were more, because they do not reach a GPU's full rate."""
        return 7.0 * tokens * self.value_width * self.key_dim / DELTA_SHARE

    def native_temporaries(self, tokens: int, positions: int) -> int:
        """The projections and the convolution's results, queries and keys, values and results."""
        decays = 2 * self.key_width if self.channel_decay else 0
        own = 2 * self.channels + 2 * self.key_width + 3 * self.value_width + decays
        return max(own * tokens, self._of_grams(tokens))

    @property
    def module_name(self) -> str:
        return "linear_attn" if self.channel_decay is None else "self_attn"

    @property
    def title(self) -> str:
        return "delta rule"
