"""Fills free memory of the pools with the experts that earlier sessions used most.

It evicts nothing, and the drive makes these reads only while nobody else wants it (`reads.DriveQueue`). It never
changes which bytes are used.
"""

from collections import deque

import numpy as np

from ..errors import ExpertIOError
from ..formats.record import ExpertLayout, Key
from ..ops.tiles import MAX_TOKENS
from .pool_reads import PoolReads
from .ranking import MEAN_LIFE

QUEUED_BYTES = 128 << 20  # bytes of records that are queued at a time: read in 50 ms, while the caller may be busy
MOST_NOTED = 1024  # layers of tokens whose experts are counted together, because each call of numpy takes as long
IN_ORDER_BYTES = 1 << 30  # bytes that are read in the files' order; those used most are in the first such part


class Usage:
    """Counts in how many steps each expert is used. A prompt of a few tokens is a step too.

    Attributes:
        steps: the number of steps.
    """

    def __init__(self, layout: ExpertLayout):
        self._rows = {layer: row for row, layer in enumerate(layout.records)}
        self._counts, self.steps = np.zeros((len(self._rows), layout.most_experts)), 0
        self._noted: list[tuple[int, np.ndarray]] = []  # a row of the counts, and the experts of a token

    @property
    def counts(self) -> np.ndarray:
        """float64 [record sets, the most experts of a set]."""
        self._count()
        return self._counts

    def _count(self) -> None:
        """Counts what was noted."""
        noted, self._noted = self._noted, []
        if noted:
            rows, ids = zip(*noted, strict=True)
            np.add.at(self._counts, (np.repeat(rows, [one.size for one in ids]), np.concatenate(ids)), 1)

    def begin(self, tokens: int) -> None:
        """A call of the model with so many tokens begins."""
        self.steps += tokens <= MAX_TOKENS
        if len(self._noted) > MOST_NOTED:
            self._count()

    def note(self, layer: int, ids: np.ndarray) -> None:
        """Notes the experts that are requested: of a step the rows' [R, K], of a prompt a wave's [N], which is not
        counted.
        """
        if ids.ndim == 2 and len(ids) == 1:
            self._noted.append((self._rows[layer], ids[0]))
        elif ids.ndim == 2:
            self._counts[self._rows[layer], ids.ravel()] += 1  # an expert of several rows counts once


class Warming:
    """Args:
    reads: into the pools.
    layout: of the experts.
    rates: the share of earlier steps that used each expert, [record sets, the most experts of a set].
    """

    def __init__(self, reads: PoolReads, layout: ExpertLayout, rates: np.ndarray):
        order = np.argsort(-rates, axis=None, kind="stable")[: np.count_nonzero(rates > 0)]
        rows, experts = np.unravel_index(order, rates.shape)
        layers = np.array(list(layout.records))[rows]
        self._reads, self._pools = reads, reads.pools
        self._uses = dict(
            zip(zip(layers.tolist(), experts.tolist(), strict=True), rates[rows, experts] * MEAN_LIFE, strict=True)
        )
        record = max(one.size for one in layout.records.values())
        self._part, self._queued = IN_ORDER_BYTES // record + 1, QUEUED_BYTES // record + 1
        self._rest = deque(self._uses)
        self._next: deque[Key] = deque()
        self._begun: list[Key] = []
        self._is_over = False

    @property
    def may_read(self) -> bool:
        """Whether there is something to read and a place for it."""
        return not self._is_over and not all(pool.is_warm for pool in self._pools)

    def stop(self) -> None:
        self._is_over = True

    def feed(self) -> None:
        """Queues further reads, if the pools have room."""
        try:
            if not self._is_over:
                self._is_over = not self._fed()
        except ExpertIOError:  # the device refuses memory, which a request says too
            self.stop()

    def _fed(self) -> bool:
        """Returns whether there is more to read."""
        self._begun = [key for key in self._begun if self._is_arriving(key)]
        while len(self._begun) < self._queued and not all(pool.is_warm for pool in self._pools):
            if not self._next:
                count = min(
                    self._part,
                    len(self._rest),
                    sum(max(pool.slots - pool.reserve - len(pool), 0) for pool in self._pools),
                )
                self._next = deque(sorted(self._rest.popleft() for _ in range(count)))
            if not self._next:
                return False
            key = self._next[0]
            pool = self._pools.of[key[0]]
            if key not in pool and not pool.is_warm:
                if not self._reads.warm(key, self._uses[key]):
                    break
                self._begun.append(key)
            self._next.popleft()
        return True

    def _is_arriving(self, key: Key) -> bool:
        slot = self._pools.of[key[0]].get(key)
        return slot is not None and slot.warming and slot.read is not None
