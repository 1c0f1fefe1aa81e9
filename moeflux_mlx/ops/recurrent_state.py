"""What recurrent operations share: the state of a layer, and how many of its rows a simdgroup of a GPU holds."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

STATE_ROWS = 4  # rows of a head's state in one simdgroup's registers: 4 x 4 floats a lane at 128 columns


class RecurrentState(Protocol):
    """The layer's state of one text or a batch of them; None before the first token."""

    @property
    def conv(self) -> mx.array | None:
        """[B, taps - 1, channels], the convolution's last inputs."""

    @property
    def recurrent(self) -> mx.array | None:
        """[B, value heads, value dim, key dim] float32, if the operation has it."""

    def absorb(self, arrays: Sequence[mx.array], tokens: int) -> None:
        """Takes both arrays, or the only one, as they are after `tokens` more tokens."""
