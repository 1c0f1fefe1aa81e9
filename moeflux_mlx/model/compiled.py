"""The next tokens of one sequence or of several through the model, or a token through a layer up to its choice of
experts, as one compiled graph on a GPU.

Building the graph of a token in Python takes milliseconds. `mx.compile` traces it once for each capacity of the caches
and replays it: the whole model if the GPU holds every expert, otherwise the part of each layer before the host must
know the chosen experts. Traced caches have fixed shapes: the token's place is an array, new entries are written at that
place (in the cache or in an array of the newest entries), and attention ignores the entries after it.
"""

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx

from ..caches.layer_cache import LayerCache
from ..caches.recurrent import joined_arrays
from ..caches.stand_in import Elsewhere, Traced
from ..caches.traced import up_to
from ..experts.source import ExpertLoader
from ..ops.backend import AnyArray
from ..ops.rows import StepRows

Forward = Callable[..., list[mx.array]]  # called with the tokens, the stand-in of each cache, and other arrays
# The most graphs of a step, for each thread. A step has one for each way in which its caches are traced: for
# DeepSeek-V4's up to five rows of one sequence that are 32, by where entries end among the rows, and the same again
# whenever the entries' capacity grows; for several sequences it is each combination of their capacities.
MOST_GRAPHS = 64
_BYTES = attrgetter("nbytes")
# A number of rows, what makes the stand-in of each cache, and for each of their arrays which input it is.
Kind = tuple[int, Sequence[Any], Sequence[int]]
Joined = tuple[int, Any]  # the number of a cache, and what makes the stand-in of all sequences' caches with this number
Begin = Callable[[int, int], None]  # called with the numbers of a row and of a cache before that absorbs the row


@lru_cache(64)
def _scalar(value: int) -> mx.array:
    """One array for all layers: what the host hands over costs more than a kernel."""
    return mx.array(value, mx.int32)


class DecodeStep:
    """Runs a model, or a part of it, for rows: the next tokens of one sequence or of several.

    Traces keep the model's arrays until `forget`.

    Attributes:
        graphs: the traces by thread, then by the ways in which caches are traced and the sizes of all arrays.
    """

    def __init__(self, run: Forward):
        self._run = run
        # By thread, because MLX keeps traces by thread, and with a function forgets those of its last caller only. The
        # graph used last is at the end.
        self.graphs: dict[int, dict[Any, Any]] = {}

    def forget(self) -> None:
        """Frees the traces and what they keep."""
        self.graphs = {}

    @staticmethod
    def takes(tokens: mx.array, sequences: Sequence[Sequence[LayerCache]]) -> bool:
        """Whether there is a graph for rows: their tokens [1, R] or hidden states [1, R, hidden_size], and for each row
        the caches of its sequence, which must have absorbed a token and have a stand-in for all of its rows."""
        if tokens.shape[:2] != (1, len(sequences)):
            return False
        runs = _runs(sequences)
        caches = ((one, count) for cache, count in runs for one in cache)
        # One row always has a stand-in.
        refused = any(one.empty() or (count > 1 and one.traced(count) is None) for one, count in caches)
        return not refused

    def __call__(
        self, tokens: mx.array, sequences: Sequence[Sequence[LayerCache]], *more: mx.array, begin: Begin | None = None
    ) -> list[AnyArray]:
        """Runs the graph on the inputs of `takes` and on `more`, and returns its arrays; advances the caches of all
        sequences, after a call of `begin`.
        """
        outputs, take = self.start(tokens, sequences, *more, begin=begin)
        take(len(sequences[0]))
        return outputs

    def start(
        self, tokens: mx.array, sequences: Sequence[Sequence[LayerCache]], *more: mx.array, begin: Begin | None = None
    ) -> tuple[list[AnyArray], Callable[[int], None]]:
        """As a call, but returns the function that advances the caches of the first layers, as many as it is told."""
        texts, first, runs = list[_Text](), 0, _runs(sequences)
        joined: list[Joined] = []
        if len(runs) == len(sequences) > 1:
            joined = [(i, one.traced(1)) for i, one in enumerate(sequences[0]) if one.joins]
        elsewhere = frozenset(i for i, _ in joined)
        for cache, count in runs:
            texts.append(_Text.of(cache, first, count, elsewhere))
            first += count
        if len(texts) > 1:
            texts.sort(key=lambda text: hash((text.kind, text.sizes)))  # every other order would be another graph
        kinds = tuple(text.kind for text in texts)
        state = [array for text in texts for array in text.arrays]
        for i, _ in joined:
            state += joined_arrays([text.cache[i] for text in texts])
        order = _Order([slice(text.first, text.first + text.kind[0]) for text in texts])
        graph = self._graph(kinds, joined, [*state, *more])
        outputs = graph(order.permute(tokens), *state, *map(order.permute, more))
        count = len(outputs) - sum(number * kind.num_outputs for number, own, _ in kinds for kind in own)
        count -= sum(kind.num_outputs for _, kind in joined)

        def take(layers: int) -> None:
            left = islice(outputs, count, None)
            for text in texts:
                number, own, _ = text.kind
                for row in range(text.first, text.first + number):
                    for i, (layer, kind) in enumerate(zip(text.cache, own, strict=True)):
                        if kind is Elsewhere:
                            continue
                        arrays = list(islice(left, kind.num_outputs))
                        if i < layers:
                            if begin is not None:
                                begin(row, i)
                            layer.take_step(arrays)
            for i, kind in joined:
                arrays = list(islice(left, kind.num_outputs))
                for row, text in enumerate(texts):
                    if i < layers:
                        text.cache[i].take_joined(arrays, row)

        return list(map(order.undo, outputs[:count])), take

    def _graph(self, kinds: Sequence[Kind], joined: Sequence[Joined], arrays: Sequence[mx.array]) -> Any:
        """The graph for such caches and arrays; of too many the one that was not used for longest is freed."""
        own = self.graphs.setdefault(threading.get_ident(), {})  # another thread may call `forget` at any time
        key = kinds, tuple(joined), tuple(map(_BYTES, arrays))  # which tell a layer's capacities apart
        graph = own.pop(key, None) or mx.compile(self._trace(kinds, joined))
        own[key] = graph
        if len(own) > MOST_GRAPHS:
            del own[next(iter(own))]
        return graph

    def _trace(self, kinds: Sequence[Kind], joined: Sequence[Joined]) -> Callable[..., list[mx.array]]:
        def run(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
            left = iter(arrays)
            rows = list[tuple[_Standing, int]]()
            for count, own, places in kinds:
                given = list(islice(left, max(places) + 1))
                standing = _Standing(own, count, iter([given[place] for place in places]))
                rows += ((standing, row) for row in range(count))
            whole = {i: kind(*islice(left, kind.num_inputs), 0, 0, None) for i, kind in joined}
            caches = (
                rows[0][0].caches if len(rows) == 1 else [_step_rows(rows, i, whole) for i in range(len(kinds[0][1]))]
            )
            out = list(self._run(tokens, caches, *left))
            out += [array for one, row in rows for array in one.arrays(row)]
            return out + [array for one in whole.values() for array in one.arrays]

        return run


def by_case(run: Callable[..., list[AnyArray]], experts: ExpertLoader) -> Callable[..., DecodeStep]:
    """A function that gives the step of each case: `run` with the values of its first arguments, as many as the
    function gets. The steps keep their traces until `experts` close.
    """
    steps: dict[tuple[Any, ...], DecodeStep] = {}

    def forget() -> None:
        for step in list(steps.values()):
            step.forget()

    experts.at_close(forget)
    return lambda *case: steps.get(case) or steps.setdefault(case, DecodeStep(partial(run, *case)))


class _Text(NamedTuple):
    """One sequence of a step: its caches, the number of its first row, its kind, and the arrays of the stand-ins."""

    cache: Sequence[Any]
    first: int
    kind: Kind
    arrays: list[mx.array]

    @classmethod
    def of(cls, cache: Sequence[Any], first: int, count: int, elsewhere: Container[int]) -> "_Text":
        """Makes room in the caches for the rows. `elsewhere`: the caches whose arrays are joined with others'."""
        arrays, kinds = list[Any](), list[Any]()
        for row in range(count):
            arrays += _scalar(cache[0].offset + row), _scalar(cache[0].position + row)
        for i, one in enumerate(cache):
            if i in elsewhere:
                kinds.append(Elsewhere)
                continue
            one.reserve(count)
            arrays += one.step_arrays(count)
            kinds.append(one.traced(count))
        places, inputs = _unique(arrays) if elsewhere else (range(len(arrays)), arrays)
        return cls(cache, first, (count, tuple(kinds), places), inputs)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(_BYTES, self.arrays))


def _unique(arrays: Sequence[Any]) -> tuple[Sequence[int], list[Any]]:
    """The arrays with those of positions once, because all layers share them, and for each array its number there."""
    inputs, places, numbers = list[Any](), list[int](), dict[int, int]()
    for array in arrays:
        number = len(inputs)
        if array.dtype == mx.int32:
            number = numbers.setdefault(id(array), number)
        if number == len(inputs):
            inputs.append(array)
        places.append(number)
    return tuple(places), inputs


class _Order:
    """The order in which a graph has the rows of [1, R, ...]: parts of them, as the caller has them."""

    def __init__(self, parts: Sequence[slice]):
        self._parts = parts
        self._is_same = all(before.start < after.start for before, after in pairwise(parts))

    def permute(self, array: mx.array) -> mx.array:
        """The caller's rows in the graph's order."""
        return array if self._is_same else mx.concatenate([array[:, part] for part in self._parts], axis=1)

    def undo(self, array: mx.array) -> mx.array:
        """The graph's rows in the caller's order."""
        if self._is_same:
            return array
        ends = [0, *accumulate(part.stop - part.start for part in self._parts)]
        own = sorted(range(len(self._parts)), key=lambda i: self._parts[i].start)
        return mx.concatenate([array[:, ends[i] : ends[i + 1]] for i in own], axis=1)


class _Standing:
    """The stand-ins of one sequence's caches while the next `count` tokens pass them."""

    def __init__(self, kinds: Sequence[Any], count: int, arrays: Iterator[mx.array]):
        self._places = [_place(arrays) for _ in range(count)]
        self.caches: list[Traced] = []
        self._later: list[list[mx.array]] = []  # the arrays of each cache for the rows after the first
        for kind in kinds:
            self.caches.append(kind(*islice(arrays, kind.num_inputs), *self._places[0]))
            self._later.append(list(islice(arrays, kind.num_later * (count - 1))))
        self._before: dict[tuple[int, int], list[mx.array]] = {}  # by cache and row, after that row

    def begin(self, i: int, row: int) -> None:
        """Called when cache number i has absorbed the rows before this one."""
        if row:
            cache = self.caches[i]
            self._before[i, row - 1] = cache.arrays
            later = self._later[i][(row - 1) * cache.num_later : row * cache.num_later]
            cache.go_on(*later, *self._places[row])

    def arrays(self, row: int) -> list[mx.array]:
        """The arrays of all caches after the row."""
        return [array for i, cache in enumerate(self.caches) for array in self._before.get((i, row), cache.arrays)]


def _step_rows(rows: Sequence[tuple[_Standing, int]], i: int, joined: Mapping[int, Any]) -> StepRows:
    """The stand-in of cache number i of each row's sequence, or if it is there, the one of all sequences' caches."""

    def begin(number: int) -> None:
        standing, row = rows[number]
        standing.begin(i, row)

    return StepRows([standing.caches[i] for standing, _ in rows], begin, joined=joined.get(i))


def _place(arrays: Iterator[mx.array]) -> tuple[mx.array, mx.array, Callable[[int], mx.array]]:
    """A token's place, its rotary position, and its mask over a number of positions."""
    offset, position = islice(arrays, 2)
    return offset, position, lru_cache(lambda capacity: up_to(offset, capacity))


def _runs(sequences: Sequence[Sequence[Any]]) -> list[tuple[Sequence[Any], int]]:
    """The caches of each sequence with the number of its consecutive rows."""
    runs = list[tuple[Sequence[Any], int]]()
    for cache in sequences:
        if runs and runs[-1][0] is cache:
            runs[-1] = cache, runs[-1][1] + 1
        else:
            runs.append((cache, 1))
    return runs
