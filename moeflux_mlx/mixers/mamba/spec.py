"""Mamba-2, as plain data."""

import math
from dataclasses import dataclass

from ...kinds.limits import check_width, not_multiple
from ...kinds.mixer import Mixer, product_operations

CHUNK = 64  # tokens that Mamba2 takes together


@dataclass(frozen=True)
class Mamba2(Mixer):
    """A state space model behind a causal convolution of `taps` inputs (Mamba-2, arXiv:2405.21060, section 7).

    Each of `heads` has a state [head_dim, state_dim]. Of `groups` of heads each has its own B and C, and its own mean
    square in the norm of the result.

    Attributes:
        least_step, most_step: between which the step sizes of time are clipped; None: there is no largest.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    taps: int
    least_step: float = 0.0
    most_step: float | None = None

    def check(self) -> None:
        if self.heads % self.groups:
            raise not_multiple("mamba_num_heads", self.heads, "n_groups", self.groups)
        check_width("Mamba's projection", self.projected)
        check_width("Mamba's convolution", self.channels * self.taps)

    @property
    def width(self) -> int:
        """The width of the result and of its gate."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Width of the projection of a hidden state: the gate, the convolution's inputs and the step sizes."""
        return self.width + self.channels + self.heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of one text's last inputs of the convolution."""
        return self.taps - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of one text's state."""
        return self.heads, self.head_dim, self.state_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        return (self.width,)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once: the projections and the convolution's results, these in float32 too; a chunk's
        decays between its tokens; the state."""
        chunk = min(tokens, CHUNK)
        return 5 * self.projected * tokens + 3 * self.heads * chunk * chunk + 2 * math.prod(self.state_shape)

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""
        return self.projected + self.width

    def own_operations(self, tokens: int) -> float:
        """Those of each head between a chunk's tokens, and with the state."""
        chunk = min(tokens, CHUNK)
        return product_operations(tokens, chunk, self.width) + 2 * product_operations(
            tokens, self.width, self.state_dim
        )

    @property
    def module_name(self) -> str:
        return "mamba"

    @property
    def title(self) -> str:
        return "state space model"
