"""The pools of one model: which pool serves which layer, and how bytes are divided among the pools. It does not know
how records are read.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..formats.record import ExpertLayout, Key
from ..ops import backend
from .memory import GIVES_BACK, adopted_pages
from .places import Adopt
from .pool import SlotPool
from .ranking import MEAN_LIFE
from .shares import SizeClass, divide, size_classes


class Pools(list[SlotPool]):
    """One pool per size class; none after they are cleared.

    Args:
        layout: the layout of the experts.
        sizes: bytes of all pools together, initially and at most.
        least: the most records of one request; no pool is smaller.
        buffer_bytes: bytes of the largest array that the device allows; None: no limit.
        copied: whether records are copied into device memory; None: only on CUDA, unless `adopt` is given.
        adopt: how MLX adopts memory (`places.Adopt`); None: as pages on Metal, else not at all.
        host: bytes of the records that stay in host memory after they were copied, at most.

    Attributes:
        layout: as given.
        of: the pool of each layer.
        classes: the size class of each pool.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        sizes: tuple[int, int],
        least: int,
        buffer_bytes: int | None,
        copied: bool | None,
        adopt: Adopt | None = None,
        host: int = 0,
    ):
        self.layout, self.classes, self._least = layout, size_classes(layout), least
        start, most = (divide(self.classes, size, least) for size in sizes)
        given = zip(self.classes, start, most, self.host_shares(host), strict=True)
        super().__init__(_pool_of(*each, least, buffer_bytes, copied, adopt) for each in given)
        self.of = {layer: pool for pool, one in zip(self, self.classes, strict=True) for layer in one.layers}
        self._divided: tuple[int, list[int]] = (-1, [])  # the last argument of `shares`, and its result
        self._records = {layer: one.records for one in self.classes for layer in one.layers}

    @property
    def slots(self) -> int:
        return sum(pool.slots for pool in self)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.slots * pool.nbytes for pool in self)

    @property
    def device_bytes(self) -> int:
        """Bytes of MLX's arrays."""
        return sum(pool.device_bytes for pool in self)

    @property
    def held_bytes(self) -> int:
        """Bytes that the records take from the machine; of adopted memory, with all places."""
        return sum(pool.held_bytes for pool in self)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for records that stay there, and for staging beside them."""
        return sum(pool.host_bytes for pool in self)

    def take_memory(self) -> None:
        """As `ExpertLoader.take_memory`."""
        for pool in self:
            if not pool.copied:
                pool.places.take_all()
                pool.slots = pool.fit(pool.slots)  # fewer if the device refused a buffer

    def queued(self, outputs: Sequence[mx.array]) -> None:
        """As `ExpertLoader.queued`."""
        for pool in self:
            if pool.staging is not None:
                pool.staging.host.readers = outputs
            else:
                pool.places.queued(outputs)

    def host_shares(self, nbytes: int) -> list[int]:
        """Records of each pool that stay in host memory if all together may take `nbytes`."""
        return divide(self.classes, nbytes, 0)

    def shares(self, nbytes: int) -> list[int]:
        """Slots of each pool if all pools together have `nbytes`."""
        if self._divided[0] == nbytes:  # called at every request of experts
            return self._divided[1]
        slots = divide(self.classes, nbytes, self._least)
        shares = [min(share, pool.most) for share, pool in zip(slots, self, strict=True)]
        self._divided = nbytes, shares
        return shares

    def is_due(self, nbytes: int, may_grow: bool = True) -> bool:
        """Whether the pools should be resized if they may have `nbytes`."""
        return any(pool.is_due(share, may_grow) for pool, share in zip(self, self.shares(nbytes), strict=True))

    def in_flight(self) -> list[Key]:
        return [key for pool in self for key in pool.in_flight()]

    def holds(self, layer: int) -> bool:
        """Whether every expert of the layer's pool is in memory or being read."""
        return len(self.of[layer]) == self._records[layer]

    def slots_per_layer(self, spare: int, layer: int | None) -> int:
        """As `ExpertLoader.slots_per_layer`."""
        pools = zip(self, self.classes, strict=False)  # none after they are cleared
        wanted = {*self.layout.moe_layers} if layer is None else {layer}
        serving = ((pool, one) for pool, one in pools if wanted.intersection(one.layers))
        return min((max(pool.slots - spare, 0) // len(one.layers) for pool, one in serving), default=0)

    def foretell(self, keys: Sequence[Key]) -> None:
        """Names the records that will probably be requested next, in place of earlier ones."""
        for pool in self:
            pool.foretold = {key for key in keys if self.of[key[0]] is pool}

    def pass_time(self, steps: float) -> None:
        """Lets the uses so far count less, by as much as `steps` steps take."""
        for pool in self:
            pool.ranking.pass_time(steps)

    def note_prompt(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        """As `ExpertLoader.note_prompt`."""
        ranking, uses = self.of[layer].ranking, counts * (min(tokens, MEAN_LIFE) / tokens)
        for expert in np.flatnonzero(counts).tolist():
            ranking.use((layer, expert), float(uses[expert]))

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


def _pool_of(
    one: SizeClass,
    slots: int,
    most: int,
    host: int,
    least: int,
    buffer_bytes: int | None,
    copied: bool | None,
    adopt: Adopt | None,
) -> SlotPool:
    if copied is None:
        copied = adopt is None and backend.name() == "cuda"
    if adopt is None and backend.name() == "metal":
        adopt = adopted_pages
    most = max(slots, most) if copied or adopt or GIVES_BACK else slots
    least = min(least, one.records)
    return SlotPool(
        one.nbytes,
        slots,
        2 * least if copied else None,
        most,
        least=least,
        largest=buffer_bytes,
        adopt=adopt,
        step=len(one.layers),
        host=host if copied else 0,
    )
