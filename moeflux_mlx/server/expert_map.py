"""What the page shows of the experts: where each is, what was requested, and for whom. It observes a loader, and only
while a page is open.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..experts.source import ExpertLoader
from ..formats.record import Key

HIT, MISSED = 3, 4  # beside the loader's ON_DISK, IN_MEMORY and ARRIVING


class ExpertMap:
    """A `RequestObserver` of `experts` from now until `end`; everything is called by the thread that runs the model.

    Args:
        asking: gives numbers from 1 to 255 of the texts whose rows are computed, in order, or of the only text.
    """

    def __init__(self, experts: ExpertLoader, asking: Callable[[], Sequence[int]] = tuple):
        self._experts, self._asking = experts, asking
        self._asked: dict[Key, int] = {}  # since the last `states`
        self._askers: dict[Key, int] = {}  # the last asker of each expert
        experts.observer = self

    def end(self) -> None:
        """The loader tells nobody any more."""
        self._experts.observer = None

    def requested(self, layer: int, ids: np.ndarray, keys: Sequence[Key], ready: Sequence[bool]) -> None:
        self._asked.update((key, HIT if there else MISSED) for key, there in zip(keys, ready, strict=True))
        asking = self._asking()
        if len(asking) == 1:
            self._askers.update(dict.fromkeys(keys, asking[0]))
        elif ids.ndim == 2 and len(ids) == len(asking):
            rows = zip(asking, ids.tolist(), strict=True)
            self._askers.update(((layer, expert), asker) for asker, row in rows for expert in row)

    def states(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: ON_DISK, IN_MEMORY, ARRIVING, or, if it was requested since the
        last call, HIT or MISSED.
        """
        states = self._by_place([*self._experts.places(), *self._asked.items()])
        self._asked = {}
        return states

    def last_askers(self) -> np.ndarray:
        """uint8 [layers that have experts, experts]: which text requested an expert last; 0: none."""
        return self._by_place(self._askers.items())

    def _by_place(self, values: Iterable[tuple[Key, int]]) -> np.ndarray:
        """uint8 [layers with routed experts, experts] with these values, and 0 elsewhere, without value experts."""
        layout = self._experts.layout
        rows = {layer: row for row, layer in enumerate(layout.moe_layers)}
        filled = np.zeros((len(rows), layout.num_experts), np.uint8)
        for (layer, expert), value in values:
            if layer in rows:
                filled[rows[layer], expert] = value
        return filled
