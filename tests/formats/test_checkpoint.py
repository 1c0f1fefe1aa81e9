"""Reading checkpoint files: every tensor comes back as written, and hostile files are refused."""

import json
import re

import goldens
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.checkpoint import open_checkpoint, read_header, read_manifest


def raw_safetensors(path, header, data=b""):
    """Writes a file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ---- valid files ----


def test_every_dtype_reads_as_written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": ("F32", rng.standard_normal((3, 2)).astype(np.float32)),
        "b": ("BF16", rng.integers(0, 0x7F00, (2, 5), dtype=np.uint16)),
        "c": ("U32", rng.integers(0, 2**32, (4,), dtype=np.uint32)),
        "d": ("F8_E4M3", np.arange(6, dtype=np.uint8).reshape(2, 3)),
        "empty": ("F32", np.zeros((0, 4), np.float32)),
    }
    goldens.write_safetensors(tmp_path / "x.safetensors", tensors)
    header = read_header(tmp_path / "x.safetensors")
    for name, (dtype, array) in tensors.items():
        got = header[name].read()
        assert (header[name].dtype, tuple(got.shape)) == (dtype, array.shape)
        assert np.array_equal(np.array(got.view(mx.uint16) if dtype == "BF16" else got), array)


@given(data=st.data())
def test_rows_and_entries_are_slices(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("slices") / "x.safetensors"
    goldens.write_safetensors(path, {"pad": ("BF16", np.zeros(3, np.uint16)), "x": ("F32", array)})
    tensor = read_header(path)["x"]
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start, shape[0]))
    assert np.array_equal(np.array(tensor.rows(start, stop).read()), array[start:stop])
    assert np.array_equal(np.array(tensor[start].read()), array[start])
    assert np.array_equal(np.array(tensor[start][0].read()), array[start, 0])


def test_only_files_of_the_index_are_read(tmp_path):
    goldens.write_variant(tmp_path, "qwen3_moe", "hub_sharded")
    goldens.write_safetensors(tmp_path / "model-extra.safetensors", {"x": ("F32", np.zeros(2, np.float32))})
    assert "x" not in open_checkpoint(tmp_path).tensors


# ---- invalid files ----


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry("F128")}, bytes(8), "dtype 'F128' is not known"),
        ({"x": entry(dtype=7)}, bytes(8), "dtype 7 is not known"),
        ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "shape .* is not a list"),
        ({"x": entry(shape=(-2,))}, bytes(8), r"shape \[-2\] is not a list of sizes"),
        ({"x": entry(shape=(2.0,))}, bytes(8), "is not a list of sizes"),
        ({"x": entry(shape=(True, 2))}, bytes(8), "is not a list of sizes"),
        ({"x": entry(offsets=(0,))}, bytes(8), "are not two byte counts"),
        ({"x": entry(offsets=(-8, 0))}, bytes(8), "are not two byte counts"),
        ({"x": entry(offsets=(8, 0))}, bytes(8), "needs 8 bytes"),
        ({"x": entry(shape=(2**62, 2**62))}, bytes(8), "needs .* bytes"),
        ({"x": entry(offsets=(8, 16))}, bytes(16), "starts at byte"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "tensor y starts at byte"),
        ({"x": entry()}, bytes(4), "download it again"),
        ({"x": entry()}, bytes(12), "download it again"),
        ({"x": [1]}, bytes(8), "the entry is not an object"),
        ([1], b"", "a JSON list, not an object"),
        (b"\xff\xfe{}", b"", "not valid JSON"),
        (b'{"x": ', b"", "not valid JSON"),
        (b"[" * 200_000, b"", "not valid JSON"),
        (b'{"x": 1, "x": 2}', b"", "a key occurs twice"),
    ],
)
def test_hostile_headers(tmp_path, header, data, message):
    with pytest.raises(ModelFileError, match=message):
        read_header(raw_safetensors(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, (1000).to_bytes(8, "little") + b"{}"])
def test_wrong_lengths_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"x\.safetensors is not a safetensors file"):
        read_header(tmp_path / "x.safetensors")


@given(data=st.data())
def test_a_damaged_header_is_refused_or_describes_the_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    goldens.write_safetensors(path, {"x": ("F32", np.ones((2, 2), np.float32)), "y": ("BF16", np.ones(3, np.uint16))})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 23))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        header = read_header(path)
    except ModelFileError:
        return
    assert all(t.offset >= 8 and t.offset + t.nbytes <= len(content) for t in header.values())


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    goldens.write_safetensors(path, {"x": ("F32", np.ones(4, np.float32))})
    tensor = read_header(path)["x"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelFileError, match="ends at byte"):
        tensor.read()
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        tensor.read()


def test_a_dtype_that_no_model_has(tmp_path):
    path = raw_safetensors(tmp_path / "x.safetensors", {"x": entry("C64", (1,))}, bytes(8))
    with pytest.raises(ModelFileError, match="tensor x is C64"):
        read_header(path)["x"].read()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../model.safetensors"}, "not a plain file name"),
        ({"x": "/etc/passwd"}, "not a plain file name"),
        ({"x": "gone.safetensors"}, r"gone\.safetensors does not exist"),
        ({"x": 3}, "not an object of file names"),
        ([], "not an object of file names"),
    ],
)
def test_hostile_indexes(tmp_path, weight_map, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for i in (1, 2):
        goldens.write_safetensors(tmp_path / f"model-{i}.safetensors", {"x": ("F32", np.ones(2, np.float32))})
    with pytest.raises(ModelFileError, match=r"tensor x is in .*model-1\.safetensors and in .*model-2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -1},
        {"offset": 1 << 60},
        {"size": 4},
        {"shape": [3]},
        {"dtype": "Q4"},
        {"offset": "0"},
        {"bits": "4"},
        {"offset": 12},
    ],
)
def test_hostile_manifests(tmp_path, change):
    weights, manifest = tmp_path / "model_weights.bin", tmp_path / "model_weights.json"
    weights.write_bytes(bytes(16))
    sound = {"offset": 0, "size": 8, "shape": [2], "dtype": "F32"}
    manifest.write_text(json.dumps({"tensors": {"x": sound}}))
    assert read_manifest(manifest, weights)["x"].shape == (2,)
    manifest.write_text(json.dumps({"tensors": {"x": {**sound, **change}}}))
    with pytest.raises(ModelFileError, match="tensor x"):
        read_manifest(manifest, weights)


def test_nothing_to_convert(tmp_path):
    with pytest.raises(ModelFileError, match="is not a directory"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(ModelFileError, match=r"holds no checkpoint: .* with packed_experts/$"):
        open_checkpoint(tmp_path)
    inside = tmp_path / "snapshots" / "3f2a"  # as in the Hub's cache
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=f"; do you mean {re.escape(str(inside))}\\?"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_weights.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"config\.json does not exist, nor does .*mlx/config\.json"):
        open_checkpoint(tmp_path)
