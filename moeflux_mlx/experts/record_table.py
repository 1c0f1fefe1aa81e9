"""The records of a layer that are in a pool, as a table in the device's memory that kernels index by expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..formats.record import Record
from ..ops.records import no_records, with_record


class Slot(Protocol):
    """A record in memory (`staging.Slot`)."""

    @property
    def device(self) -> mx.array | None:
        """The record in the device's memory."""
        ...


@dataclass(frozen=True)
class RecordTable:
    """Args:
    memory: as `Records.memory`, a record for each expert: another expert's where `slots` has none.
    slots: by expert. As long as they are referenced, their arrays stay where they are.
    """

    memory: mx.array
    slots: dict[int, Slot]


class LayerTable:
    """Keeps the table of a layer.

    Args:
        record: the geometry.
        experts: number of experts of the layer.
    """

    def __init__(self, record: Record, experts: int):
        self._memory = no_records(record, experts)
        self._changed = set(range(experts))
        self._table: RecordTable | None = None

    def note(self, expert: int) -> None:
        """A record has come or goes. Lets go of the records of the table."""
        self._changed.add(expert)
        self._table = None

    def get(self, slot_of: Callable[[int], Slot | None]) -> RecordTable | None:
        """The table; None if no record is there. `slot_of` an expert: its record in the device's memory."""
        if self._table is None:
            found = {expert: slot_of(expert) for expert in range(len(self._memory))}
            slots = {expert: slot for expert, slot in found.items() if slot is not None}
            if not slots:
                return None
            other, changed = next(iter(slots.values())), list(self._changed)
            for expert in changed:
                device = slots.get(expert, other).device
                assert device is not None
                self._memory = with_record(self._memory, expert, device)
            mx.async_eval(self._memory)
            self._changed.difference_update(changed)
            self._table = RecordTable(self._memory, slots)
        return self._table
