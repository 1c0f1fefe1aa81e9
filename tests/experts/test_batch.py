"""Several reads at once: the same bytes as one after the other, and a careful second read of what fails."""

import errno
import os
import sys
from array import array

import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reading_pieces import EXPERTS, write_stacks
from test_source import blocks

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import batch, files
from moeflux_mlx.experts.files import OpenFiles
from moeflux_mlx.experts.memory import private_pages
from moeflux_mlx.experts.reader import READS_BYTES
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import FilePiece, Run, runs_of

built = pytest.mark.skipif(not batch.available(), reason="the extension is not built")


@pytest.fixture
def stacks(tmp_path):
    return write_stacks(tmp_path)


REAL = batch.extension


class Faulty:
    """Native reads in which every third call gets `descriptor` instead of the first file's."""

    def __init__(self, descriptor):
        self.descriptor, self.count, self.missed, self.queue = descriptor, 0, 0, REAL and REAL.queue

    def read(self, queue, files, *rest):
        self.count += 1
        files = array("i", [self.descriptor, *files[1:]]) if self.count % 3 == 0 else files
        came, missed = REAL.read(queue, files, *rest)
        self.missed += len(missed)
        return came, missed


@pytest.fixture
def extension_is(monkeypatch):
    """Returns a function that replaces the native extension."""
    return lambda extension: monkeypatch.setattr(batch, "extension", extension)


@built
@pytest.mark.parametrize("fault", ["closed", "short"])
def test_failed_reads_are_read_again(stacks, tmp_path, fault, extension_is):
    where, truth = stacks
    (tmp_path / "short").write_bytes(bytes(100))
    short = os.open(tmp_path / "short", os.O_RDONLY)
    faulty = Faulty(short if fault == "short" else -1)
    extension_is(faulty)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS))), truth[0])
    assert faulty.missed and loader.note == ""
    loader.close()
    os.close(short)


@pytest.mark.parametrize("way", ["refused", "not built"])
def test_without_a_queue_reads_go_one_after_the_other(stacks, way, extension_is):
    where, truth = stacks

    class Refusing:
        def queue(self):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    extension_is(Refusing() if way == "refused" else None)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    loader.close()


@built
def test_a_record_is_one_call_and_its_bytes_are_counted(stacks, monkeypatch, extension_is):
    where, truth = stacks
    calls = []

    class Counting:
        queue = staticmethod(REAL.queue)

        def read(self, *args):
            calls.append(REAL.read(*args))
            return calls[-1]

    extension_is(Counting())
    monkeypatch.setattr(OpenFiles, "read", None)  # no read needs a second attempt
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    kept = loader.reader._in_pieces
    assert kept and all(sum(map(sys.getsizeof, (key, shares, *shares))) < READS_BYTES for key, shares in kept.items())
    assert len(calls) == EXPERTS and loader.stats.bytes_read == sum(came for came, missed in calls)
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
@pytest.mark.usefixtures("files_may_change")
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
    good = os.open(path, os.O_RDONLY)
    target, scratch = (memoryview(private_pages(1 << 16)) for _ in range(2))
    paths = [tmp_path / "a", tmp_path / "b"]
    runs = [Run(one, 10, 20, (FilePiece(one, 10, 10, 50 * at),)) for at, one in enumerate(paths)]
    numbers = batch.encode(runs, {one: i for i, one in enumerate(paths)})
    outcome = batch.Queue().read(array("i", [good, -1]), numbers, target, scratch)
    os.close(good)
    assert outcome == (4096, [1])
    assert bytes(target[:10]) == bytes(range(11, 21)) and not any(target[10:])


@built
@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0, 4097, 0, -1, 0),  # more than scratch memory
        (0, 0, 4096, 0, 1, 0),  # past the end of the target
        (0, 0, 4096, 4097, 0, 0),  # needs more than it requests
        (0, -1, 4096, 1, 0, 0),
        (1, 0, 4096, 0, -1, 0),  # there is one file
        (-1, 0, 4096, 0, -1, 0),
        (0, 0, 4096, 10, -1, 1, 5, 0, 6),  # a piece outside of the needed bytes
        (0, 0, 4096, 10, -1, 1, 0, 4090, 7),  # a piece past the end of the target
        (0, 0, 4096, 10, -1, 1, 0, -1, 7),
        (0, 0, 4096, 10, -1, 2, 0, 0, 7),  # a piece is missing
        (0, 0, 4096, 10, -1),
    ],
)
def test_native_reads_stay_in_their_memory(numbers):
    target, scratch = bytearray(4096), bytearray(4096)
    with pytest.raises(ValueError, match="leaves its memory"):
        REAL.read(REAL.queue(), array("i", [0]), target, scratch, array("q", numbers))


@built
@settings(max_examples=examples(50))
@given(
    residue=st.integers(0, 4095),
    lengths=st.lists(st.sampled_from([1, 15, 63, 64, 127, 128, 200, 5000]), min_size=1, max_size=80),
)
def test_any_number_of_runs_and_pieces_of_any_length(tmp_path_factory, residue, lengths):
    """There are more reads than can be in flight together, and more bytes than scratch memory holds."""
    path, data = tmp_path_factory.mktemp("one") / "x", np.random.default_rng(0).bytes(500_000)
    path.write_bytes(data)
    offsets = [residue + sum(lengths[:i]) + i for i in range(len(lengths))]  # one byte between two pieces
    pieces = [FilePiece(path, offset, length, offset) for offset, length in zip(offsets, lengths, strict=True)]
    runs = [Run(path, one.offset, one.offset + one.length, (one,)) for one in pieces]
    numbers = batch.encode(runs, {path: 0})
    assert batch.decode(numbers, [path]) == runs
    target, scratch = bytearray(len(data)), memoryview(private_pages(1 << 16))
    file = os.open(path, os.O_RDONLY)
    _, missed = batch.Queue().read(array("i", [file]), numbers, memoryview(target), scratch)
    os.close(file)
    truth = bytearray(len(data))
    for one in pieces:
        truth[one.place : one.place + one.length] = data[one.offset : one.offset + one.length]
    assert missed == [] and target == truth
