"""What a source of experts has counted: hits, misses, bytes and times."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..formats.record import ExpertLayout


@dataclass
class LoaderStats:
    """Counts since the last `reset_stats`, in experts, bytes and seconds.

    A hit was in memory when it was requested; `prefetch_hits` are hits that a prefetch had brought, `host_hits` hits
    that a GPU read or copied from host memory. `late` are misses whose record was already being read. `drive_requests`
    are requests of which a record had to be read, or had been read ahead for it. `prefetched` were brought ahead,
    `wasted` of these were evicted unused. `warmed` were read into free memory because earlier sessions used them most;
    `warm_hits` of these were used. `bytes_read` came from the drive, `host_bytes` a GPU read or copied from host
    memory. `given_back` is the number of bytes by which the pool shrank because the machine was short of memory.
    `wait_seconds` is how long the computation waited for reads, `busy_seconds` how long the drive was reading.
    """

    hits: int = 0
    misses: int = 0
    prefetch_hits: int = 0
    host_hits: int = 0
    late: int = 0
    drive_requests: int = 0
    prefetched: int = 0
    wasted: int = 0
    warmed: int = 0
    warm_hits: int = 0
    bytes_read: int = 0
    host_bytes: int = 0
    given_back: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    @property
    def gb_per_second(self) -> float:
        """Rate while the drive was reading, in units of 1e9 bytes per second."""
        return self.bytes_read / self.busy_seconds / 1e9 if self.busy_seconds else 0.0

    def since(self, earlier: "LoaderStats") -> "LoaderStats":
        """The counts since `earlier`, an older copy of these counts."""
        before = asdict(earlier)
        return LoaderStats(**{name: value - before[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Asked:
    """Counts of requested experts: how many were in memory, how many were not, and the bytes read for them.

    A record that several rows request is read once; its bytes are divided equally among the rows.
    """

    hits: int = 0
    misses: int = 0
    nbytes: float = 0.0

    def __add__(self, other: "Asked") -> "Asked":
        return Asked(self.hits + other.hits, self.misses + other.misses, self.nbytes + other.nbytes)


class AskedByRow:
    """Which experts each row of a step has requested, and what was read for it.

    Args:
        layout: of the experts.
        blocks: bytes that the drive delivers for a record over its size.

    Attributes:
        layers: the ids [R, K] that the rows requested of each layer, and which of these were in memory; those of a
            layer that they pass several times one after another.
    """

    def __init__(self, layout: ExpertLayout, blocks: float):
        self._layout, self._blocks = layout, blocks
        self.layers: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def note(self, layer: int, ids: np.ndarray, ready: np.ndarray) -> None:
        """Appends to the rows of an earlier part of the step."""
        earlier = self.layers.get(layer)
        if earlier is not None:
            ids, ready = (np.concatenate(both) for both in zip(earlier, (ids, ready), strict=True))
        self.layers[layer] = ids, ready

    def visits(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each time that the rows passed a layer its number, the ids [R, K], and which of these were in memory."""
        rows = min((len(ids) for ids, _ in self.layers.values()), default=0)
        for layer, (ids, ready) in self.layers.items():
            for start in range(0, len(ids), rows):
                yield layer, ids[start : start + rows], ready[start : start + rows]

    def counts(self) -> list[Asked]:
        """As `ExpertLoader.asked_by_row`."""
        alike: dict[int, list[Any]] = {}  # visits of layers by the number of a token's experts
        for visit in self.visits():
            alike.setdefault(visit[1].shape[1], []).append(visit)
        return [sum(rows, Asked()) for rows in zip(*map(self._counts, alike.values()), strict=True)]

    def _counts(self, visits: list[Any]) -> list[Asked]:
        """The same for visits of layers of which a token uses equally many experts."""
        layers, *arrays = zip(*visits, strict=True)
        ids, ready = map(np.stack, arrays)  # [., R, K]
        keys = ids + self._layout.most_experts * np.arange(len(layers))[:, None, None]
        sizes = np.array([self._layout.records[layer].size for layer in layers], float)
        sizes *= self._blocks  # scaled up to whole blocks
        missed, (layer, row, _) = keys[~ready], np.nonzero(~ready)
        nbytes = np.bincount(row, sizes[layer] / np.bincount(missed)[missed], ids.shape[1])
        hits, misses = ready.sum((0, 2)).tolist(), (~ready).sum((0, 2)).tolist()
        return [Asked(*counts) for counts in zip(hits, misses, nbytes.tolist(), strict=True)]
