"""Experts in mapped files, which the system pages in: adopted by Metal, copied by CUDA, read in place by the CPU."""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.packed import PackedExperts
from ..ops import backend
from ..ops.experts import Records
from .memory import adopt, on_device
from .source import CLOSED, ExpertLoader, IoMode, Key, Lease, asked_for

LOOK_EVERY = 0.1  # seconds between looks at the files that a GPU has adopted: a look costs as much as 60 launches


class MappedExperts(ExpertLoader):
    """Args:
        packed: the opened files.
        decision: why they are mapped.

    Raises:
        ExpertIOError: a file cannot be opened or mapped.
    """

    mode = IoMode.MMAP

    def __init__(self, packed: PackedExperts, decision: str = ""):
        super().__init__(packed.layout, decision)
        self._files: dict[int, mmap.mmap] = {}
        self._layers: dict[int, np.ndarray | mx.array] = {}
        self._looked = 0.0
        for layer, path in packed.paths.items():
            self._layers[layer], mapped = _map(path, self.layout.num_experts, self.layout.layer_bytes(layer))
            if mapped is not None:
                self._files[layer] = mapped

    @contextlib.contextmanager
    def turn(self, tokens: int) -> Iterator[bool]:
        self.check_process()
        self._check_open()
        self._look_at_files()
        yield False

    def _look_at_files(self) -> None:
        """Where layers are asked for one by one, each is looked at then; a GPU's compiled step asks for none."""
        now = time.monotonic()
        if self._files and now - self._looked > LOOK_EVERY and self.is_resident:
            self._looked = now
            for layer in self._files:
                self._check_length(layer)

    def _check_length(self, layer: int) -> None:
        """Memory behind the end of a mapped file cannot be read: the process would be killed."""
        file = self._files.get(layer)  # another thread may have closed them
        if file is not None and file.size() < self.layout.layer_bytes(layer):
            raise ExpertIOError(
                f"the file of layer {layer} has {file.size()} of {self.layout.layer_bytes(layer)} bytes: "
                "it was cut short while in use; restore it and load the model again"
            )

    def whole(self, layer: int) -> Records | None:
        blob = self._layers.get(layer)
        return Records(blob, self.layout.records[layer], lasting=True) if isinstance(blob, mx.array) else None

    def request(self, layer: int, ids: np.ndarray) -> Lease:
        self._check_open()
        self._check_length(layer)
        keys, inverse = asked_for(layer, ids)
        self._note_asked(keys, np.ones(len(keys), bool))
        return Lease(self, keys, inverse, np.ones(ids.shape, bool))

    def finish(self, keys: list[Key]) -> list[ExpertIOError]:
        return [ExpertIOError(CLOSED)] if self._closed else []

    def locate(self, keys: list[Key]) -> tuple[Records, np.ndarray]:
        self._check_open()
        layer = keys[0][0]
        blob = self._layers.get(layer)
        if blob is None:  # closed this moment, by another thread
            raise ExpertIOError(CLOSED)
        records = Records(blob, self.layout.records[layer], lasting=isinstance(blob, mx.array))
        return records, np.array([expert for _, expert in keys], np.int32)

    def unpin(self, keys: list[Key], out: mx.array | None) -> None:
        """Nothing of it is ever overwritten."""

    def _let_go(self) -> None:
        self._layers, self._files = {}, {}


def _map(path: Path, experts: int, size: int) -> tuple[np.ndarray | mx.array, mmap.mmap | None]:
    """The file as [experts, words], and the mapping behind it, if it is not a copy."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise ExpertIOError(f"{path} has no longer the {size} bytes that the layout needs")
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        raise error if isinstance(error, ExpertIOError) else ExpertIOError(f"cannot map {path}: {error}") from error
    rows = np.frombuffer(mapped, np.uint32).reshape(experts, -1)
    if not backend.has_kernels():
        return rows, mapped
    return (adopt(rows, f"{path} in place"), mapped) if backend.name() == "metal" else (on_device(rows), None)
