"""The GGUF container: what the `gguf` package writes is read back, and hostile files end in one line."""

import os
import struct

import numpy as np
import pytest

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats import gguf_file
from moeflux_mlx.formats.gguf_file import open_gguf
from moeflux_mlx.formats.gguf_names import heads_of, models_in
from moeflux_mlx.opening.load_settings import locate

gguf = pytest.importorskip("gguf")


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def tensor(name="x", shape=(32,), kind=0, offset=0, axes=None):
    lengths = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", axes or len(shape)) + lengths + struct.pack("<IQ", kind, offset)


U32, STRING, ARRAY = 4, 8, 9


def raw(entries=(), tensors=(), data=b"\0" * 128, counts=None, magic=b"GGUF", version=3):
    """Returns the bytes of a file of these parts, true or not."""
    count = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *count) + b"".join([*entries, *tensors])
    return head + b"\0" * (-len(head) % 32) + data


ARRAYS = struct.pack("<IQ", ARRAY, 1)
NUMBER = struct.pack("<I", 1)
HUGE = 1 << 62
HOSTILE = {
    "empty": b"",
    "short": b"GGUF\3\0\0\0",
    "another kind of file": raw(magic=b"GGML"),
    "version 1": raw(version=1),
    "big-endian": raw(version=3 << 24),
    "more tensors than bytes": raw(counts=(HUGE, 0)),
    "more entries than bytes": raw(counts=(0, HUGE)),
    "a long key": raw([struct.pack("<Q", HUGE) + b"key"]),
    "a key that is no text": raw([entry(b"\xff\xfe", U32, NUMBER)]),
    "a key twice": raw([entry("a", U32, NUMBER)] * 2),
    "an unknown type of value": raw([entry("a", 77, NUMBER)]),
    "a long string": raw([entry("a", STRING, struct.pack("<Q", HUGE) + b"x")]),
    "an array of more numbers than bytes": raw([entry("a", ARRAY, struct.pack("<IQ", U32, HUGE))]),
    "an array of more strings than bytes": raw([entry("a", ARRAY, struct.pack("<IQ", STRING, HUGE))]),
    "an array of more arrays than bytes": raw([entry("a", ARRAY, struct.pack("<IQ", ARRAY, HUGE))]),
    "arrays in arrays in arrays": raw([entry("a", ARRAY, ARRAYS * 2000)]),
    "an alignment of 0": raw([entry("general.alignment", U32, struct.pack("<I", 0))]),
    "an alignment of 48": raw([entry("general.alignment", U32, struct.pack("<I", 48))]),
    "an alignment that is a text": raw([entry("general.alignment", STRING, text("32"))]),
    "a tensor twice": raw(tensors=[tensor(), tensor()]),
    "a tensor without axes": raw(tensors=[text("x") + struct.pack("<IIQ", 0, 0, 0)]),
    "a tensor of many axes": raw(tensors=[tensor(shape=(1,) * 9)]),
    "a tensor of a billion axes": raw(tensors=[tensor(axes=1 << 30)]),
    "a tensor of length 0": raw(tensors=[tensor(shape=(0, 32))]),
    "a tensor larger than the file": raw(tensors=[tensor(shape=(64,))]),
    "a product of lengths that overflows": raw(tensors=[tensor(shape=(1 << 32, 1 << 32, 4))]),
    "a type that is not known": raw(tensors=[tensor(kind=200)]),
    "rows that are not whole blocks": raw(tensors=[tensor(shape=(33,), kind=2)]),
    "an offset beyond the file": raw(tensors=[tensor(offset=1 << 40)]),
    "an offset that wraps": raw(tensors=[tensor(offset=(1 << 64) - 32)]),
    "an offset that is not aligned": raw(tensors=[tensor(shape=(8,), offset=4)]),
    "tensors that overlap": raw(tensors=[tensor(), tensor("y", offset=32)], data=b"\0" * 256),
    "data cut off": raw(tensors=[tensor()])[:-1],
    "part 1 of 3 under another name": raw([entry("split.count", 2, struct.pack("<H", 3))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_line(tmp_path, name):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ModelFileError) as error:
        open_gguf(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert str(path) in str(error.value)


def test_the_same_file_without_a_lie_is_read(tmp_path):
    """What the hostile ones differ from in one place each."""
    path = tmp_path / "x.gguf"
    path.write_bytes(raw([entry("a", ARRAY, struct.pack("<IQ2I", U32, 2, 5, 6))], [tensor()]))
    whole = open_gguf(path)
    assert whole.metadata == {"a": [5, 6]}
    assert (whole.tensors["x"].type, whole.tensors["x"].shape) == ("F32", (32,))
    assert whole.tensors["x"].offset + 128 == path.stat().st_size
    path.write_bytes(raw()[:24])  # the smallest header
    assert not open_gguf(path).metadata


def write(path, tensors, keys=None, **options):
    writer = gguf.GGUFWriter(str(path), "qwen3moe", **options)
    for key, value in (keys or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Q4_0, Q6_K, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q6_K", "F32"))


def blocks(shape, kind, seed=0):
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    row = shape[-1] // weights * size
    return np.random.default_rng(seed).integers(0, 256, (*shape[:-1], row), dtype=np.uint8), kind


def test_what_gguf_writes_is_read_back(tmp_path):
    path, keys = tmp_path / "x.gguf", {"words": ["a", "\u00e9", ""], "numbers": [1.5, -2.0], "name": "model"}
    tensors = {"a": blocks((3, 64), Q4_0), "experts": blocks((2, 3, 256), Q6_K), "c": (np.ones((5,), np.float32), F32)}
    write(path, tensors, keys)
    whole, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert {key: whole.metadata[key] for key in keys} == keys
    assert [one.name for one in theirs.tensors] == list(whole.tensors)
    for one in theirs.tensors:
        ours = whole.tensors[one.name]
        assert (ours.offset, ours.nbytes, ours.type) == (one.data_offset, one.n_bytes, one.tensor_type.name)
        assert ours.shape == tuple(one.shape[::-1])


def split(tmp_path):
    """Writes a model in two files."""
    tensors = {name: blocks((64, 64), Q4_0, i) for i, name in enumerate("abcd")}
    write(tmp_path / "m.gguf", tensors, {"name": "model"}, split_max_tensors=2)
    return [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)], tensors


def test_split_files_are_one_model(tmp_path):
    paths, tensors = split(tmp_path)
    for path in (*paths, gguf_file.gguf_file(tmp_path)):
        whole = open_gguf(path)
        assert whole.files == tuple(paths) and whole.metadata["name"] == "model"
        assert {one.file for one in whole.tensors.values()} == set(paths)
        for name, (array, _) in tensors.items():
            one = whole.tensors[name]
            with open(one.file, "rb") as file:
                file.seek(one.offset)
                assert file.read(one.nbytes) == array.tobytes()


def test_split_files_that_are_missing_or_strange(tmp_path):
    paths, _ = split(tmp_path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelFileError, match="says that it is file 0 of 2"):
        open_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelFileError, match="m-00002-of-00002.gguf does not exist; it is part 2 of 2"):
        open_gguf(paths[0])
    paths[1].write_bytes(data)
    alone = paths[1].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="one of 2 files of a split model"):
        open_gguf(alone)


def test_a_whole_file_may_be_called_the_only_one_of_a_split_model(tmp_path):
    one = tmp_path / "m-00001-of-00001.gguf"
    for entries in (
        [],
        [entry("split.count", 2, struct.pack("<H", 0))],
        [entry("split.count", 2, struct.pack("<H", 1)), entry("split.no", 2, struct.pack("<H", 0))],
    ):
        one.write_bytes(raw(entries, [tensor()]))
        assert open_gguf(one).files == (one,) and [*open_gguf(one).tensors] == ["x"]
    one.write_bytes(raw([entry("split.count", 2, struct.pack("<H", 2))], [tensor()]))
    with pytest.raises(ModelFileError, match="says that it is file 0 of 2"):
        open_gguf(one)
    one.write_bytes(raw([entry("split.tensors.count", 5, struct.pack("<i", 2))], [tensor()]))
    with pytest.raises(ModelFileError, match="the files have 1 tensors; the first says 2"):
        open_gguf(one)


def test_a_pipe_is_no_model(tmp_path):
    """Reading it would wait for a writer; the test is one, so that it ends in any case."""
    os.mkfifo(tmp_path / "m.gguf")
    writer = os.open(tmp_path / "m.gguf", os.O_RDWR)
    for place in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(ModelFileError, match="a pipe or a socket; give a regular file|nor a GGUF file"):
            locate(place)
    os.close(writer)


def test_split_files_have_as_many_tensors_as_the_first_one_says(tmp_path):
    paths, _ = split(tmp_path)
    data, key = paths[0].read_bytes(), b"split.tensors.count"
    at = data.index(key) + len(key) + 4  # behind the type
    assert struct.unpack_from("<I", data, at) == (4,)
    paths[0].write_bytes(data[:at] + struct.pack("<I", 5) + data[at + 4 :])
    with pytest.raises(ModelFileError, match="m-00001-of-00002.gguf: the files have 4 tensors; the first says 5"):
        open_gguf(paths[0])


def test_a_directory_with_one_model(tmp_path):
    assert gguf_file.gguf_file(tmp_path) is None
    one = tmp_path / "one.gguf"
    one.write_bytes(raw())
    for name in ("mmproj-F16", "imatrix", "one-imatrix", "mtp-one", "MMProj-one", "eagle3-one", "dflash-one-Q8_0"):
        (tmp_path / f"{name}.gguf").write_bytes(raw())
    assert gguf_file.gguf_file(tmp_path) == gguf_file.gguf_file(one) == one
    (tmp_path / "two.gguf").write_bytes(raw())
    with pytest.raises(ModelFileError, match="holds several models: one.gguf, two.gguf"):
        gguf_file.gguf_file(tmp_path)


def test_models_that_differ_in_the_number_of_files():
    two, three = ([f"a-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)] for count in (2, 3))
    assert models_in(two) == {"a": two}
    assert models_in([*two, "b.gguf"]) == {"a": two, "b": ["b.gguf"]}
    known = {"a": ["a.gguf"], "a-00001-of-00002": two, "a-00001-of-00003": three}
    assert models_in([*three, "a.gguf", *two]) == known


@pytest.mark.parametrize(
    "model, heads",
    [
        ("a-Q8_0", ["mtp-a-Q8_0"]),
        ("a-UD-Q3_K_XL", ["mtp-a-Q4_0"]),  # the smallest
        ("a", ["mtp-a-Q4_0"]),
        ("b-Q8_0", ["mtp-a-BF16", "mtp-a-Q4_0", "mtp-a-Q8_0", "mtp-c"]),
        ("c-IQ2_S", ["mtp-c"]),
        ("more/a-Q8_0", ["more/mtp-x-00001-of-00002"]),
        ("other/a-Q8_0", []),
    ],
)
def test_which_draft_head_is_a_model_s_own(model, heads):
    sizes = {"mtp-a-BF16.gguf": 4, "mtp-a-Q8_0.gguf": 3, "mtp-a-Q4_0.gguf": 2, "mtp-c.gguf": 1, "mmproj-a-Q8_0.gguf": 1}
    sizes |= {f"more/mtp-x-0000{i}-of-00002.gguf": 1 for i in (1, 2)} | {f"{model}.gguf": 9}
    assert [files[0].removesuffix(".gguf") for files in heads_of([f"{model}.gguf"], sizes)] == heads


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="GGUF files need the package gguf, .*; run: pip install"):
        open_gguf(tmp_path / "x.gguf")
