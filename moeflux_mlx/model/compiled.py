"""One token through the whole model as one compiled graph, for a GPU that holds every expert.

Building the graph of a token in Python costs milliseconds; `mx.compile` traces it once for each capacity of
the caches and replays it. The traced caches have fixed shapes: the position is an array, new entries are
written at it, in the cache or in an array of the newest, and attention takes no notice of what lies beyond.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import mlx.core as mx

from ..state.cache import Cache, Traced, up_to

Run = Callable[[mx.array, Sequence[Traced]], mx.array]  # tokens [1, 1] and a cache for each layer -> logits


class DecodeStep:
    """Runs a model for one token of one sequence. What is traced holds on to the model's arrays until `forget`."""

    def __init__(self, run: Run):
        self._run = run
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
        state: list[Any] = [array for layer in cache for array in layer.step_arrays()]
        thread = threading.get_ident()
        if thread not in self._compiled:
            self._compiled[thread] = mx.compile(self._trace([layer.traced for layer in cache]))
        logits, *arrays = self._compiled[thread](tokens, offset, *state)
        left = iter(arrays)
        for layer in cache:
            layer.take_step(list(islice(left, layer.traced.gives)))
        return logits

    def _trace(self, kinds: Sequence[Any]) -> Callable[..., list[mx.array]]:
        def run(tokens: mx.array, offset: mx.array, *arrays: mx.array) -> list[mx.array]:
            @lru_cache
            def seen(capacity: int) -> mx.array:
                return up_to(offset, capacity)

            left = iter(arrays)
            caches = [kind(*islice(left, kind.takes), offset, seen) for kind in kinds]
            out = [self._run(tokens, caches)]
            for cache in caches:
                out += cache.arrays
            return out

        return run
