"""The records of a layer that are in a pool or in host memory, as a table in the device's memory that kernels index by
expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..formats.record import Key, Record
from ..ops.records import no_records, with_record


class InTable(Protocol):
    """A record that kernels can read: a `staging.Slot` or a `host_tier.HostRecord`."""

    @property
    def device(self) -> mx.array | None:
        """The record, as an array [words]."""
        ...


@dataclass(frozen=True)
class RecordTable:
    """Args:
    memory: as `Records.memory`, a record for each expert: one of zeros where `slots` has none.
    slots: by expert. As long as they are referenced, their arrays stay where they are.
    """

    memory: mx.array
    slots: dict[int, InTable]


class LayerTable:
    """Keeps the table of a layer.

    Args:
        record: the geometry.
        experts: number of experts of the layer.
    """

    def __init__(self, record: Record, experts: int):
        self._memory = no_records(record, experts)
        self._changed = set(range(experts))  # since the last table
        self._slots: dict[int, InTable] = {}  # of the experts that have not changed
        self._table: RecordTable | None = None

    def note(self, expert: int) -> None:
        """A record has come or goes. Lets go of the records of the table."""
        self._changed.add(expert)
        self._slots.pop(expert, None)
        self._table = None

    def get(
        self, slot_of: Callable[[int], InTable | None], zeros_like: Callable[[mx.array], mx.array]
    ) -> RecordTable | None:
        """The table; None if no record is there. `slot_of` an expert: its record. `zeros_like` a record: what stands
        for those that are not there; it outlives all tables.
        """
        if self._table is None:
            changed = list(self._changed)
            slots = {**self._slots, **{expert: slot for expert in changed if (slot := slot_of(expert)) is not None}}
            if not slots:
                return None
            some = next(iter(slots.values())).device
            assert some is not None
            for expert in changed:
                device = slots[expert].device if expert in slots else zeros_like(some)
                assert device is not None
                self._memory = with_record(self._memory, expert, device)
            mx.async_eval(self._memory)
            self._changed.difference_update(changed)
            self._slots, self._table = dict(slots), RecordTable(self._memory, slots)
        return self._table


class Tables:
    """The tables of the layers whose records are in a pool."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerTable] = {}
        self._zeros: mx.array | None = None

    def get(
        self, layer: int, record: Record, experts: int, slot_of: Callable[[int], InTable | None]
    ) -> RecordTable | None:
        """As `LayerTable.get`, of a layer with so many experts."""
        if layer not in self._layers:
            self._layers[layer] = LayerTable(record, experts)
        return self._layers[layer].get(slot_of, self._zeros_like)

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
