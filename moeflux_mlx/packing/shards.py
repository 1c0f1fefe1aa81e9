"""Packs a checkpoint shard by shard: when a shard arrives, its tensors are written to their places in all files.

The files grow with holes under their partial names. After a shard's tensors are written, they are synced, read back
from the disk and compared; then the journal records the shard, and it may be deleted. A matrix that needs tensors from
several shards waits until the last of them has arrived, and its shards wait with it: with tensors in the order of their
names, the usual order, these are two neighbours.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from ..errors import ModelFileError
from ..files import sync, sync_folder
from ..formats.packed import FINISHED
from ..formats.page_cache import drop_cached
from .layer_files import LayerFile
from .resident import TensorFile, array_bytes
from .sources import Bytes, Source, Unit
from .supply import Journal, Supply
from .writer import (
    READ_BYTES,
    ByteProgress,
    Output,
    begin_again,
    check_space,
    deletes_source,
    digest_of,
    writing,
)


@dataclass(frozen=True)
class ShardJob:
    """Bytes of one file that are made together from tensors in the shards `needs`."""

    unit: Unit
    needs: frozenset[str]
    writes: Callable[[], Iterator[tuple[int, Bytes]]]


def jobs_of(unit: Unit) -> Iterator[ShardJob]:
    """The jobs that make a file, without zeros."""
    if isinstance(unit, TensorFile):
        return _tensor_jobs(unit)
    assert isinstance(unit, LayerFile), "what is packed already has no shards"
    return _layer_jobs(unit)


def _tensor_jobs(unit: TensorFile) -> Iterator[ShardJob]:
    yield ShardJob(unit, frozenset(), lambda: iter([(0, unit.header)]))
    start = len(unit.header)
    for source in unit.sources:
        needs = frozenset(tensor.file.name for tensor in source.tensors)
        yield ShardJob(unit, needs, partial(_in_a_row, source, start))
        start += sum(one.nbytes for one in source.written)


def _in_a_row(source: Source, start: int) -> Iterator[tuple[int, Bytes]]:
    for array in source.arrays():
        data = array_bytes(array)
        yield start, data
        start += len(data)


def _layer_jobs(unit: LayerFile) -> Iterator[ShardJob]:
    """One for each stored matrix: a stack of all experts, or one of one expert."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    needs: dict[tuple[str, ...], frozenset[str]] = {}
    for expert in range(unit.layout.count(unit.layer)):
        for index, part in enumerate(unit.experts.parts(expert)):
            key = tuple(tensor.name for tensor in part.tensors)
            places.setdefault(key, []).append((expert, index))
            needs[key] = frozenset(tensor.file.name for tensor in part.tensors)
    return (ShardJob(unit, needs[key], partial(_in_records, unit, where)) for key, where in places.items())


def _in_records(unit: LayerFile, where: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Bytes]]:
    """The fields of these projections of these experts, at their places in the file."""
    for expert, index in where:
        for offset, data in unit.fields(expert, index):
            yield expert * unit.geometry.stride + offset, data


class Scattering:
    """A conversion shard by shard.

    Args:
        output: the directory, opened.
        units: its files.
        supply: brings shards.
        progress: called with bytes done, bytes in all, and what is done.

    Attributes:
        kept: files that an earlier run had finished.
        repaired: files that an earlier run had finished and that had other bytes now.
    """

    def __init__(self, output: Output, units: Sequence[Unit], supply: Supply, progress: ByteProgress):
        self.output, self.supply = output, supply
        self.journal = Journal(output)
        self.sizes = {shard.name: shard.size for shard in supply.listing.shards}
        self.kept = [unit.name for unit in units if output.is_finished(unit)]
        self.units = [unit for unit in units if unit.name not in self.kept]
        self.repaired = [
            unit.name for unit in self.units if unit.name in output.files and not output.partial(unit).exists()
        ]
        wanted = self.units if supply.takes_disk else units  # before files are deleted, finished units are compared too
        self._jobs = [job for unit in wanted for job in jobs_of(unit)]
        done = sum(unit.size for unit in units if unit.name in self.kept) + sum(self.journal.done.values())
        total = sum(unit.size for unit in units)
        if supply.takes_disk:  # downloaded bytes count too
            done += sum(self.sizes[name] for name in self.journal.done if name in self.sizes)
            total += sum(self.sizes.values())
        self._advance = Meter(progress, done, total)

    def run(self) -> None:
        """Packs what is missing, and releases every shard that is no longer needed.

        Raises:
            ModelFileError: a shard is not available, the disk is full, or reading back gives other bytes.
        """
        self._begin()
        for name in self.journal.done:
            self.supply.let_go(name)
        waiting = self._waiting()
        self._check_space(waiting)
        self._pack([job for job in waiting if not job.needs], "headers")
        waiting, here = [job for job in waiting if job.needs], self.supply.present()
        for name in self.sizes:
            if not any(name in job.needs for job in waiting):
                continue
            self._bring(name)
            here.add(name)
            ready = [job for job in waiting if name in job.needs and job.needs <= here]
            waiting = [job for job in waiting if name not in job.needs or not job.needs <= here]
            nbytes = self._pack(ready, name)
            self._let_go(ready, waiting, here, nbytes)
        for unit in self.units:
            self._advance.say(f"check {unit.name}")
            self.output.adopt(unit)
        self._advance.by(self._advance.total)  # the zeros between records, which are not written

    def _bring(self, name: str) -> None:
        counted = self.sizes[name] if self.supply.takes_disk else 0
        end = self._advance.done + counted
        if counted:
            self._advance.say(f"download {name}")
        self.supply.bring(name, lambda size: self._advance.by(size, end))
        self._advance.by(counted, end)

    def close(self) -> None:
        """The directory is a model: what was kept for going on is deleted."""
        self.journal.close()
        self.supply.close()

    def _begin(self) -> None:
        """Makes the files that are missing, full of holes; what the journal says of a lost one is forgotten."""
        if self.units:
            (self.output.path / FINISHED).unlink(missing_ok=True)  # so that an unfinished model is not loaded
        for unit in self.units:
            file = self.output.partial(unit)
            if file.exists() and file.stat().st_size == unit.size:
                continue
            self.journal.forget(need for job in self._jobs if job.unit is unit for need in job.needs)
            with writing(file):
                file.parent.mkdir(exist_ok=True)
                with open(file, "wb") as opened:
                    opened.truncate(unit.size)
                sync_folder(file.parent)  # a shard may go only when the file's name lasts, too

    def _waiting(self) -> list[ShardJob]:
        """The jobs that are not done; a shard is in the journal only if all of its jobs are."""
        done = self.journal.done.keys()
        return [job for job in self._jobs if not job.needs & done]

    def _check_space(self, waiting: Sequence[ShardJob]) -> None:
        """Raises ModelFileError: files and shards will not fit the disk together."""
        partials = [self.output.partial(unit).stat() for unit in self.units]
        holes = sum(max(0, status.st_size - 512 * status.st_blocks) for status in partials)
        shards = most_at_once(self.sizes, waiting) if self.supply.takes_disk else 0
        check_space(self.output.path, holes + shards)

    def _pack(self, jobs: Sequence[ShardJob], name: str) -> int:
        """Writes the results of `jobs`, syncs them and reads them back; returns the number of bytes."""
        self._advance.say(f"pack {name}")
        with contextlib.ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            written = []
            for job in jobs:
                finished = job.unit.name in self.kept
                path = self.output.path / job.unit.name if finished else self.output.partial(job.unit)
                with writing(path):
                    if job.unit.name not in files:
                        files[job.unit.name] = stack.enter_context(open(path, "r+b", buffering=0))
                    written.append(_write(job, files[job.unit.name], finished))
                self._advance.by(0 if finished else sum(length for _, length in written[-1].spans))
            for unit, file in files.items():
                with writing(self.output.path / unit):
                    sync(file.fileno())
                    drop_cached(file.fileno())
            for job, one in zip(jobs, written, strict=True):
                if digest_of(_spans(files[job.unit.name], one.spans)) != one.digest:
                    raise ModelFileError(
                        f"{self.output.path / job.unit.name} has other bytes than those made from {name}, "
                        f"read back from the disk; {name} was not deleted: check the disk, then "
                        + begin_again(self.output.path, deletes_source(self.output.origin))
                    )
        return sum(length for one in written for _, length in one.spans)

    def _let_go(self, ready: Sequence[ShardJob], waiting: Sequence[ShardJob], here: set[str], nbytes: int) -> None:
        """Releases the shards that `ready` used and no job needs; `nbytes` were made from them."""
        used = {need for job in ready for need in job.needs}
        for name in sorted(used - {need for job in waiting for need in job.needs}):
            self.supply.check(name)
            self.journal.add(name, nbytes)
            self.supply.let_go(name)
            nbytes = 0
            here.discard(name)


class Meter:
    """Calls a progress callback with the bytes done and the current file."""

    def __init__(self, progress: ByteProgress, done: int, total: int):
        self._progress, self.done, self.total, self._what = progress, done, total, ""

    def say(self, what: str) -> None:
        self._what = what
        self.by(0)

    def by(self, size: int, end: int | None = None) -> None:
        """So many bytes more, but not beyond `end`: a piece may come twice."""
        self.done = min(self.done + size, self.total if end is None else min(end, self.total))
        self._progress(self.done, self.total, self._what)


@dataclass(frozen=True)
class WrittenUnit:
    """The output of a job: places in its file, and a digest of the bytes there."""

    spans: list[tuple[int, int]]
    digest: str


def most_at_once(sizes: Mapping[str, int], jobs: Sequence[ShardJob]) -> int:
    """The most bytes of shards that are on the disk at once."""
    order = {name: i for i, name in enumerate(sizes)}
    last: dict[str, int] = {}  # for each shard, the shard after which its last job can be done
    for job in jobs:
        for name in job.needs:
            last[name] = max(last.get(name, 0), *(order[one] for one in job.needs))
    return max((sum(sizes[one] for one in last if order[one] <= i <= last[one]) for i in order.values()), default=0)


def _write(job: ShardJob, file: BinaryIO, finished: bool) -> WrittenUnit:
    spans, digest = [], hashlib.sha256()
    for offset, data in job.writes():
        view = memoryview(data)
        spans.append((offset, len(view)))
        digest.update(view)
        done = len(view) if finished else 0
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done : done + READ_BYTES], offset + done)
    return WrittenUnit(spans, digest.hexdigest())


def _spans(file: BinaryIO, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for offset, length in spans:
        for start in range(offset, offset + length, READ_BYTES):
            yield os.pread(file.fileno(), min(READ_BYTES, offset + length - start), start)
