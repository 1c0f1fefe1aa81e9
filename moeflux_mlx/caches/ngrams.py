"""The cache of n-grams."""

import mlx.core as mx

from ..kinds import NGrams
from ..ops.launch import Shape
from .layer_cache import State, StoredPart
from .recurrent import RecurrentCache


class NGramCache(RecurrentCache):
    """`conv`: the last inputs of the n-grams' convolution [B, remembered, channels]; in place of a recurrent state the
    last tokens, int32 [B, longest - 1]."""

    part: NGrams

    def stored_shapes(self, length: int) -> tuple[Shape, Shape]:
        return (self.part.remembered, self.part.channels), (self.part.longest - 1,)

    def restored(self, *stored: StoredPart) -> State:
        """The state that `stored` was taken of: the arrays, the length, and the dtype of inputs."""
        first, second, length, dtype = stored
        if not length:
            return None, None, 0
        return mx.array(first)[None].astype(dtype), mx.array(second)[None].astype(mx.int32), length
