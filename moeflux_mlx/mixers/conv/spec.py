"""A gated short convolution, as plain data."""

import math
from dataclasses import dataclass

from ...kinds.limits import check_width
from ...kinds.mixer import Mixer


@dataclass(frozen=True)
class ShortConv(Mixer):
    """C * convolution(B * x), where B, C and x [channels] are projections of the hidden state, and the causal
    convolution takes each channel's last `taps` inputs without an activation (transformers, `Lfm2MoeShortConv`).

    `channels` is the model's hidden size.
    """

    channels: int
    taps: int

    def check(self) -> None:
        check_width("the gated convolution's projection", self.projected)
        check_width("the gated convolution", self.channels * self.taps)

    @property
    def projected(self) -> int:
        """Width of the projection of a hidden state: B, C and x side by side."""
        return 3 * self.channels

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of one text's last inputs of the convolution."""
        return self.taps - 1, self.channels

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        return (self.channels,)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once: the projection; the convolution's inputs, also behind those before them; a
        product, and two of the sums of products."""
        return (self.projected + 5 * self.channels) * tokens + math.prod(self.conv_shape)

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""
        return self.projected + self.channels

    @property
    def module_name(self) -> str:
        return "conv"

    @property
    def title(self) -> str:
        return "short convolution"
