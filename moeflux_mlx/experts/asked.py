"""Which experts each row of a step has requested, and what was read for it."""

import numpy as np

from ..formats.record import ExpertLayout
from .stats import Asked


class AskedByRow:
    """Args:
    layout: of the experts.
    blocks: bytes that the drive delivers for a record over its size.

    Attributes:
        layers: the ids [R, K] that the rows requested of each layer, and which of these were in memory.
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

    def counts(self) -> list[Asked]:
        """As `ExpertLoader.asked_by_row`."""
        alike: dict[int, list[int]] = {}  # layers by the number of a token's experts
        for layer, (ids, _) in self.layers.items():
            alike.setdefault(ids.shape[1], []).append(layer)
        return [sum(rows, Asked()) for rows in zip(*map(self._counts, alike.values()), strict=True)]

    def _counts(self, layers: list[int]) -> list[Asked]:
        """The same for layers of which a token uses equally many experts."""
        ids, ready = (np.stack(one) for one in zip(*(self.layers[layer] for layer in layers), strict=True))  # [., R, K]
        keys = ids + self._layout.most_experts * np.arange(len(layers))[:, None, None]
        sizes = np.array([self._layout.records[layer].size for layer in layers], float)
        sizes *= self._blocks  # scaled up to whole blocks
        missed, (layer, row, _) = keys[~ready], np.nonzero(~ready)
        nbytes = np.bincount(row, sizes[layer] / np.bincount(missed)[missed], ids.shape[1])
        hits, misses = ready.sum((0, 2)).tolist(), (~ready).sum((0, 2)).tolist()
        return [Asked(*counts) for counts in zip(hits, misses, nbytes.tolist(), strict=True)]
