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
from ..ops.records import Records
from .memory import adopt, on_device
from .source import IoMode, Lease, Passage
from .stamps import Stamps
from .whole import WholeExperts

CHECK_EVERY = 0.1  # seconds between checks of files that a GPU has adopted; a check takes as long as 60 launches


class MappedExperts(WholeExperts):
    """Args:
        packed: the opened files.
        decision: one line that says why they are mapped.

    Raises:
        ExpertIOError: a file cannot be opened or mapped.
    """

    mode = IoMode.MMAP

    def __init__(self, packed: PackedExperts, decision: str = ""):
        super().__init__(packed.layout, decision)
        self._files: dict[int, mmap.mmap] = {}
        self._stamps, self._paths = Stamps(), dict[Path, Path]()
        self.checked_at = 0.0  # time of the last check of the files' lengths
        for layer, path in packed.paths.items():
            memory, mapped = map_file(path, self.layout.count(layer), self.layout.layer_bytes(layer))
            self.add(layer, memory)
            if mapped is not None:
                self._files[layer], self._paths[path] = mapped, path
                self._stamps.add(path, path.stat())

    @contextlib.contextmanager
    def turn(self, tokens: int, passage: Passage | None = None) -> Iterator[bool]:
        with super().turn(tokens) as shared:
            self._stamps.look(self._paths)
            self._check_files()
            yield shared

    def _check_files(self) -> None:
        """Checks all files at intervals, because a GPU's compiled step requests no layer. Where layers are requested
        one by one, each is checked at its request.
        """
        now = time.monotonic()
        if self._files and now - self.checked_at > CHECK_EVERY and self.is_resident:
            self.checked_at = now
            for layer in self._files:
                self._check_length(layer)

    def _check_length(self, layer: int) -> None:
        """Raises an error if the file has become shorter: reading past its end would kill the process."""
        file = self._files.get(layer)  # another thread may have closed the files
        if file is not None and file.size() < self.layout.layer_bytes(layer):
            raise ExpertIOError(
                f"the file of layer {layer} has {file.size()} of {self.layout.layer_bytes(layer)} bytes: "
                "it was cut short while in use; restore it and load the model again"
            )

    def without_lease(self, layer: int, ids: np.ndarray) -> Records | None:
        self._check_length(layer)
        return super().without_lease(layer, ids)

    def request(self, layer: int, ids: np.ndarray) -> Lease:
        self._check_open()
        self._check_length(layer)
        return super().request(layer, ids)

    def _let_go(self) -> None:
        super()._let_go()
        self._files = {}


def map_file(path: Path, experts: int, size: int) -> tuple[np.ndarray | mx.array, mmap.mmap | None]:
    """Returns the file as [experts, words], and its mapping unless it is a copy."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise ExpertIOError(f"{path} no longer has the {size} bytes that the layout needs")
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        raise error if isinstance(error, ExpertIOError) else ExpertIOError(f"cannot map {path}: {error}") from error
    rows = np.frombuffer(mapped, np.uint32).reshape(experts, -1)
    if not backend.has_kernels():
        return rows, mapped
    return (adopt(rows, f"{path} in place"), mapped) if backend.name() == "metal" else (on_device(rows), None)
