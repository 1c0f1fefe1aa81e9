"""The records of a layer that are in a pool or in host memory, as a table in the device's memory that kernels index by
expert.

A table is a value: a change makes another array, so layers that are queued with a table keep it as it was. If records
are in buffers, a table has their slots; otherwise it has their addresses (without kernels, the records themselves).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..formats.record import Key, Record
from ..ops.launch import LEAST_ELEMENTS
from ..ops.records import MISSING, no_records, with_record


class InTable(Protocol):
    """A record that kernels can read: a `staging.Slot` or a `host_tier.HostRecord`."""

    row: int  # its place

    @property
    def device(self) -> mx.array | None:
        """The record, as an array [words], where it lies apart."""


@dataclass(frozen=True)
class RecordTable:
    """Args:
    memory: as `Records.memory`, a record for each expert: one of zeros where `slots` has none. With `buffers`, as
        `Records.slots`.
    slots: by expert. As long as they are referenced, their arrays stay where they are.
    buffers: the memory of all records, if they are in buffers.
    """

    memory: mx.array
    slots: dict[int, InTable]
    buffers: tuple[mx.array, ...] = ()


class LayerTable(ABC):
    """Keeps the table of a layer.

    Args:
        experts: number of experts of the layer.
    """

    def __init__(self, experts: int):
        self._changed = set(range(experts))  # since the last table
        self._slots: dict[int, InTable] = {}  # of the experts that have not changed
        self._table: RecordTable | None = None

    def note(self, expert: int) -> None:
        """A record has come or goes. Lets go of the records of the table."""
        self._changed.add(expert)
        self._slots.pop(expert, None)
        self._table = None

    def get(self, slot_of: Callable[[int], InTable | None]) -> RecordTable | None:
        """The table; None if no record is there. `slot_of` an expert: its record."""
        if self._table is None:
            changed = list(self._changed)
            slots = {**self._slots, **{expert: slot for expert in changed if (slot := slot_of(expert)) is not None}}
            if not slots:
                return None
            memory = self.written(changed, slots)
            self._changed.difference_update(changed)
            self._slots, self._table = dict(slots), RecordTable(memory, slots)
        return self._table

    @abstractmethod
    def written(self, changed: Collection[int], slots: Mapping[int, InTable]) -> mx.array:
        """The table of the records `slots`, after a change of some experts; an interrupted call is repeated."""


class SlotTable(LayerTable):
    """A table of slots in buffers."""

    def __init__(self, experts: int):
        super().__init__(experts)
        self._numbers = np.full(max(experts, LEAST_ELEMENTS), MISSING, np.uint32)

    def written(self, changed: Collection[int], slots: Mapping[int, InTable]) -> mx.array:
        for expert in changed:
            self._numbers[expert] = slots[expert].row if expert in slots else MISSING
        return mx.array(self._numbers)


class AddressTable(LayerTable):
    """A table of records that lie apart.

    Args:
        record: the geometry.
        zeros_like: gives for a record what stands for those that are not there; it outlives all tables.
    """

    def __init__(self, record: Record, experts: int, zeros_like: Callable[[mx.array], mx.array]):
        super().__init__(experts)
        self._memory, self._zeros_like = no_records(record, experts), zeros_like

    def written(self, changed: Collection[int], slots: Mapping[int, InTable]) -> mx.array:
        some = next(iter(slots.values())).device
        assert some is not None
        for expert in changed:
            device = slots[expert].device if expert in slots else self._zeros_like(some)
            assert device is not None
            self._memory = with_record(self._memory, expert, device)
        mx.async_eval(self._memory)
        return self._memory


class Tables:
    """The tables of the layers whose records are in a pool."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerTable] = {}
        self._zeros: mx.array | None = None

    def get(
        self,
        layer: int,
        record: Record,
        experts: int,
        slot_of: Callable[[int], InTable | None],
        buffers: tuple[mx.array, ...],
    ) -> RecordTable | None:
        """As `LayerTable.get`, of a layer with so many experts, whose records lie apart or in `buffers`. What is kept
        does not refer to these, as each may be given back.
        """
        if layer not in self._layers:
            made = SlotTable(experts) if buffers else AddressTable(record, experts, self._zeros_like)
            self._layers[layer] = made
        table = self._layers[layer].get(slot_of)
        return RecordTable(table.memory, table.slots, buffers) if table and buffers else table

    def note(self, key: Key) -> None:
        """A record has come or goes: its layer's table is another one from now on."""
        if key[0] in self._layers:
            self._layers[key[0]].note(key[1])

    def clear(self) -> None:
        """Forgets all tables."""
        self._layers.clear()

    def _zeros_like(self, record: mx.array) -> mx.array:
        if self._zeros is None:
            self._zeros = mx.zeros_like(record)
            mx.eval(self._zeros)  # a lazy array belongs to the thread that made it
        return self._zeros
