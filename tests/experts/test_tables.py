"""Rows of n-gram tables: the right ones in any order and form, read once, kept for a while, and incomplete files."""

import contextlib
import os
import threading
import time

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_directory

from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ExpertIOError, ModelFileError
from moeflux_mlx.experts import tables
from moeflux_mlx.experts.tables import FEW, FileTable
from moeflux_mlx.formats.tables import FileRows, RowForm, TableFiles
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.located import Located
from moeflux_mlx.quant import Quant

WIDTH = 32
FORMS = [
    RowForm(WIDTH, None, "BF16"),
    RowForm(WIDTH, None, "F32"),
    RowForm(WIDTH, Quant(4, 32), "BF16"),
    RowForm(WIDTH, Quant(4, 32), "F16"),
    RowForm(WIDTH, Quant(4, 16, "nvfp4"), "BF16"),
    RowForm(WIDTH, Quant(8, 32, "mxfp8"), "BF16"),
]
DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "F16": mx.float16, "U32": mx.uint32, "U8": mx.uint8}


def written(path, form, rows, lengths, in_parts, seed=0):
    """Writes the files of a table in shards of these lengths.

    Returns its values. With `in_parts` each part of a row is separate.
    """
    values = mx.array(np.random.default_rng(seed).normal(size=(rows, form.width)).astype(np.float32))
    if form.quant is None:
        parts = [values.astype(DTYPES[form.floating])]
        wanted = parts[0].astype(mx.float32)
    else:
        how = {"group_size": form.quant.group_size, "bits": form.quant.bits, "mode": form.quant.mode}
        parts = [
            part if part.dtype != mx.float32 else part.astype(DTYPES[form.floating])
            for part in mx.quantize(values, **how)
        ]
        wide = [part if part.dtype in (mx.uint32, mx.uint8) else part.astype(mx.float32) for part in parts]
        wanted = mx.dequantize(*wide, **how).astype(mx.float32)
    raw = [np.array(mx.contiguous(part).view(mx.uint8)) for part in parts]
    shards, starts, at = [], [], 0
    for i, length in enumerate(lengths):
        own, places = [part[at : at + length] for part in raw], []
        for j, part in enumerate(own if in_parts else [np.concatenate(own, axis=1)]):
            file = path / f"{i}-{j}"
            file.write_bytes(b"before" + np.ascontiguousarray(part).tobytes())
            places.append(FileRows(file, 6, part.shape[1]))
        shards.append(places)
        starts.append(at)
        at += length
    return TableFiles(form, starts, shards, rows), np.array(wanted)


@given(
    form=st.sampled_from(FORMS),
    cuts=st.lists(st.integers(1, 99), max_size=3, unique=True),
    in_parts=st.booleans(),
    calls=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=6),
    kept=st.integers(0, 20),
)
@settings(max_examples=examples(25), deadline=None)
def test_rows_of_any_shards(tmp_path_factory, form, cuts, in_parts, calls, kept):
    ends = [*sorted(cuts), 100]
    lengths = np.diff([0, *ends]).tolist()
    files, wanted = written(tmp_path_factory.mktemp("table"), form, 100, lengths, in_parts)
    reader = FileTable(files, kept * form.row_bytes)
    for numbers in calls:
        rows = np.array(numbers)[None, :, None]
        pending = reader.begin(rows)
        for start, end in ((0, len(numbers)), (len(numbers) // 2, len(numbers))):
            got = np.array(pending.take(start, end).astype(mx.float32))[0]
            np.testing.assert_array_equal(got, wanted[numbers[start:end]])
    assert len(reader.kept) <= kept
    reader.close()


def rows_read(reader):
    return reader.bytes_read // reader.files.form.row_bytes


@pytest.fixture
def read_by(monkeypatch):
    """Returns a function that replaces `os.preadv`."""
    return lambda read: monkeypatch.setattr(os, "preadv", read)


def test_each_row_is_read_once_and_kept_for_the_next_tokens(tmp_path):
    files, wanted = written(tmp_path, FORMS[2], 100, [40, 60], True)
    reader, numbers = FileTable(files), np.array([[[5, 7], [6, 7], [50, 8]]])
    for _ in range(2):
        got = np.array(reader.begin(numbers).take(0, 3).astype(mx.float32))
        np.testing.assert_array_equal(got.reshape(3, 2, WIDTH), wanted[numbers[0]])
        assert reader.bytes_read == 5 * FORMS[2].row_bytes
    reader.close()


def test_rows_of_a_prompt_are_read_together_and_not_kept(tmp_path, read_by):
    """The rows are read in file order, each once."""
    files, wanted = written(tmp_path, FORMS[2], 100, [40, 60], False)
    reader, read, right = FileTable(files), [], os.preadv
    read_by(lambda fd, buffers, offset: read.append(offset) or right(fd, buffers, offset))
    numbers = np.random.default_rng(1).integers(0, 100, (1, FEW, 2))
    got = np.array(reader.begin(numbers).take(3, 9).astype(mx.float32))[0]
    np.testing.assert_array_equal(got, wanted[numbers[0, 3:9]].reshape(6, -1))
    assert rows_read(reader) == len(np.unique(numbers)) == len(read) and not reader.kept
    reader.close()


@pytest.mark.parametrize("slow, most", [(1e9, 1), (0, tables.THREADS)])
def test_threads_help_each_other_if_reads_are_slow(tmp_path, monkeypatch, slow, most, read_by):
    """From the page cache one thread reads all rows of a prompt."""
    files, wanted = written(tmp_path, FORMS[0], 3000, [3000], False)
    reader, threads, right = FileTable(files), set(), os.preadv
    monkeypatch.setattr(tables, "SLOW", slow)
    read_by(lambda *given: threads.add(threading.get_ident()) or right(*given))
    numbers = np.arange(3000).reshape(1, 1500, 2)
    got = np.array(reader.begin(numbers).take(0, 1500).astype(mx.float32))[0]
    np.testing.assert_array_equal(got, wanted[numbers[0]].reshape(1500, -1))
    assert rows_read(reader) == 3000 and (len(threads) == 1 if most == 1 else 1 < len(threads) <= most)
    reader.close()


def test_closing_ends_a_prompts_reads(tmp_path, read_by):
    """Rows that were not read are not given."""
    files, _ = written(tmp_path, FORMS[0], 20000, [20000], False)
    reader, right, begun = FileTable(files), os.preadv, threading.Event()

    def slow(*given):
        begun.set()
        time.sleep(0.001)
        return right(*given)

    read_by(slow)
    pending = reader.begin(np.arange(20000).reshape(1, 10000, 2))
    begun.wait()
    reader.close()
    assert rows_read(reader) < 10000
    for _ in range(2):
        with pytest.raises(ExpertIOError, match="closed"):
            pending.take(0, 1)


def test_a_file_that_is_written_to_is_an_error(tmp_path, files_are_looked_at):
    files, _ = written(tmp_path, FORMS[0], 10, [10], False)
    reader = FileTable(files)
    reader.begin(np.array([[[8]]])).take(0, 1)
    (tmp_path / "0-0").write_bytes(bytes((tmp_path / "0-0").stat().st_size + 1))
    with pytest.raises(ExpertIOError, match="0-0 was changed while in use"):
        reader.begin(np.array([[[8]]]))
    reader.close()


def test_a_file_that_ends_early_and_a_reader_that_is_closed(tmp_path):
    files, _ = written(tmp_path, FORMS[0], 10, [10], False)
    reader = FileTable(files)
    os.truncate(tmp_path / "0-0", 6 + 9 * 64 + 1)
    with pytest.raises(ExpertIOError, match=f"0-0 ends at byte {6 + 9 * 64 + 1}; a table's row ends at"):
        pending = reader.begin(np.array([[[9]]]))
        with contextlib.suppress(ExpertIOError):
            pending.take(0, 1)
        pending.take(0, 1)
    assert reader.begin(np.array([[[8]]])).take(0, 1).shape == (1, 1, WIDTH)
    reader.close()
    reader.close()
    with pytest.raises(ExpertIOError, match="closed"):
        reader.begin(np.array([[[1]]]))
    (tmp_path / "0-0").unlink()
    with pytest.raises(ExpertIOError, match="cannot be opened"):
        FileTable(files)


# ---- of a model


def test_a_closed_model_reads_no_rows():
    model = load_model(tiny_directory("qwen4_exp", "hub"), dtype=mx.float32)
    model.experts.close()
    with pytest.raises(ExpertIOError, match="closed"):
        model(mx.array([[1, 2, 3]]))


def test_a_packed_row_is_one_read_and_in_place_it_has_several(tmp_path):
    source = goldens.write_variant(tmp_path / "mlx", "qwen4_exp", "mlx4")
    for path, count in ((tiny_directory("qwen4_exp"), 1), (source, 3)):
        tables = open_weights(Located(path)).tables
        assert sorted(tables) == [1, 3] and [files.rows for files in tables.values()] == [256, 320]
        assert [len(files.places(np.array([100]))) for files in tables.values()] == [count] * 2
        assert {files.form for files in tables.values()} == {RowForm(64, Quant(4, 64), "BF16")}


@pytest.mark.parametrize("change", ["a row", "a shard", "a hash"])
def test_tables_that_do_not_fit_the_configuration(tmp_path, change):
    tensors = dict(goldens.variant_tensors("qwen4_exp", "hub"))
    stem = "model.language_model.layers.1.ple.ple_embedding."
    name = f"{stem}ngram_embedding.shard_3.weight"
    kind, array = tensors.pop(name)
    if change == "a row":
        tensors[name] = kind, array[:-1]
    elif change == "a hash":
        tensors |= {name: (kind, array), f"{stem}layer_multipliers": ("I64", np.array([1, 3, 5]))}
    path = goldens.write_variant(tmp_path / "source", "qwen4_exp", "hub")
    goldens.write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match="is not what config" if change == "a hash" else "rows in all"):
        convert(path, tmp_path / "packed")


def test_a_packed_table_of_another_size(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for file in tiny_directory("qwen4_exp", "hub").iterdir():
        (path / file.name).symlink_to(file)
    (path / "tables.safetensors").unlink()
    with pytest.raises(ModelFileError, match="the table of layer 1 has 0 rows"):
        load_model(path)
