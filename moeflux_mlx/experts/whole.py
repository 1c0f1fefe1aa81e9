"""Experts whose layers are each one array while the model is loaded, so that a request reads nothing. Subclasses
provide the arrays.
"""

import contextlib
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.record import ExpertLayout
from ..ops.records import Records
from .source import CLOSED, ExpertLoader, Key, Lease, Passage, asked_for


class WholeExperts(ExpertLoader):
    """Layers [experts, words], as MLX arrays if a GPU computes. A subclass adds them."""

    def __init__(self, layout: ExpertLayout, decision: str):
        super().__init__(layout, decision)
        self.layers: dict[int, Records] = {}

    def add(self, layer: int, memory: np.ndarray | mx.array) -> None:
        """Adds the records of a layer."""
        self.layers[layer] = Records(memory, self.layout.records[layer], lasting=isinstance(memory, mx.array))

    @contextlib.contextmanager
    def turn(self, tokens: int, passage: Passage | None = None) -> Iterator[bool]:
        self.check_process()
        self._check_open()
        yield False

    def whole(self, layer: int) -> Records | None:
        records = self.layers.get(layer)
        return records if records is not None and records.lasting else None

    def without_lease(self, layer: int, ids: np.ndarray) -> Records | None:
        self._check_open()
        records = self.layers.get(layer)
        if records is None or records.lasting:
            return None
        if self.observer is not None:
            keys = asked_for(layer, ids)[0]
            self.observer.requested(layer, ids, keys, [True] * len(keys))
        return records

    def request(self, layer: int, ids: np.ndarray) -> Lease:
        self._check_open()
        keys, inverse = asked_for(layer, ids)
        there = [True] * len(keys)
        if self.observer is not None:
            self.observer.requested(layer, ids, keys, there)
        return Lease(self, keys, inverse, there)

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        return [ExpertIOError(CLOSED)] if self._closed else []

    def locate(self, keys: list[Key]) -> tuple[Records, np.ndarray]:
        self._check_open()
        records = self.layers.get(keys[0][0])
        if records is None:  # another thread has just closed it
            raise ExpertIOError(CLOSED)
        return records, np.array([expert for _, expert in keys], np.int32)

    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        """Does nothing, because no record is ever overwritten."""

    def _let_go(self) -> None:
        self.layers = {}
