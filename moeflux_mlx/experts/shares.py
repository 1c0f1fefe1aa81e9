"""Size classes: layers whose records take the same memory share a buffer, and memory is divided among the classes.

A record counts with its own size, rounded up to whole blocks of a disk. Each class gets the same share of its records,
but at least as many as one request may ask for, so no layer's experts take the memory of another layer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..formats.record import ExpertLayout


@dataclass(frozen=True)
class SizeClass:
    """Args:
    nbytes: bytes of memory for one record.
    layers: the layers whose records have that size.
    records: the number of these records.
    """

    nbytes: int
    layers: tuple[int, ...]
    records: int


def size_classes(layout: ExpertLayout) -> tuple[SizeClass, ...]:
    """The size classes of the layout, in the order of their first layers."""
    layers: dict[int, list[int]] = {}
    for layer, record in layout.records.items():
        layers.setdefault(record.held_bytes, []).append(layer)
    return tuple(SizeClass(nbytes, tuple(of), sum(map(layout.count, of))) for nbytes, of in layers.items())


def divide(classes: Sequence[SizeClass], nbytes: int, least: int) -> list[int]:
    """The number of records of each class that fit in `nbytes`, but at least `least` of each."""
    slots = [min(least, one.records) for one in classes]
    shared = dict(enumerate(classes))
    while shared:
        total = sum(one.nbytes * one.records for one in shared.values())
        left = max(nbytes - sum(slots[i] * one.nbytes for i, one in enumerate(classes) if i not in shared), 0)
        short = [i for i, one in shared.items() if left * one.records // total < slots[i]]
        if not short:
            for i, one in shared.items():
                slots[i] = min(left * one.records // total, one.records)
            break
        for i in short:
            del shared[i]
    return slots


def taken(layout: ExpertLayout, nbytes: int, least: int) -> int:
    """Bytes of the whole records in a pool of `nbytes`."""
    classes = size_classes(layout)
    return sum(slots * one.nbytes for slots, one in zip(divide(classes, nbytes, least), classes, strict=True))


def slots_within(layout: ExpertLayout, nbytes: int, least: int) -> int:
    """The number of records of all classes in a pool of `nbytes`."""
    return sum(divide(size_classes(layout), nbytes, least))
