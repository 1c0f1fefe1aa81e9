"""One token through the model, or through a layer up to the choice of its experts, as one compiled graph, for a GPU.

Building the graph of a token in Python costs milliseconds; `mx.compile` traces it once for each capacity of
the caches and replays it: the whole model where the GPU holds every expert, each layer's part where the host must
know which experts it wants. The traced caches have fixed shapes: the place of the token is an array, new entries are
written there, in the cache or in an array of the newest, and attention takes no notice of what lies beyond.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import mlx.core as mx

from ..state.cache import Cache
from ..state.traced import Traced, up_to

Run = Callable[[mx.array, Sequence[Traced]], list[mx.array]]  # of one token, and the caches that it adds to


@lru_cache(8)
def _scalar(value: int) -> mx.array:
    """One array for all layers: what the host hands over costs more than a kernel."""
    return mx.array(value, mx.int32)


class DecodeStep:
    """Runs a model, or a part of it, for one token of one sequence.

    What is traced holds on to the model's arrays until `forget`.
    """

    def __init__(self, run: Run):
        self._run = run
        # One for each thread: MLX keeps traces by thread, and with a function forgets those of its last caller only.
        self._compiled: dict[int, Any] = {}

    def forget(self) -> None:
        """Gives back what the traces hold."""
        self._compiled = {}

    @staticmethod
    def takes(tokens: mx.array, cache: Sequence[Cache]) -> bool:
        """tokens [1, 1], or [1, 1, hidden_size] of a token, after at least one that every cache has seen."""
        return tokens.shape[:2] == (1, 1) and not any(layer.empty() for layer in cache)

    def __call__(self, tokens: mx.array, cache: Sequence[Cache]) -> list[mx.array]:
        """The arrays that `run` makes of what `takes` takes; advances `cache`."""
        for layer in cache:
            layer.reserve(1)
        places = _scalar(cache[0].offset), _scalar(cache[0].position)
        state: list[Any] = [array for layer in cache for array in layer.step_arrays()]
        thread = threading.get_ident()
        if thread not in self._compiled:
            self._compiled[thread] = mx.compile(self._trace([layer.traced for layer in cache]))
        outputs = self._compiled[thread](tokens, *places, *state)
        count = len(outputs) - sum(layer.traced.num_outputs for layer in cache)
        left = islice(outputs, count, None)
        for layer in cache:
            layer.take_step(list(islice(left, layer.traced.num_outputs)))
        return outputs[:count]

    def _trace(self, kinds: Sequence[Any]) -> Callable[..., list[mx.array]]:
        def run(tokens: mx.array, offset: mx.array, position: mx.array, *arrays: mx.array) -> list[mx.array]:
            @lru_cache
            def seen(capacity: int) -> mx.array:
                return up_to(offset, capacity)

            left = iter(arrays)
            caches = [kind(*islice(left, kind.num_inputs), offset, position, seen) for kind in kinds]
            out = list(self._run(tokens, caches))
            for cache in caches:
                out += cache.arrays
            return out

        return run
