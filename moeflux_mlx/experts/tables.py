"""Reads rows of n-gram tables from files, a few bytes each, on its own threads, and keeps the newest rows in memory.

Reads go through the page cache, one row each: a table is far larger than memory, and a hash chooses its rows, so
neighbouring rows are useless.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from ..errors import ExpertIOError
from ..formats.tables import RowForm, TableFiles
from ..ops.forms import DTYPES, unpacked_float32
from .files import Stamps, open_file
from .source import CLOSED

KEPT_BYTES = 16 << 20  # bytes of rows kept for each table
THREADS = 16  # reads at once: a token's rows
ROWS_EACH = 64  # rows of a prompt that a thread reads in sequence before it looks at the clock
SLOW = 20e-6  # seconds of a read that takes longer than one from the page cache
FEW = 1024  # requests of more rows belong to a prompt, and their rows are not kept

RowParts = tuple[list[int], list[int], int]  # of a part of some rows: files by number, offsets in them, bytes of each

Chunk = tuple[Sequence[int], list[RowParts]]  # some rows, and their parts


class FileTable:
    """The rows of one table.

    Args:
        files: the files that hold the rows.
        kept_bytes: bytes of rows to keep in memory; the least recently used rows are dropped first.

    Attributes:
        token_map: as of `files`.
        bytes_read: what has been read from files so far.
        kept: the rows in memory as bytes, the most recently used one last.

    Raises:
        ExpertIOError: a file cannot be opened.
    """

    def __init__(self, files: TableFiles, kept_bytes: int = KEPT_BYTES):
        self.token_map = files.token_map
        self.files, self._most = files, kept_bytes // files.form.row_bytes
        self.kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes_read = 0
        self._paths, self._descriptors, self._stamps = files.paths, list[int](), Stamps()
        try:
            for path in self._paths:
                self._descriptors.append(open_file(path, direct=False))
                self._stamps.add(path, os.fstat(self._descriptors[-1]))
        except OSError as error:
            self.close()
            raise ExpertIOError(f"{error.filename} cannot be opened: {error.strerror}") from None
        self._threads: ThreadPoolExecutor | None = ThreadPoolExecutor(THREADS, "table rows")

    def close(self) -> None:
        """Waits for the reads in progress and closes the files."""
        threads, self._threads = getattr(self, "_threads", None), None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def begin(self, numbers: np.ndarray) -> "PendingRows":
        """Begins to read the rows int64 [B, L, heads], each once, in file order.

        Raises:
            ExpertIOError: the model is closed, or a file has changed.
        """
        if self._threads is None:
            raise ExpertIOError(CLOSED)
        self._stamps.look(dict(zip(self._paths, self._descriptors, strict=True)))
        rows, places = np.unique(numbers, return_inverse=True)
        target = np.empty((len(rows), self.files.form.row_bytes), np.uint8)
        missing = self._filled(rows, target)
        memory = target.reshape(-1).data
        parts = [
            (files.tolist(), offsets.tolist(), nbytes) for files, offsets, nbytes in self.files.places(rows[missing])
        ]
        count, few = (1, THREADS) if numbers.size <= FEW else (ROWS_EACH, 1)
        chunks = []
        for at in reversed(range(0, len(missing), count)):
            some = slice(at, at + count)
            chunks.append((missing[some], [(files[some], offsets[some], nbytes) for files, offsets, nbytes in parts]))
        reads: list[Future[None]] = []
        for _ in range(min(few, len(chunks))):
            reads.append(self._threads.submit(self._work, memory, chunks, reads))
        if numbers.size > FEW:
            missing = []
        return PendingRows(self, rows, target, reads, missing, places.reshape(numbers.shape))

    def _filled(self, rows: np.ndarray, target: np.ndarray) -> Sequence[int]:
        """Copies the rows that are in memory; returns the places of the others."""
        if len(rows) > FEW:
            return range(len(rows))
        missing = []
        with self._lock:
            for place, row in enumerate(rows.tolist()):
                data = self.kept.get(row)
                if data is None:
                    missing.append(place)
                    continue
                self.kept.move_to_end(row)
                target[place] = np.frombuffer(data, np.uint8)
        return missing

    def keep(self, rows: np.ndarray, target: np.ndarray, places: Sequence[int]) -> None:
        """Keeps some of the rows that have been read."""
        with self._lock:
            for place in places:
                self.kept[int(rows[place])] = target[place].tobytes()
            while len(self.kept) > self._most:
                self.kept.popitem(last=False)

    def _work(self, target: memoryview, chunks: list[Chunk], reads: "list[Future[None]]") -> None:
        """The work of one thread: takes chunks from the end until none is left. If they have to be fetched from the
        drive, another thread helps, and is appended to `reads`; if they are in the page cache, more threads would only
        wait for each other. Raises ExpertIOError.
        """
        while chunks:
            if self._threads is None:
                raise ExpertIOError(CLOSED)
            try:
                rows, parts = chunks.pop()
            except IndexError:  # another thread was faster
                return
            begin = time.perf_counter()
            self._read(target, rows, parts)
            is_slow = time.perf_counter() - begin > SLOW * len(rows)
            threads = self._threads
            if is_slow and chunks and len(reads) < THREADS and threads is not None:
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    reads.append(threads.submit(self._work, target, chunks, reads))

    def _read(self, target: memoryview, rows: Sequence[int], parts: Sequence[RowParts]) -> None:
        """Reads some rows of `target`. Raises ExpertIOError."""
        row_bytes, at = self.files.form.row_bytes, 0
        for files, offsets, nbytes in parts:
            for row, file, offset in zip(rows, files, offsets, strict=True):
                start = row * row_bytes + at
                try:
                    got = os.preadv(self._descriptors[file], [target[start : start + nbytes]], offset)
                except OSError as error:
                    raise ExpertIOError(f"{self._paths[file]} cannot be read: {error.strerror}") from None
                if got != nbytes:
                    end, path = offset + nbytes, self._paths[file]
                    raise ExpertIOError(f"{path} ends at byte {offset + got}; a table's row ends at {end}")
            at += nbytes
        with self._lock:
            self.bytes_read += len(rows) * row_bytes


class PendingRows:
    """Rows that are being read; `take` waits for them."""

    def __init__(
        self,
        reader: FileTable,
        rows: np.ndarray,
        target: np.ndarray,
        reads: list["Future[None]"],
        missing: Sequence[int],
        places: np.ndarray,
    ):
        self._reader, self._rows, self._target = reader, rows, target
        self._reads, self._missing, self._places = reads, missing, places

    @property
    def nbytes(self) -> int:
        return self._target.nbytes + self._places.nbytes

    def take(self, start: int, end: int) -> mx.array:
        """The rows of tokens [start, end) as [B, end - start, heads * width].

        Raises:
            ExpertIOError: a row cannot be read.
        """
        self._wait()
        B, heads = self._places.shape[0], self._places.shape[2]
        files, rows = self._reader.files, self._target[self._places[:, start:end].reshape(-1)]
        values = unpacked_rows(rows, files.form) if files.values is None else mx.array(files.values(rows))
        return values.reshape(B, end - start, heads * values.shape[-1])

    def _wait(self) -> None:
        for read in self._reads:  # a read may append another
            try:
                read.result()
            except CancelledError:
                raise ExpertIOError(CLOSED) from None
        self._reads = []
        if self._missing:
            self._reader.keep(self._rows, self._target, self._missing)
            self._missing = []


def unpacked_rows(rows: np.ndarray, form: RowForm) -> mx.array:
    """The values [n, width] of rows uint8 [n, bytes]."""
    ends = np.cumsum(form.part_bytes)[:-1]
    parts = [
        mx.array(np.ascontiguousarray(part)).view(DTYPES[dtype])
        for part, (_, dtype) in zip(np.split(rows, ends, axis=1), form.parts, strict=True)
    ]
    return parts[0] if form.quant is None else unpacked_float32(form.quant, *parts)


def open_readers(tables: Mapping[int, TableFiles]) -> dict[int, FileTable]:
    """The readers by layer. Raises ExpertIOError: a file cannot be opened."""
    readers: dict[int, FileTable] = {}
    try:
        for layer, files in tables.items():
            readers[layer] = FileTable(files)
    except ExpertIOError:
        for reader in readers.values():
            reader.close()
        raise
    return readers
