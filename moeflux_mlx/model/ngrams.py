"""N-grams of a layer: the projections of the rows that a table gives for them, and what is added to the streams."""

import mlx.core as mx
import mlx.nn as nn

from ..caches.ngrams import NGramCache
from ..kinds import NGrams
from ..layers import Convolution, Linear, RMSNorm, Stack
from ..ops.backend import Array, leave, library_of, of_kind
from ..ops.block_rounding import to_e4m3
from ..ops.elementwise import split
from ..ops.ngrams import NGramWeights, with_ngrams
from .tokens import Tokens

ROW_BLOCK = 32  # values of rows that share a scale where they are rounded


class NGramLayer(nn.Module):
    """Adds what n-grams give to each stream, and a convolution of it if there is one."""

    def __init__(self, part: NGrams, hidden_size: int, eps: float, layer: int):
        super().__init__()
        self.part, self.layer, self.eps = part, layer, eps
        self.key_proj = Linear(part.embedded, part.channels)
        self.value_proj = Linear(part.embedded, hidden_size)
        self.norm_key, self.norm_query = (RMSNorm(part.channels, eps) for _ in range(2))
        if part.taps:
            self.norm_conv, self.conv1d = RMSNorm(part.channels, eps), Convolution(part.channels, part.taps)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read the rows; called again once they have their tensors."""
        self._inputs = Stack(self.key_proj, self.value_proj)

    def __call__(self, h: Array, tokens: Tokens | None, cache: NGramCache) -> Array:
        """The streams h [B, L, n * D] of `tokens`, which `cache` absorbs; what stands behind them stays as it is.
        Without tokens the rows are zeros.
        """
        h, *behind = split(h, self.part.channels) if h.shape[-1] > self.part.channels else [h]
        B, L, _ = h.shape
        if tokens is None:
            tokens = Tokens(mx.zeros((B, L), mx.uint32))
        rows = tokens.rows(self.layer, self.part.embedded, h)
        rows = to_e4m3(rows, ROW_BLOCK) if self.part.rounds else rows
        norm_conv, conv = (self.norm_conv.weight, self.conv1d.weight) if self.part.taps else (None, None)
        weights = NGramWeights(self.norm_key.weight, self.norm_query.weight, norm_conv, self.eps, conv)
        begun = None if cache.conv is None else of_kind(cache.conv, h)
        _, (key, value) = self._inputs(rows)
        h, inputs = with_ngrams(h, key, value, begun, weights, self.part)
        ids = tokens.ids.astype(mx.int32)
        before = mx.full((B, self.part.longest - 1), self.part.end) if cache.recurrent is None else cache.recurrent
        last = mx.concatenate([before, ids], axis=1)[:, L:]
        cache.absorb([leave(inputs), last], L)
        return library_of(h).concatenate([h, *behind], axis=-1) if behind else h
