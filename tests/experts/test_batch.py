"""Reads that are under way together: the same bytes as one after the other, and a careful read of what fails."""

import errno
import os
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reading_pieces import EXPERTS, write_stacks
from test_source import blocks

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import batch, files
from moeflux_mlx.experts.files import OpenFiles
from moeflux_mlx.experts.memory import private_pages
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.pieces import Piece, Run, runs_of

built = pytest.mark.skipif(not batch.available(), reason="the extension is not built")


@pytest.fixture
def stacks(tmp_path):
    return write_stacks(tmp_path)


REAL = batch._reads


class Faulty:
    """Native reads of which every third call has the result `result` for each run, and moves nothing."""

    def __init__(self, result):
        self.result, self.count, self.queue = result, 0, REAL and REAL.queue

    def read(self, queue, target, scratch, numbers):
        self.count += 1
        runs = REAL.read(queue, bytearray(len(target)) if self.count % 3 == 0 else target, scratch, numbers)
        return [self.result] * len(runs) if self.count % 3 == 0 else runs


@built
@pytest.mark.parametrize("result", [0, 100, -errno.EINTR, -errno.EIO, -errno.EAGAIN])
def test_what_fails_is_read_with_care(stacks, monkeypatch, result):
    where, truth = stacks
    faulty = Faulty(result)
    monkeypatch.setattr(batch, "_reads", faulty)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS))), truth[0])
    assert faulty.count > 2 and loader.note == ""
    loader.close()


@pytest.mark.parametrize("way", ["refused", "not built"])
def test_without_a_queue_reads_go_one_after_the_other(stacks, monkeypatch, way):
    where, truth = stacks

    class Refusing:
        def queue(self):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(batch, "_reads", Refusing() if way == "refused" else None)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    loader.close()


@built
def test_a_record_is_one_call_and_its_bytes_are_counted(stacks, monkeypatch):
    where, truth = stacks
    calls = []

    class Counting:
        queue = staticmethod(REAL.queue)

        def read(self, *args):
            calls.append(REAL.read(*args))
            return calls[-1]

    monkeypatch.setattr(batch, "_reads", Counting())
    monkeypatch.setattr(OpenFiles, "read", None)  # nothing needs care
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    assert len(calls) == EXPERTS and loader.stats.bytes_read == sum(map(sum, calls))
    loader.close()


@built
def test_scratch_memory_that_holds_one_run_only(stacks, monkeypatch):
    where, truth = stacks
    room = where.layout.records[0].held_bytes
    every = [run for expert in range(EXPERTS) for run in runs_of(where.pieces(0, expert), room)]
    largest = max(run.window[1] - run.window[0] for run in every)
    monkeypatch.setattr(files, "SCRATCH_BYTES", largest)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS))), truth[0])
    loader.close()


@built
def test_a_file_that_was_cut_short_is_an_error(stacks):
    where, _ = stacks
    loader = StreamedExperts(where)
    for path in where.sizes:
        os.truncate(path, 100)
    with pytest.raises(ExpertIOError, match="expert 2 of layer 0 failed: the file ended .* early"):
        loader.request(0, np.array([2])).wait()
    loader.close()


@built
def test_a_failed_read_is_told_and_moves_nothing(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(1, 256)) * 100)
    good, closed = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    os.close(closed)
    target, scratch = (memoryview(private_pages(1 << 16)) for _ in range(2))
    runs = [Run(tmp_path / name, 10, 20, (Piece(tmp_path / name, 10, 10, at),)) for name, at in (("a", 0), ("b", 50))]
    files = {tmp_path / "a": good, tmp_path / "b": closed}
    found = batch.Queue().read(files, runs, target, scratch)
    os.close(good)
    assert found == [4096, -errno.EBADF] or found[1] in (-errno.EBADF, -errno.EAGAIN)
    assert bytes(target[:10]) == bytes(range(11, 21)) and not any(target[10:])


@built
@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0, 4097, 0, -1, 0),  # more than scratch memory
        (0, 0, 4096, 0, 1, 0),  # behind the target's end
        (0, 0, 4096, 4097, 0, 0),  # needs more than it asks for
        (0, -1, 4096, 1, 0, 0),
        (0, 0, 4096, 10, -1, 1, 5, 0, 6),  # a piece behind what is needed
        (0, 0, 4096, 10, -1, 1, 0, 4090, 7),  # a piece behind the target's end
        (0, 0, 4096, 10, -1, 1, 0, -1, 7),
        (0, 0, 4096, 10, -1, 2, 0, 0, 7),  # a piece is missing
        (0, 0, 4096, 10, -1),
        (0, 0, 0, 0, 0, 0) * (batch.MOST_READS + 1),
    ],
)
def test_native_reads_stay_in_their_memory(numbers):
    target, scratch = bytearray(4096), bytearray(4096)
    with pytest.raises(ValueError, match="leaves its memory"):
        REAL.read(REAL.queue(), target, scratch, array("q", numbers))


@given(sizes=st.lists(st.tuples(st.integers(1, 50_000), st.booleans()), min_size=1, max_size=80))
def test_batches_hold_every_run_once_and_fit(sizes):
    runs = [Run(None, 0, size, (), is_aligned) for size, is_aligned in sizes]
    batches = list(batch.batches_of(runs, 65_536))
    assert [run for some in batches for run in some] == runs
    for some in batches:
        assert 0 < len(some) <= batch.MOST_READS
        assert sum(run.window[1] for run in some if not run.is_aligned) <= 65_536
