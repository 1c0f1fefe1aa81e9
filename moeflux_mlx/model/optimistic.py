"""Layers of streamed experts that are queued ahead, in the hope that their experts are in the pool.

Otherwise the host waits for each router's choice before it can name the records of the chosen experts. Here a table on
the GPU names the record of each expert that is in the pool. Several layers are one graph, and groups of layers are
queued before the host reads which experts the earlier ones have chosen. Where an expert was missing, the layer's result
and all later ones are dropped: caches have not taken them yet, and the layer's inputs to its experts are kept. Nothing
that used a missing record is used. Only a single token is queued ahead.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import mlx.core as mx

from ..experts.record_table import RecordTable
from ..experts.routing import Routing
from ..experts.source import ExpertLoader
from ..layers import Caches
from ..ops.backend import AnyArray
from ..ops.experts import expert_ffn
from ..ops.records import Records
from ..ops.route import read_ids
from ..ops.seen import Chosen
from .compiled import DecodeStep, by_case
from .layer import DecoderLayer
from .moe import BeforeExperts

TOGETHER = 4  # the most layers of a group
AHEAD = 2  # groups that are queued at once
LEAST_SHARE = 0.85  # share of layers without a missing expert from which on layers are queued ahead
MEMORY = 0.98  # weight of the past in this share


@dataclass
class Group:
    """Queued layers.

    Attributes:
        first: the number of the first layer.
        tables: the records that each layer may use. They keep these in memory until the group was computed.
        parts: of each layer what it hands on, what its residual keeps, and its `BeforeExperts`.
        out: of the last layer.
        take: advances the caches of so many layers.
    """

    first: int
    tables: list[RecordTable]
    parts: list[tuple[Any, Any, BeforeExperts]]
    out: mx.array
    take: Callable[[int], None]

    @property
    def stop(self) -> int:
        return self.first + len(self.tables)


class OptimisticLayers:
    """Args:
        layers: of the model.
        cache_numbers: of each layer.
        experts: serves their experts.

    Attributes:
        share: the share of the last layers that lacked no expert.
        together: layers of a group.
    """

    def __init__(self, layers: Sequence[DecoderLayer], cache_numbers: Sequence[range], experts: ExpertLoader):
        self._layers, self._cache_numbers, self._experts = layers, cache_numbers, experts
        self._step = by_case(self._compute, experts)
        self.share, self.together = 1.0, TOGETHER
        self._held: list[list[RecordTable]] = []  # of groups that the GPU may still compute

    def pass_layers(self, h: AnyArray, caches: Sequence[Caches], inputs: Any) -> AnyArray:
        """The output of the last layer for the streams h [1, 1, .]; `caches` and `inputs` as a layer takes them."""
        chosen, queued, at = Chosen(), deque[Group](), 0
        given = chosen.handed
        before = h
        while at < len(self._layers) or queued:
            while len(queued) < AHEAD and (group := self._queue(at, before, given, caches)) is not None:
                queued.append(group)
                at, before, given = group.stop, group.out, group.parts[-1][0]
            if not queued:
                chosen.take(given)
                misses = self._experts.stats.misses
                h = before = self._layers[at](before, caches[at], chosen, inputs)
                given = chosen.handed
                self._note(self._experts.stats.misses == misses)
                at += 1
                continue
            group = queued.popleft()
            missing = self._accept(group)
            if missing is not None:
                self._held += [one.tables for one in queued]
                queued.clear()
                at, (given, kept, parts) = missing + 1, group.parts[missing - group.first]
                layer = self._layers[missing]
                before = layer.residual.added(layer.mlp.run_experts(parts), *kept)
        return before

    def _queue(self, first: int, h: AnyArray, given: Sequence[Any], caches: Sequence[Caches]) -> Group | None:
        """Begins to compute layers from `first` on; None if that is not possible or will not pay."""
        if self.share < LEAST_SHARE or not isinstance(h, mx.array):
            return None
        tables = []
        for number in range(first, min(first + self.together, len(self._layers))):
            layer = self._layers[number]
            table = self._experts.table(number) if layer.may_be_queued else None
            if table is None or not DecodeStep.takes(h, [caches[number]]):
                break
            tables.append(table)
        if not tables:
            return None
        own = list(chain.from_iterable(caches[first : first + len(tables)]))
        step = self._step(first, len(tables), tuple(one is not None for one in given))
        arrays = [one for one in given if one is not None]
        (parts, out), take = step.start(h, [own], *(table.memory for table in tables), *arrays)
        mx.async_eval(out, [one for *_, before in parts for one in before[6]])
        counts = [len(caches[number]) for number in range(first, first + len(tables))]
        read = [(handed, kept, BeforeExperts(*before)) for handed, kept, before in parts]
        return Group(first, tables, read, out, lambda layers: take(sum(counts[:layers])))

    def _accept(self, group: Group) -> int | None:
        """Waits for a group, and advances caches up to the first layer that lacked an expert, or all; its number."""
        missing = None
        for number, table, (_, _, before) in zip(
            range(group.first, group.stop), group.tables, group.parts, strict=True
        ):
            ids = read_ids(before.ids, before.host_copy)
            is_hit = self._experts.accept(number, ids, table)
            self._note(is_hit)
            if not is_hit:
                missing = number
                break
        group.take(group.stop - group.first if missing is None else missing + 1 - group.first)
        self._held = [group.tables]  # earlier ones are over, because the GPU computes in order
        return missing

    def _note(self, is_hit: bool) -> None:
        self.share = MEMORY * self.share + (1 - MEMORY) * is_hit

    def _compute(
        self, first: int, count: int, given: tuple[bool, ...], h: mx.array, caches: Sequence[Any], *arrays: mx.array
    ) -> list[Any]:
        """The function that is compiled: `count` layers, with the tables of their records first among `arrays`."""
        left, chosen, parts, stands = iter(arrays[count:]), Chosen(), [], iter(caches)
        chosen.take([next(left) if is_given else None for is_given in given])
        for number, memory in zip(range(first, first + count), arrays[:count], strict=True):
            layer = self._layers[number]
            kept, before = layer.choose(h, list(islice(stands, len(self._cache_numbers[number]))), chosen)
            records = Records(memory, self._experts.layout.records[number])

            def compute(routing: Routing, x: Any, residual: Any, shared: Any, records: Records = records) -> Any:
                return expert_ffn(x, routing.ids, records, routing.weights, residual, shared)

            h = layer.residual.added(layer.mlp.run_experts(before, compute), *kept)
            parts.append((chosen.handed, kept, tuple(before)))
        return [parts, h]
