"""Experts whose records are already in memory and stay there while the model is loaded."""

from collections.abc import Mapping

import numpy as np

from ..formats.record import ExpertLayout
from .resident import kept
from .source import IoMode
from .whole import WholeExperts


class HeldExperts(WholeExperts):
    """Args:
    layout: the layout of the records.
    records: the records of each layer, [experts, words] uint32.
    """

    mode = IoMode.RESIDENT

    def __init__(self, layout: ExpertLayout, records: Mapping[int, np.ndarray]):
        super().__init__(layout, "experts that are in memory")
        for layer, rows in records.items():
            self.add(layer, kept(rows))
