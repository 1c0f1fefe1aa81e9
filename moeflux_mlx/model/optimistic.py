"""Layers of streamed experts that are queued ahead, in the hope that their experts are in the pool.

Otherwise the host waits for each router's choice before it can name the records of the chosen experts. Here a table on
the GPU names the record of each expert that is in the pool, or in host memory, which the GPU reads. Several layers are
one graph, and groups of layers are queued before the host reads which experts the earlier ones have chosen. Where an
expert was missing, the layer's result and all later ones are dropped: caches have not taken them yet, and the layer's
inputs to its experts are kept. Nothing that used a missing record is used, except that the later layers' choices, most
of which will be made again, tell which records to read ahead. Only a single token is queued ahead.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..experts.record_table import RecordTable
from ..experts.routing import FromTables
from ..experts.source import ExpertLoader, Key
from ..layers import AnyCache, Caches
from ..mixers.registry import by_layer
from ..ops import backend
from ..ops.backend import AnyArray
from ..ops.route import read_ids
from ..ops.seen import Chosen
from .compiled import DecodeStep, by_case
from .layer import DecoderLayer
from .tokens import Tokens


class Grouping(NamedTuple):
    """How layers are queued.

    Args:
        share: of the layers whose experts were in the pool, from which on they are queued so.
        together: layers of a group.
        shorter: layers that the first group has less, so that the GPU begins sooner; the last one often ends sooner.
        ahead: groups that are queued at once.
        most: the longest time of a queued layer, in seconds, for which they are queued so.
    """

    share: float
    together: int
    shorter: int
    ahead: int
    most: float = inf


# The fewer layers are queued, the less is computed in vain behind a missing expert, and the more the host has to do.
# One layer behind the one whose choice is read is enough if a GPU computes it for longer than the host takes to read.
# The first of these that applies is used; if none does, the host waits for each choice. CUDA's was measured on an H200
# at 60 to 100 % of layers without a miss, Metal's were computed (`scripts/bench/play_queued.py`).
SLOW = 0.4e-3  # seconds
GROUPINGS = {
    "cuda": (Grouping(0.3, 8, 4, 2),),
    "metal": (Grouping(0.97, 8, 4, 2, SLOW), Grouping(0.3, 2, 0, 3, SLOW), Grouping(0.8, 1, 0, 2)),
}
MEMORY = 0.98  # weight of the past in the share, and in the time of a layer
FORGETTING = 0.999  # weight of the time of a layer after each that was not queued, so that it is measured again


@dataclass(eq=False)
class Group:
    """Queued layers.

    Attributes:
        first: the number of the first layer.
        tables: the records that each layer may use.
        parts: of each layer what it hands on, what its residual keeps, the input of its experts' block, and the arrays
            of the chosen ids for the host.
        out: of the last layer; behind the model's last one, what `project` makes of it.
        take: advances the caches of so many of the layers.
    """

    first: int
    tables: list[RecordTable]
    parts: list[tuple[list[Any], list[Any], mx.array, list[mx.array]]]
    out: AnyArray
    take: Callable[[int], None]


class OptimisticLayers:
    """Runs a token through layers, which it compiles.

    Args:
        layers: of the model.
        cache_numbers: of each layer.
        experts: serves their experts.
        embed: makes the first layer's input of a token [1, 1].
        project: makes what the model returns of the last layer's output.

    Attributes:
        share: the share of the last layers whose experts were in the pool, counted from none on.
        seconds: the time of a queued layer, of late.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        cache_numbers: Sequence[range],
        experts: ExpertLoader,
        embed: Callable[[mx.array], AnyArray],
        project: Callable[[AnyArray], list[AnyArray]],
    ):
        self._layers, self._cache_numbers, self._experts = layers, cache_numbers, experts
        self._embed, self._project = embed, project
        for layer in layers:
            layer.compile(experts)
        self._queueable = {  # by the layer's number
            number: cast(FromTables, layer.mlp.experts) for number, layer in enumerate(layers) if layer.may_be_queued
        }
        self._step = by_case(self._compute, experts)
        self.share = self.seconds = 0.0
        self._read_at: float | None = None  # when the token's group before was read, if it was accepted
        self._begun: list[Group] = []  # of this token: the GPU may still read the records of their tables
        self._ahead: dict[int, list[Key]] = {}  # records that are read ahead, by layer

    def compute(self, token: mx.array, cache: Sequence[AnyCache], inputs: Tokens) -> list[AnyArray]:
        """What `project` makes for a token [1, 1], from the caches of all layers; `inputs` as layers take them."""
        try:
            has_graphs = DecodeStep.takes(token, [cache])
            return self._compute_layers(token, by_layer(self._cache_numbers, cache), inputs, has_graphs)
        finally:
            begun, self._begun = self._begun, []
            mx.eval([group.out for group in begun])
            self._experts.queued([])

    def _compute_layers(
        self, token: mx.array, caches: Sequence[Caches], inputs: Tokens, has_graphs: bool
    ) -> list[AnyArray]:
        chosen, queued, number = Chosen(), deque[Group](), 0
        h: AnyArray = token
        self._read_at = None
        while number < len(self._layers) or queued:
            while has_graphs and (group := self._queue(number, len(queued), h, chosen, caches)):
                queued.append(group)
                number, h = number + len(group.tables), group.out
                chosen.take(group.parts[-1][0])
            if not queued:
                h = self._at_once(number, h if number else self._embed(token), caches[number], chosen, inputs)
                number += 1
                continue
            group = queued.popleft()
            accepted = self._accept(group)
            if accepted < len(group.tables):
                self._read_ahead([(group, accepted), *((later, 0) for later in queued)])
                queued.clear()
                number = group.first + accepted + 1
                handed, kept, x, host_copy = group.parts[accepted]
                h = self._layers[number - 1].finish(x, kept, read_ids(host_copy))
                chosen.take(handed)
            elif group.first + accepted == len(self._layers):
                return cast(list[AnyArray], group.out)
        return self._project(h)

    def _at_once(self, number: int, h: mx.array, caches: Caches, chosen: Chosen, inputs: Tokens) -> mx.array:
        """A layer for whose choice the host waits."""
        stats = self._experts.stats
        before, self._read_at = stats.drive_requests, None
        h = self._layers[number](h, caches, chosen, inputs)
        self._ahead.pop(number, None)
        if self._ahead:  # the layer's own prediction has taken their place
            self._experts.hint([key for keys in self._ahead.values() for key in keys])
        self.seconds *= FORGETTING
        if number in self._queueable:
            self._note(stats.drive_requests == before)
        return h

    def _queue(self, first: int, queued: int, h: mx.array, chosen: Chosen, caches: Sequence[Caches]) -> Group | None:
        """Begins to compute layers from `first` on, behind `queued` groups. Their input is h, or the token for layer 0.
        None: not possible, or it would not pay.
        """
        fitting = (
            how for how in GROUPINGS.get(backend.name(), ()) if self.share >= how.share and self.seconds <= how.most
        )
        how = next(fitting, None)
        tables = [] if how is None or queued >= how.ahead else self._tables(first, how)
        if not tables:
            return None
        own = caches[first : first + len(tables)]
        given = chosen.handed
        buffers, places = _once([table.buffers for table in tables])
        step = self._step(first, tuple(one is not None for one in given), places)
        arrays = [*(one for one in given if one is not None), *(table.memory for table in tables), *buffers]
        (parts, out), take = step.start(h, [list(chain.from_iterable(own))], *arrays)
        group = Group(first, tables, parts, out, lambda layers: take(sum(map(len, own[:layers]))))
        self._begun.append(group)
        self._note_queued()
        mx.async_eval(out, [host_copy for *_, host_copy in parts])
        return group

    def _tables(self, first: int, how: Grouping) -> list[RecordTable]:
        """The tables of the layers of a group: up to one without a table, or whose records are being read ahead."""
        tables = list[RecordTable]()
        for number in range(first, min(first - (first + how.shorter) % how.together + how.together, len(self._layers))):
            table = self._experts.table(number) if number in self._queueable else None
            expected = self._ahead.get(number)
            if table is None or expected and not set(expected).isdisjoint(self._experts.in_flight):
                break
            self._ahead.pop(number, None)
            tables.append(table)
        return tables

    def _note_queued(self) -> None:
        self._experts.queued([group.out for group in self._begun])

    def _read_ahead(self, dropped: Sequence[tuple[Group, int]]) -> None:
        """Begins to read what a layer lacked, and what the layers behind it have chosen without it.

        Args:
            dropped: groups, and the number of the first layer in each that is dropped.
        """
        wanted, self._ahead = list[Key](), {}
        for group, accepted in dropped:
            for number in range(group.first + accepted, group.first + len(group.tables)):
                if not self._queueable[number].reads_ahead:
                    return
                *_, host_copy = group.parts[number - group.first]
                there = group.tables[number - group.first].slots
                keys = [(number, expert) for expert in read_ids(host_copy)[0].tolist() if expert not in there]
                if not wanted:
                    self._experts.hint(keys)  # it is requested next: the others' choices may have to be waited for
                self._ahead[number] = keys
                wanted += keys
        self._experts.hint(wanted)

    def _accept(self, group: Group) -> int:
        """Waits for a group, and advances the caches of the layers before the first one that lacked an expert, and of
        this one. Returns how many are accepted whole.
        """
        accepted = 0
        for table, (*_, host_copy) in zip(group.tables, group.parts, strict=True):
            ids = read_ids(host_copy)
            is_hit = self._experts.accept(group.first + accepted, ids, table)
            self._note(is_hit)
            if not is_hit:
                break
            accepted += 1
        for number in range(group.first, group.first + accepted):
            self._queueable[number].accepted(number)
        self._note_time(group, accepted)
        del self._begun[: self._begun.index(group)]  # the GPU has computed them
        self._note_queued()
        group.take(min(accepted + 1, len(group.tables)))
        self._experts.relieve()
        return accepted

    def _note(self, is_hit: bool) -> None:
        self.share = MEMORY * self.share + (1 - MEMORY) * is_hit

    def _note_time(self, group: Group, accepted: int) -> None:
        """Measures from one accepted group to the next of the token. A new graph takes longer to make than `SLOW`."""
        now, before, count = self.clock(), self._read_at, len(group.tables)
        self._read_at = now if accepted == count else None
        if self._read_at is not None and before is not None:
            self.seconds = MEMORY * self.seconds + (1 - MEMORY) * min((now - before) / count, 2 * SLOW)

    def _compute(
        self,
        first: int,
        given: tuple[bool, ...],
        places: tuple[tuple[int, int], ...],
        h: mx.array,
        caches: Sequence[Any],
        *arrays: mx.array,
    ) -> list[Any]:
        """The function that is compiled. `arrays`: what earlier layers hand on, as far as it is `given`; the table of
        each layer; and the buffers, among which those of each layer have these places.
        """
        left, chosen, parts, stands, end = iter(arrays), Chosen(), [], iter(caches), first + len(places)
        h = h if first else self._embed(h)
        chosen.take([next(left) if is_given else None for is_given in given])
        tables = list(islice(left, len(places)))
        buffers = list(left)
        for number, memory, (start, stop) in zip(range(first, end), tables, places, strict=True):
            layer = self._layers[number]
            kept, before = layer.choose(h, list(islice(stands, len(self._cache_numbers[number]))), chosen)
            host_copy = list[mx.array]()
            compute = self._queueable[number].from_table(number, memory, buffers[start:stop], host_copy)
            h = layer.residual.added(layer.mlp.run_experts(before, compute), *kept)
            parts.append((chosen.handed, kept, before.residual, host_copy))
        return [parts, self._project(h) if end == len(self._layers) else h]


def _once(several: Sequence[tuple[mx.array, ...]]) -> tuple[list[mx.array], tuple[tuple[int, int], ...]]:
    """The arrays of several tuples, those of the same tuple once; and of each tuple its first place and its end."""
    arrays, places = list[mx.array](), dict[int, tuple[int, int]]()
    for some in several:
        if id(some) not in places:
            places[id(some)] = len(arrays), len(arrays) + len(some)
            arrays += some
    return arrays, tuple(places[id(some)] for some in several)
