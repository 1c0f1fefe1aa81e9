"""N-grams of a layer: the projections of the rows that a table gives for them, and what is added to the streams."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..caches.ngrams import NGramCache
from ..kinds import NGrams
from ..layers import Convolution, Linear, RMSNorm, Stack
from ..ops.backend import Array, view
from ..ops.ngrams import NGramWeights, with_ngrams
from .tokens import Tokens


class NGramLayer(nn.Module):
    """Adds what n-grams give to each stream, and a convolution of it."""

    def __init__(self, part: NGrams, hidden_size: int, eps: float, layer: int):
        super().__init__()
        self.part, self.layer, self.eps = part, layer, eps
        self.key_proj = Linear(part.embedded, part.channels)
        self.value_proj = Linear(part.embedded, hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = (RMSNorm(part.channels, eps) for _ in range(3))
        self.conv1d = Convolution(part.channels, part.taps)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read the rows; called again once they have their tensors."""
        self._inputs = Stack(self.key_proj, self.value_proj)

    def __call__(self, h: Array, tokens: Tokens | None, cache: NGramCache) -> Array:
        """The streams h [B, L, n * D] of `tokens`, which `cache` absorbs. Without tokens the rows are zeros."""
        B, L, _ = h.shape
        if tokens is None:
            tokens = Tokens(mx.zeros((B, L), mx.uint32))
        rows = tokens.rows(self.layer, self.part.embedded, h)
        norms = self.norm_key.weight, self.norm_query.weight, self.norm_conv.weight
        weights = NGramWeights(*norms, self.eps, self.conv1d.weight)
        begun = view(cache.conv) if cache.conv is not None and isinstance(h, np.ndarray) else cache.conv
        _, (key, value) = self._inputs(rows)
        h, inputs = with_ngrams(h, key, value, begun, weights, self.part)
        ids = tokens.ids.astype(mx.int32)
        before = mx.full((B, self.part.longest - 1), self.part.end) if cache.recurrent is None else cache.recurrent
        last = mx.concatenate([before, ids], axis=1)[:, L:]
        cache.absorb(inputs if isinstance(inputs, mx.array) else mx.array(inputs), last, L)
        return h
