"""One token through the whole model as one compiled graph, for a GPU that holds every expert.

Building the graph of a token in Python costs milliseconds; `mx.compile` traces it once for each capacity of
the caches and replays it. The traced caches have fixed shapes: the position is an array, new entries are
written at it, and attention masks what lies beyond.
"""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..state.cache import Cache, up_to

if TYPE_CHECKING:
    from .decoder import Model


class FixedCache:
    """Two arrays [1, heads, capacity, width], full to `offset` (an int32 array of no axes).

    `seen` gives the mask [1, 1, 1, capacity] of what one new token sees, the same for all layers.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array, seen: Callable[[int], mx.array]):
        self.keys, self.values, self.offset, self._seen = keys, values, offset, seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self.offset[None]
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values

    def mask(self, length: int) -> mx.array:
        return self._seen(self.keys.shape[2])


class FixedState:
    """A recurrent cache's two arrays, without a position."""

    def __init__(self, conv: mx.array, recurrent: mx.array):
        self.conv, self.recurrent, self.offset = conv, recurrent, 0


class DecodeStep:
    """Runs `model` for one token of one sequence. What is traced holds on to the model's arrays until `forget`."""

    def __init__(self, model: "Model"):
        self._model = model
        # One for each thread: MLX keeps traces by thread, and with a function forgets those of its last caller only.
        self._compiled: dict[int, Any] = {}

    def forget(self) -> None:
        """Gives back what the traces hold."""
        self._compiled = {}

    @staticmethod
    def takes(tokens: mx.array, cache: list[Cache]) -> bool:
        """One token after at least one that every cache has seen."""
        return tokens.shape == (1, 1) and not any(layer.empty() for layer in cache)

    def __call__(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        """tokens [1, 1] -> logits [1, 1, vocab_size]; advances `cache`."""
        for layer in cache:
            layer.reserve(1)
        offset = mx.array(cache[0].offset, mx.int32)
        state: list[Any] = [array for layer in cache for array in layer.state[:2]]
        thread = threading.get_ident()
        if thread not in self._compiled:
            self._compiled[thread] = mx.compile(self._run)
        logits, *arrays = self._compiled[thread](tokens, offset, *state)
        for layer, first, second in zip(cache, arrays[::2], arrays[1::2], strict=True):
            layer.state = (first, second, layer.offset + 1)
        return logits

    def _run(self, tokens: mx.array, offset: mx.array, *arrays: mx.array) -> list[mx.array]:
        layers = self._model.layers

        @lru_cache
        def seen(capacity: int) -> mx.array:
            return up_to(offset, capacity)

        caches: list[Any] = [
            FixedState(first, second) if layer.is_linear else FixedCache(first, second, offset, seen)
            for layer, first, second in zip(layers, arrays[::2], arrays[1::2], strict=True)
        ]
        out = [self._model.lm_head(self._model.run(tokens, caches))]
        for cache in caches:
            out += [cache.conv, cache.recurrent] if isinstance(cache, FixedState) else [cache.keys, cache.values]
        return out
