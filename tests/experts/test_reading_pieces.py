"""Records in pieces of several files at odd offsets: read completely, for any behaviour of reads, or an error."""

import itertools
import mmap
import os
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import tiny_args
from test_source import Faults, blocks, slow

from moeflux_mlx.errors import ExpertIOError, ModelFileError
from moeflux_mlx.experts import files, reader, whole
from moeflux_mlx.experts.files import OpenFiles
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.experts.whole import Portion, ResidentExperts
from moeflux_mlx.formats.packed import InPlaceExperts, Run, Spread, runs_of
from moeflux_mlx.formats.record import BLOCK_BYTES, ExpertLayout
from moeflux_mlx.ops import backend

EXPERTS = 6


def write_stacks(folder, residues=(0, 5, 10, 15, 3, 8, 13, 1, 6), files=2, seed=0, layers=2):
    """Writes layers whose nine stacks are in `files` files in any order, each after some other bytes.

    Returns their records.
    """
    layout, rng = ExpertLayout.from_args(tiny_args(layers, EXPERTS)), np.random.default_rng(seed)
    contents = {folder / f"{i}.bin": bytearray(rng.bytes(i)) for i in range(files)}
    records = {layer: np.zeros((EXPERTS, record.stride), np.uint8) for layer, record in layout.records.items()}
    fields = {layer: [None] * len(record.fields) for layer, record in layout.records.items()}
    every = [(layer, i) for layer in fields for i in range(len(fields[layer]))]
    for layer, i in rng.permutation(every).tolist():
        field = layout.records[layer].fields[i]
        path = list(contents)[int(rng.integers(files))]
        data = contents[path]
        data += rng.bytes((residues[i] - len(data)) % 16 + 16 * int(rng.integers(0, 8192)))
        values = rng.integers(0, 256, (EXPERTS, field.size), dtype=np.uint8)
        offsets = range(len(data), len(data) + EXPERTS * field.size, field.size)
        fields[layer][i] = Spread((path,) * EXPERTS, offsets, field.size, field.offset)
        records[layer][:, field.offset : field.end] = values
        data += values.tobytes()
    for path, data in contents.items():
        path.write_bytes(data)
    sizes = {path: len(data) for path, data in contents.items()}
    return InPlaceExperts(layout, fields, sizes), {layer: rows.view(np.uint32) for layer, rows in records.items()}


@pytest.fixture
def stacks(tmp_path):
    return write_stacks(tmp_path)


@settings(max_examples=examples(20))
@given(
    residues=st.lists(st.integers(0, 15), min_size=9, max_size=9),
    files=st.integers(1, 3),
    seed=st.integers(0, 99),
    direct=st.booleans(),
    kind=st.sampled_from(["resident", "one drive", "a drive for each file"]),
)
def test_records_are_put_together_from_any_place(tmp_path_factory, residues, files, seed, direct, kind):
    where, truth = write_stacks(tmp_path_factory.mktemp("stacks"), residues, files, seed)
    if kind == "resident":
        source = ResidentExperts(where, direct=direct)
    else:
        options = {} if kind == "one drive" else {"drive_of": lambda path, stat: path}
        source = StreamedExperts(where, cache_bytes=1, reader=ExpertReader(where, direct=direct, workers=2, **options))
    for layer in (1, 0):
        assert np.array_equal(blocks(source.request(layer, np.arange(EXPERTS))), truth[layer])
    source.close()


@pytest.mark.parametrize(
    "kind, direct", [*itertools.product(["short", "eintr", "slow"], [True, False]), ("einval", True)]
)
@pytest.mark.parametrize("resident", [True, False])
def test_recoverable_faults_do_not_change_bytes(stacks, kind, direct, resident):
    where, truth = stacks
    faults, plan = Faults(), [None, kind, kind] if kind != "einval" else [None, kind]
    if resident:
        faults.plan = plan
        source = ResidentExperts(where, direct=direct, preadv=faults)
    else:
        source = StreamedExperts(where, reader=ExpertReader(where, direct=direct, preadv=faults))
        faults.plan = plan
    assert np.array_equal(blocks(source.request(0, np.arange(EXPERTS))), truth[0])
    assert ("page cache" in source.note) == (kind == "einval")
    source.close()


@pytest.mark.usefixtures("files_may_change")
@pytest.mark.parametrize("kind", ["eio", "ends"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_failed_read_is_reported_to_all_who_wait_and_not_kept(stacks, kind, direct):
    where, truth = stacks
    faults = Faults()
    loader = StreamedExperts(where, reader=ExpertReader(where, direct=direct, preadv=faults))
    if kind == "eio":
        faults.plan = [None, "eio"]
        with pytest.raises(ExpertIOError, match="expert . of layer 0 failed: .*Input/output error"):
            loader.request(0, np.arange(EXPERTS)).wait()
        assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS))), truth[0])
    else:
        for path in where.sizes:
            os.truncate(path, 100)
        with pytest.raises(ExpertIOError, match="expert 2 of layer 0 failed: the file ended .* early"):
            loader.request(0, np.array([2])).wait()
    loader.close()
    with pytest.raises(ExpertIOError, match="has 100 bytes" if kind == "ends" else "of layer 0 failed: .*Input/output"):
        faults.plan = [None, "eio"]
        ResidentExperts(where, direct=direct, preadv=faults)


def test_a_file_that_was_replaced_is_not_opened_again(stacks):
    where, _ = stacks
    faults = Faults()
    loader = StreamedExperts(where, reader=ExpertReader(where, preadv=faults))
    path = next(iter(where.sizes))
    (path.parent / "new").write_bytes(path.read_bytes())
    os.replace(path.parent / "new", path)
    faults.plan = ["einval"]
    with pytest.raises(ExpertIOError, match=f"{path.name} was changed while in use"):
        loader.request(0, np.array([0])).wait()
    loader.close()


def test_a_thread_is_woken_for_large_reads_and_for_several_small_ones():
    def runs(*sizes):
        return [Run(Path("x"), 0, size, ()) for size in sizes]

    large, small = 300, 99
    shares = reader.shares_of(runs(large, small, small, large, small, small, large, small, small), large)
    assert sorted(len(share) for share in shares) == [1, 1, 1, 2, 4]
    assert [len(share) for share in reader.shares_of(runs(1, 1, 1), large)] == [3]
    assert sum(len(share) for share in shares) == 9


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_are_counted_as_the_drive_delivers_them(stacks, direct):
    where, _ = stacks
    delivered = []

    def preadv(file, places, start):
        delivered.append(os.preadv(file, places, start))
        return delivered[-1]

    loader = StreamedExperts(where, reader=ExpertReader(where, direct=direct, preadv=preadv))
    loader.request(1, np.arange(EXPERTS)).wait()
    assert loader.stats.bytes_read == sum(delivered) >= EXPERTS * where.layout.records[1].size
    loader.close()


def test_where_direct_reads_take_any_address_nothing_is_moved(stacks, monkeypatch):
    """As on a Mac, where the flag for direct reads is set after a file is opened."""
    where, truth = stacks
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(files, "IN_BLOCKS", False)
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    wanted = [run for e in range(EXPERTS) for run in runs_of(where.pieces(1, e), 1 << 20)]
    assert loader.reader.direct and loader.stats.bytes_read == sum(run.stop - run.start for run in wanted)
    loader.close()


@pytest.fixture
def share_of(monkeypatch):
    """Returns a function that says how many bytes of a record are read at a time."""
    return lambda nbytes: monkeypatch.setattr(reader, "SHARE_BYTES", nbytes)


def test_the_end_of_a_file_inside_a_block(tmp_path):
    """The last block of a direct read may be incomplete."""
    where, truth = write_stacks(tmp_path, files=1)
    (size,) = where.sizes.values()
    assert size % BLOCK_BYTES
    loader = StreamedExperts(where)
    assert np.array_equal(blocks(loader.request(0, np.arange(EXPERTS))), truth[0])
    assert np.array_equal(blocks(loader.request(1, np.arange(EXPERTS))), truth[1])
    loader.close()


def test_closing_between_two_pieces_of_a_record(stacks, share_of):
    where, _ = stacks
    share_of(1)
    threads = set(threading.enumerate())
    loader = StreamedExperts(where, reader=ExpertReader(where, workers=1, preadv=slow))
    lease = loader.request(0, np.arange(EXPERTS))
    time.sleep(0.03)  # the first record is being read
    loader.reader.close()
    with pytest.raises(ExpertIOError):
        lease.wait()
    loader.close()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("share_bytes", [1, 1 << 20])
def test_a_requested_guess_overtakes_other_guesses_with_all_its_pieces(stacks, share_bytes, share_of):
    where, truth = stacks
    share_of(share_bytes)
    gate, order = threading.Event(), []

    def preadv(file, places, start):
        gate.wait()
        order.append(start)
        return os.preadv(file, places, start)

    loader = StreamedExperts(where, reader=ExpertReader(where, direct=False, workers=1, preadv=preadv))
    busy = loader.request(0, np.array([0]))
    loader.hint([(1, 0), (1, 1)])
    wanted = loader.request(1, np.array([1]))
    gate.set()
    assert np.array_equal(blocks(wanted)[0], truth[1][1])
    parts = [reader.shares_of(runs_of(where.pieces(1, expert), 1 << 30), share_bytes) for expert in (1, 0)]
    runs = [run.start for shares in parts for share in shares for run in share]
    busy.wait()
    loader.drain()
    assert order[-len(runs) :] == runs
    loader.close()


def test_resident_layers_are_kept_as_kernels_read_them(stacks, backend_is, kernels_are):
    where, truth = stacks
    told = []
    source = ResidentExperts(where, "why", progress=lambda done, total: told.append((done, total)))
    assert source.decision == "why" and source.slots == 0 and source.is_resident == backend.has_kernels()
    assert told[-1][0] == told[-1][1] and told == sorted(told)
    source.close()
    with pytest.raises(ExpertIOError, match="closed"):
        source.request(0, np.array([0]))
    kernels_are(True)
    backend_is("cuda")  # the arrays are on the CPU; the code is that for CUDA
    source = ResidentExperts(where)
    assert source.is_resident and isinstance(source.whole(0).blob, mx.array)
    for layer in (0, 1):
        assert np.array_equal(np.array(source.whole(layer).blob), truth[layer])
    source.close()


def test_files_are_closed_once_resident_experts_are_read(stacks, monkeypatch):
    where, _ = stacks
    closed = []
    right = OpenFiles.close
    monkeypatch.setattr(OpenFiles, "close", lambda self: closed.append(right(self)))
    source = ResidentExperts(where)
    assert closed
    source.close()


def test_memory_but_the_first_is_touched_before_it_is_filled(monkeypatch):
    monkeypatch.setattr(whole, "TOUCHED_BYTES", 3 * mmap.PAGESIZE)
    begun, rows = [], np.ones((6, 2 * mmap.PAGESIZE), np.uint32)

    def portions():
        for first, stop in ((0, 1), (1, 3), (3, 6)):
            begun.append(first)
            yield Portion(0, rows, first, stop)

    for i, portion in enumerate(whole.touched(portions()), 1):
        pages = portion.records.view(np.uint8).reshape(-1, mmap.PAGESIZE)
        assert len(pages) == 8 * i and pages[:, 4].all()
        assert pages[:, 0].all() if i == 1 else not pages[:, 0].any()
        assert len(begun) == min(i + 1, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_are_read_by_portions_in_their_order(tmp_path, monkeypatch, device, backend_is, kernels_are):
    """On CUDA layers use two buffers in turn, and none is overwritten before it has been copied."""
    where, truth = write_stacks(tmp_path, layers=4)
    monkeypatch.setattr(whole, "PORTION_BYTES", 4 * where.layout.records[0].stride)
    kernels_are(device == "cuda")
    backend_is(device)
    seen = []

    def check(layer, first, rows):
        seen.append((layer, first))
        assert np.array_equal(rows, truth[layer][first : first + len(rows)])
        time.sleep(0.02)  # reads that have begun end now

    def kept(rows, right=whole.kept):
        seen.append("kept")
        return right(rows)

    monkeypatch.setattr(whole, "kept", kept)
    source = ResidentExperts(where, check=check)
    assert seen == [one for layer in range(4) for one in ((layer, 0), (layer, 3), "kept")]
    for layer in range(4):
        assert np.array_equal(np.array(source.layers[layer].memory), truth[layer])
    source.close()


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_several_reads_begin_before_the_first_record_is_given(count):
    begun = []
    given = whole.begun_ahead(map(begun.append, range(5)), count)
    assert [len(begun) for _ in given] == [min(i + count, 5) for i in range(1, 6)]


def test_nan_scales_are_reported_with_their_expert(stacks, monkeypatch):
    where, _ = stacks
    stride = where.layout.records[1].stride
    monkeypatch.setattr(whole, "PORTION_BYTES", 2 * stride)
    field = next(one for one in where.layout.records[1].fields if one.dtype == "BF16")
    piece = next(one for one in where.pieces(1, 4) if one.place == field.offset)
    for layer, expert in ((layer, expert) for layer in (0, 1) for expert in range(EXPERTS)):
        for one in where.pieces(layer, expert):
            with open(one.path, "r+b") as file:
                file.seek(one.offset)
                file.write(bytes(one.length))
    with open(piece.path, "r+b") as file:
        file.seek(piece.offset)
        file.write(b"\x80\x7f")
    with pytest.raises(ModelFileError, match=f"{field.name} of expert 4 of layer 1"):
        ResidentExperts(where, check=where.check_scales)
