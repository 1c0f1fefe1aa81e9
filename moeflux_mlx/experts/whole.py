"""Experts whose layers are each one array while the model is loaded, so that a request reads nothing: the base of such
sources, and three of them.

`HeldExperts` are records that are already in memory. `ResidentExperts` are files that are read once, at loading, for
files that cannot be mapped, because experts are stored in pieces, and for callers that want the files closed.
`MappedExperts` are files that the system pages in: adopted by Metal, copied by CUDA, read in place by the CPU.
"""

import contextlib
import itertools
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.packed import ExpertFiles, PackedExperts, runs_of
from ..formats.record import ExpertLayout
from ..ops import backend
from ..ops.records import Records
from .files import OpenFiles, Preadv, ReadShare, Stamps
from .memory import adopt, on_device, page_aligned
from .reader import DEFAULT_WORKERS, shares_of
from .source import CLOSED, ExpertLoader, IoMode, Key, Lease, Passage, asked_for


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
        if records is None:  # another thread has closed it; a thread that only builds graphs could not ask for experts
            raise ExpertIOError(CLOSED)
        return records if records.lasting else None

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


PORTION_BYTES = 32 << 20  # bytes of a portion of a layer; while one portion is read, the next ones are prepared
TOUCHED_BYTES = 16 << 20  # bytes of fresh memory that a thread clears at a time
BATCH_BYTES = 4 << 20  # bytes for a thread that makes several reads at once

ReadProgress = Callable[[int, int], object]
WordsCheck = Callable[[int, int, np.ndarray], None]
T = TypeVar("T")


class Portion(NamedTuple):
    """Experts [first, stop) of a layer, and the whole layer's memory [experts, words]."""

    layer: int
    rows: np.ndarray
    first: int
    stop: int

    @property
    def records(self) -> np.ndarray:
        """[stop - first, words]"""
        return self.rows[self.first : self.stop]

    @property
    def is_last(self) -> bool:
        """Whether this is the layer's last portion."""
        return self.stop == len(self.rows)


Portions = Generator[Portion, None, None]


class ResidentExperts(WholeExperts):
    """Args:
        files: the files of the experts; they are closed when everything has been read.
        decision: one line that says why all experts are kept in memory.
        check: called with records (layer, first expert, [experts, words]) after they have been read.
        arrange: called likewise before `check`, to bring what was read to its form.
        progress: called with the bytes read so far and the total.
        direct, preadv: as for `OpenFiles`.

    Raises:
        ExpertIOError: a file cannot be read, or Metal refuses the memory. Errors of `check`.
    """

    mode = IoMode.RESIDENT

    def __init__(
        self,
        files: ExpertFiles,
        decision: str = "",
        *,
        check: WordsCheck | None = None,
        arrange: WordsCheck | None = None,
        progress: ReadProgress | None = None,
        direct: bool = True,
        preadv: Preadv = os.preadv,
    ):
        super().__init__(files.layout, decision)
        report = progress or (lambda done, total: None)
        with (
            closing(OpenFiles(files.sizes, direct=direct, preadv=preadv)) as opened,
            closing(_read(files, opened, report)) as portions,
        ):
            for portion in portions:
                for use in (arrange, check):
                    if use is not None:
                        use(portion.layer, portion.first, portion.records)
                if portion.is_last:
                    self.add(portion.layer, kept(portion.rows))
            self.note = opened.note


def kept(rows: np.ndarray) -> np.ndarray | mx.array:
    """The layer as kernels read it: the memory itself, or a copy on a device with its own memory."""
    if not backend.has_kernels():
        return rows
    return adopt(rows, "a layer of experts") if backend.name() == "metal" else on_device(rows)


def _read(files: ExpertFiles, opened: OpenFiles, progress: ReadProgress) -> Portions:
    """Yields all layers in filled portions; up to a layer of the following ones is being read meanwhile."""
    done, total = 0, sum(record.size * files.layout.count(layer) for layer, record in files.layout.records.items())
    pool, is_over = ThreadPoolExecutor(DEFAULT_WORKERS, "expert-loader"), False

    def begin(portion: Portion) -> tuple[Portion, list[Future[int]]]:
        target = portion.rows.reshape(-1).view(np.uint8).data
        return portion, [pool.submit(opened.read_all, share, target) for share in _shares(files, opened, portion)]

    portions = _portions(files)
    try:
        for portion, reads in begun_ahead(map(begin, portions), _portions_of_a_layer(files)):
            for read in reads:
                done += _came(read, portion.layer)
                progress(min(done, total), total)
            yield portion
        is_over = True
    finally:
        portions.close()
        # A thread that ends releases its queue, which takes 30 ms; wait for it only if it may still read.
        pool.shutdown(wait=not is_over, cancel_futures=True)


def begun_ahead(every: Iterable[T], count: int) -> Iterator[T]:
    """Yields the same items, but each one only after the `count` items behind it have begun."""
    begun: deque[T] = deque()
    for item in every:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _came(read: "Future[int]", layer: int) -> int:
    """The bytes of a finished read."""
    try:
        return read.result()
    except OSError as error:
        raise ExpertIOError(f"reading the experts of layer {layer} failed: {error}") from error


def _portions_of_a_layer(files: ExpertFiles) -> int:
    """The number of portions, the same for each layer."""
    layout = files.layout
    wanted = max(-(-layout.count(i) // max(PORTION_BYTES // one.stride, 1)) for i, one in layout.records.items())
    return min(wanted, *map(layout.count, layout.records))


def _portions(files: ExpertFiles) -> Portions:
    """Yields portions in cleared memory; if they are copied to a device, two layers' memory is used in turns."""
    layout, number = files.layout, _portions_of_a_layer(files)
    largest = layout.largest_layer // 4
    places = [page_aligned(1, largest).reshape(-1) for _ in range(2)] if backend.name() == "cuda" else []

    def every() -> Portions:
        for i, (layer, record) in enumerate(layout.records.items()):
            count, words = layout.count(layer), record.stride // 4
            room = page_aligned(count, words) if not places else places[i % 2][: count * words].reshape(count, words)
            cuts = [part * count // number for part in range(number + 1)]
            yield from (Portion(layer, room, first, stop) for first, stop in itertools.pairwise(cuts))

    return every() if places else touched(every())


def touched(every: Iterable[Portion]) -> Portions:
    """Yields memory whose pages several threads have touched, so that the system has cleared them; the next piece is
    prepared meanwhile.

    Reading threads would touch the pages as they go, but when two of them reach the same large page at once, both clear
    one (results.tsv, "load"). The first piece is left to them, because nothing could be read meanwhile.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, DEFAULT_WORKERS), "expert-memory") as pool:

        def begin(at: int, portion: Portion) -> tuple[Portion, list[Future[None]]]:
            memory = portion.records.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
            step = TOUCHED_BYTES // mmap.PAGESIZE
            parts = [memory[i : i + step] for i in range(0, len(memory) if at else 0, step)]
            return portion, [pool.submit(part.fill, 0) for part in parts]

        for portion, touches in begun_ahead(itertools.starmap(begin, enumerate(every)), 1):
            wait(touches)
            yield portion


def _shares(files: ExpertFiles, opened: OpenFiles, portion: Portion) -> list[ReadShare]:
    """The reads of a portion in file order, divided among threads."""
    stride, experts = portion.rows.strides[0], range(portion.first, portion.stop)
    pieces = [piece.moved(expert * stride) for expert in experts for piece in files.pieces(portion.layer, expert)]
    runs = runs_of(pieces, portion.stop * stride, opened.run_bytes)
    return [opened.share(some) for some in (shares_of(runs, BATCH_BYTES) if opened.reads_at_once else zip(runs))]


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
