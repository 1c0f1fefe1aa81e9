"""A token of one or several sequences through the model, or through a layer up to its choice of experts, as one
compiled graph on a GPU.

Building the graph of a token in Python takes milliseconds. `mx.compile` traces it once for each capacity of the caches
and replays it: the whole model if the GPU holds every expert, otherwise the part of each layer before the host must
know the chosen experts. Traced caches have fixed shapes: the token's place is an array, new entries are written at that
place (in the cache or in an array of the newest entries), and attention ignores the entries after it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import mlx.core as mx

from ..ops.rows import RowCaches
from ..state.cache import Cache
from ..state.traced import Traced, up_to

# Of a token each of some sequences, what takes the place of each layer's cache, and whatever else a call gives.
Run = Callable[..., list[mx.array]]
MOST_TRACES = 64  # of a step: each capacity of each of several sequences makes another


@lru_cache(64)
def _scalar(value: int) -> mx.array:
    """One array for all layers: what the host hands over costs more than a kernel."""
    return mx.array(value, mx.int32)


class Compiled:
    """A function of arrays as a graph, traced once for each of their shapes, and replayed.

    What is traced holds on to the arrays that the function finds elsewhere, until `forget`.
    """

    def __init__(self, run: Callable[..., list[mx.array]]):
        self._run = run
        # One for each thread: MLX keeps traces by thread, and with a function forgets those of its last caller only.
        self._compiled: dict[int, Any] = {}

    def forget(self) -> None:
        """Gives back what the traces hold."""
        self._compiled = {}

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        thread = threading.get_ident()
        if thread not in self._compiled:
            run = self._run  # a function of its own for each thread
            self._compiled[thread] = mx.compile(lambda *given: run(*given))
        return cast("list[mx.array]", self._compiled[thread](*arrays))


class DecodeStep:
    """Runs a model, or a part of it, for one token of each of some sequences.

    What is traced holds on to the model's arrays until `forget`.
    """

    def __init__(self, run: Run):
        self._run = run
        # By thread, because MLX keeps traces by thread, and with a function forgets those of its last caller only; and
        # by the ways in which caches are traced.
        self._compiled: dict[Any, Any] = {}
        self._traces = 0

    def forget(self) -> None:
        """Gives back what the traces hold."""
        self._compiled, self._traces = {}, 0

    @staticmethod
    def takes(tokens: mx.array, sequences: Sequence[Sequence[Cache]]) -> bool:
        """tokens [1, R], or [1, R, hidden_size] of R tokens, one of each sequence, after at least one that every cache
        has seen."""
        layers = (layer for cache in sequences for layer in cache)
        return tokens.shape[:2] == (1, len(sequences)) and not any(one.empty() or not one.can_trace for one in layers)

    def __call__(self, tokens: mx.array, sequences: Sequence[Sequence[Any]], *more: mx.array) -> list[mx.array]:
        """The arrays that `run` makes of what `takes` takes, and of `more`; advances the caches of all sequences."""
        state: list[Any] = []
        for cache in sequences:
            state += _scalar(cache[0].offset), _scalar(cache[0].position)
            for layer in cache:
                layer.reserve(1)
                state += layer.step_arrays()
        kinds = tuple(tuple(layer.traced for layer in cache) for cache in sequences)
        if self._traces > MOST_TRACES:
            self.forget()
        key = threading.get_ident(), kinds
        if key not in self._compiled:
            self._compiled[key] = mx.compile(self._trace(kinds))
        outputs = self._compiled[key](tokens, *state, *more)
        count = len(outputs) - sum(kind.num_outputs for own in kinds for kind in own)
        left = islice(outputs, count, None)
        for cache, own in zip(sequences, kinds, strict=True):
            for layer, kind in zip(cache, own, strict=True):
                layer.take_step(list(islice(left, kind.num_outputs)))
        return outputs[:count]

    def _trace(self, kinds: Sequence[Sequence[Any]]) -> Callable[..., list[mx.array]]:
        def run(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
            self._traces += 1
            left = iter(arrays)
            sequences = [_traced(own, left) for own in kinds]
            rows = [RowCaches(layers, _nothing) for layers in zip(*sequences, strict=True)]
            out = list(self._run(tokens, sequences[0] if len(sequences) == 1 else rows, *left))
            return out + [array for caches in sequences for cache in caches for array in cache.arrays]

        return run


def _traced(kinds: Sequence[Any], arrays: Iterator[mx.array]) -> list[Traced]:
    """The stand-ins of a sequence's caches, of what `arrays` goes on with: offset, position and each one's own."""
    offset, position = islice(arrays, 2)

    @lru_cache
    def seen(capacity: int) -> mx.array:
        return up_to(offset, capacity)

    return [kind(*islice(arrays, kind.num_inputs), offset, position, seen) for kind in kinds]


def _nothing(row: int) -> None:
    """Nobody takes back a traced cache: the caches themselves are not changed before the step is whole."""
