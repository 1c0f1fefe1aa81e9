"""A causal convolution of each channel by itself, over its last few inputs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvolution:
    """x + the convolution of `channels` values x over a token and the `taps` - 1 before it (transformers,
    `InklingShortConvolution`), times `factor`. `dynamic`: the token's own taps, which a projection makes for each head,
    are added to those of each channel (transformers, `Inkling2DynamicShortConvolution`).
    """

    channels: int
    taps: int
    factor: float = 1.0
    dynamic: bool = False

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of one text's last inputs."""
        return self.taps - 1, self.channels

    def temporaries(self, tokens: int) -> int:
        """Values that exist at once: inputs behind those before them, a product, and two of the sums of products."""
        return 4 * self.channels * (tokens + self.taps)
