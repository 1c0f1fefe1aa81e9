"""The pools of one model: which pool serves which layer, and how bytes are divided among the pools. It does not know
how records are read.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from ..formats.record import ExpertLayout, Key
from ..ops import backend
from .pool import SlotPool, can_breathe
from .shares import SizeClass, divide, size_classes

WORTH_GROWING = 16  # the pool grows by at least 1/16, so that it is not resized for each token
WORTH_REPLACING = 8  # a pool that loses its records when resized shrinks by at least 1/8


class Pools(list[SlotPool]):
    """One pool per size class, or several if one would exceed `buffer_bytes`; none after they are cleared.

    Args:
        layout: the layout of the experts.
        sizes: bytes of all pools together, initially and at most.
        least: the most records of one request; no pool is smaller.
        buffer_bytes: bytes of the largest array that the device allows; None: no limit.
        copied: whether records are copied into device memory; None: only on CUDA.

    Attributes:
        of: the pool of each layer.
    """

    def __init__(
        self, layout: ExpertLayout, sizes: tuple[int, int], least: int, buffer_bytes: int | None, copied: bool | None
    ):
        self._classes, self._least = size_classes(layout), least
        self._parts = _parts(self._classes, sizes, least, buffer_bytes, copied)
        super().__init__(chain.from_iterable(self._parts))
        self._groups = [
            group.tolist()
            for one, part in zip(self._classes, self._parts, strict=True)
            for group in np.array_split(np.array(one.layers), len(part))
        ]
        self.of = {layer: pool for pool, group in zip(self, self._groups, strict=True) for layer in group}
        self._divided: tuple[int, list[int]] = (-1, [])  # the last argument of `shares`, and its result
        self._records = {layer: len(group) * layout.num_experts for group in self._groups for layer in group}

    @property
    def slots(self) -> int:
        return sum(pool.slots for pool in self)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.slots * pool.nbytes for pool in self)

    @property
    def copied_bytes(self) -> int:
        """Bytes of records that are MLX arrays."""
        return sum(len(pool) * pool.nbytes for pool in self if pool.copied)

    @property
    def held_bytes(self) -> int:
        """Bytes of the records that are in memory or being read."""
        return sum(len(pool) * pool.nbytes for pool in self)

    def shares(self, nbytes: int) -> list[int]:
        """Slots of each pool if all pools together have `nbytes`; pools of one class get equal numbers."""
        if self._divided[0] == nbytes:  # called at every request of experts
            return self._divided[1]
        shares: list[int] = []
        for part, slots in zip(self._parts, divide(self._classes, nbytes, self._least), strict=True):
            shares += [min(max(slots // len(part), min(self._least, pool.most)), pool.most) for pool in part]
        self._divided = nbytes, shares
        return shares

    def is_due(self, nbytes: int, may_grow: bool = True) -> bool:
        """Whether the pools should be resized if they may have `nbytes`."""
        return any(
            _is_due(pool, share) and (may_grow or share < pool.slots)
            for pool, share in zip(self, self.shares(nbytes), strict=True)
        )

    def in_flight(self) -> list[Key]:
        return [key for pool in self for key in pool.in_flight()]

    def holds(self, layer: int) -> bool:
        """Whether every expert of the layer's pool is in memory or being read."""
        return len(self.of[layer]) == self._records[layer]

    def slots_per_layer(self, spare: int) -> int:
        """Slots per layer, without `spare` slots, in the pool that has the fewest per layer."""
        return min((max(pool.slots - spare, 0) // len(self._groups[i]) for i, pool in enumerate(self)), default=0)

    def intend(self, layer: int, ids: Sequence[int]) -> None:
        """As `ExpertLoader.intend`."""
        for pool in self:
            pool.intended = set()
        if self:
            self.of[layer].intended = {(layer, expert) for expert in ids}

    def give_way(self, layer: int, ids: Sequence[int]) -> None:
        """As `ExpertLoader.give_way`."""
        for expert in ids if self else ():
            self.of[layer].intended.discard((layer, expert))
            self.of[layer].demote((layer, expert))


def _is_due(pool: SlotPool, share: int) -> bool:
    """Whether a pool should be resized if it may have `share` slots."""
    grown = share - pool.slots
    if not pool.breathes:
        return -grown * WORTH_REPLACING >= pool.slots or grown > 0 and share == pool.most
    return grown < 0 or grown >= max(pool.slots / WORTH_GROWING, 1) or grown > 0 and share == pool.most


def _parts(
    classes: Sequence[SizeClass], sizes: tuple[int, int], least: int, buffer_bytes: int | None, copied: bool | None
) -> list[list[SlotPool]]:
    """The pools of each class."""
    if copied is None:
        copied = backend.name() == "cuda"
    start, most = (divide(classes, size, least) for size in sizes)
    if not can_breathe(copied):
        most = start
    return [
        _pools_of(one, slots, max(slots, limit), min(least, one.records), buffer_bytes, copied)
        for one, slots, limit in zip(classes, start, most, strict=True)
    ]


def _pools_of(
    one: SizeClass, slots: int, most: int, least: int, buffer_bytes: int | None, copied: bool
) -> list[SlotPool]:
    at_most = one.records if buffer_bytes is None else max(buffer_bytes // one.nbytes, 1)
    count = min(-(-most // at_most), max(slots // least, 1), len(one.layers))
    staging = 2 * least if copied else None
    return [SlotPool(one.nbytes, slots // count, staging, most // count) for _ in range(count)]
