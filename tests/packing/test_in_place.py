"""A checkpoint used in place: the same records, resident tensors, and logits as when converted."""

import json

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from minmax import convert
from safetensors_writer import write_model, write_shards
from tiny_models import on_cpu, tiny_directory

from moeflux_mlx import load_model, model_fingerprint
from moeflux_mlx.errors import ExpertIOError, ModelFileError, NotPackedError
from moeflux_mlx.experts.memory import private_pages
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.model.weights import read_resident
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.in_place import open_in_place
from moeflux_mlx.packing.located import Located
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs

FAMILIES = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3")
TOLERANCE = 2e-4
AGREED = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")  # mlx-lm's DeepSeek routers treat groups of experts differently
FORMS = [  # forms of gate and up, and of down
    ((3, 64), (6, 32)),
    ((8, 64), (5, 64)),
    ((2, 32), (4, 64)),
    ((4, 32, "mxfp4"), (4, 32, "mxfp4")),
    ((4, 32, "mxfp4"), (8, 64)),
    ((8, 32, "mxfp8"), (1, 32)),
    ((4, 16, "nvfp4"), (4, 16, "nvfp4")),
    ((4, 16, "nvfp4", True), (8, 32, "mxfp8")),
]


def records_of(files, layer, direct=True):
    """Returns the records [experts, bytes] that the reader brings, without the bytes up to the stride."""
    layout, reader = files.layout, ExpertReader(files, direct=direct, workers=2)
    record = layout.records[layer]
    memory = np.frombuffer(memoryview(private_pages(layout.layer_bytes(layer))), np.uint8).reshape(-1, record.stride)
    reads = [reader.prepare(layer, expert, memory[expert].data) for expert in range(layout.num_experts)]
    for read in list(map(reader.submit, reads)):
        read.result()
    reader.close()
    return memory[:, : record.size]


@settings(max_examples=examples(12))
@given(
    family=st.sampled_from(FAMILIES),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
    residues=st.lists(st.integers(0, 15), min_size=3, max_size=3),
    padded=st.booleans(),
    direct=st.booleans(),
)
def test_records_and_tensors_are_those_of_the_packed_model(
    tmp_path_factory, family, count, seed, residues, padded, direct
):
    path = write_model(tmp_path_factory.mktemp("checkpoint"), family, "mlx4", count, seed, residues, padded)
    there = tiny_directory(family)
    weights, packed = open_weights(Located(path)), open_weights(Located(there))
    assert weights.in_place and not packed.in_place and weights.args.quantization == packed.args.quantization
    for layer in weights.experts.layout.moe_layers:
        assert np.array_equal(records_of(weights.experts, layer, direct), records_of(packed.experts, layer))
    have_the_same_tensors(weights, there)


def have_the_same_tensors(weights, packed):
    """The resident tensors are those of the packed model in a directory, bit by bit."""
    tensors, stored = weights.read(), read_resident(packed)
    assert {name: (one.dtype, one.shape) for name, one in weights.shapes.items()} == {
        name: (one.dtype, one.shape) for name, one in stored.items()
    }
    for name, one in stored.items():
        assert mx.array_equal(tensors[name].view(mx.uint8), one.view(mx.uint8)), name


@pytest.mark.parametrize("residue", range(16))
def test_every_residue_of_offsets(tmp_path, residue):
    path = write_model(tmp_path, "qwen3_moe", count=1, residues=[residue])
    files = open_in_place(Located(path)).experts
    assert {piece.offset % 2 for piece in files.pieces(0, 0)} == {residue % 2}
    packed = open_packed(tiny_directory("qwen3_moe"), open_in_place(Located(path)).args)
    assert np.array_equal(records_of(files, 1), records_of(packed, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_three_ways_one_answer(tmp_path, family):
    """The model is converted, or in place with the smallest pool, or in place with all experts in memory."""
    path = write_model(tmp_path, family, count=2, seed=3, residues=[5, 11])
    tokens, wanted = goldens.golden(family)
    logits = {}
    for name, options in {
        "packed": {"path_or_hf_repo": tiny_directory(family)},
        "streamed": {"path_or_hf_repo": path, "expert_io": "pread", "expert_cache_bytes": 1},
        "resident": {"path_or_hf_repo": path},
    }.items():
        model = load_model(dtype=mx.float32, **options)
        assert model.experts.mode.value == {"packed": "mmap", "streamed": "pread", "resident": "resident"}[name]
        logits[name] = [np.array(model(mx.array(tokens)[None]))]
        cache = model.make_cache()
        model(mx.array(tokens[:-1])[None], cache)
        logits[name].append(np.array(model(mx.array(tokens[-1:])[None], cache)))
        model.experts.close()
    assert np.abs(logits["packed"][0][0] - wanted).max() < TOLERANCE
    for name in ("streamed", "resident"):
        assert all(map(np.array_equal, logits[name], logits["packed"])), name


@pytest.mark.parametrize("forms", FORMS)
def test_every_geometry_gives_the_packed_models_records(tmp_path, forms):
    usual, down = (Quant(*form) for form in forms)
    path, packed = converted(tmp_path, usual, down)
    experts = open_in_place(Located(path)).experts
    there = open_packed(packed, ModelArgs.from_file(packed))
    assert experts.layout == there.layout and experts.layout.records[0].quants == (usual, usual, down)
    assert len(experts.pieces(0, 1)) == len(experts.layout.records[0].fields)
    for layer in experts.layout.moe_layers:
        assert np.array_equal(records_of(experts, layer), records_of(there, layer))


def converted(folder, usual, down):
    """Returns a checkpoint with experts in these forms, and the packed model of it."""
    path = write_model(folder / "checkpoint", "qwen3_moe", residues=[7, 12], forms=(usual, down))
    convert(path, folder / "packed")
    return path, folder / "packed"


@pytest.mark.parametrize("forms", FORMS)
def test_every_geometry_gives_the_packed_models_bits(tmp_path, forms):
    path, packed = converted(tmp_path, *(Quant(*form) for form in forms))
    tokens, logits = goldens.golden("qwen3_moe")[0], []
    for where, mode in ((packed, "mmap"), (path, "pread"), (path, "resident")):
        model = load_model(where, dtype=mx.float32, expert_io=mode, expert_cache_bytes=1)
        logits.append(np.array(model(mx.array(tokens)[None])))
        model.experts.close()
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("family", goldens.families())
def test_every_family_has_the_packed_models_bytes_and_its_own_fingerprint(tmp_path, family):
    path = write_model(tmp_path / "checkpoint", family, count=2, seed=1)
    with on_cpu():
        convert(path, tmp_path / "packed")
    weights, packed = open_weights(Located(path)), open_weights(Located(tmp_path / "packed"))
    have_the_same_tensors(weights, tmp_path / "packed")
    for layer in weights.experts.layout.moe_layers:
        assert np.array_equal(records_of(weights.experts, layer), records_of(packed.experts, layer))
    here = model_fingerprint(path, mx.float32)
    assert here == model_fingerprint(path, mx.float32) != model_fingerprint(tmp_path / "packed", mx.float32)
    file, place = next((piece.path, piece.offset) for piece in open_in_place(Located(path)).experts.pieces(2, 0))
    data = np.array(bytearray(file.read_bytes()))
    data[place:] ^= 255
    file.write_bytes(data.tobytes())
    assert model_fingerprint(path, mx.float32).difference(here) == "another model"


@pytest.mark.parametrize("family", AGREED)
def test_mlx_lm_runs_the_same_directory(tmp_path, family):
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")
    path = write_model(tmp_path, family, count=2, seed=5)
    tokens = mx.array(goldens.golden(family)[0])[None]
    with on_cpu():  # mlx-lm 0.32.2's gated delta rule gives other results on an NVIDIA GPU: logits differ by 3
        theirs, _ = utils.load_model(path)
        theirs.set_dtype(mx.float32)
        wanted = np.array(theirs(tokens))
    got = np.array(load_model(path, dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)(tokens))
    assert np.abs(wanted - got).max() < TOLERANCE and np.array_equal(wanted.argmax(-1), got.argmax(-1))


@pytest.mark.parametrize(("forms", "field", "value"), [(FORMS[0], 7, b"\xc0\x7f"), (FORMS[3], 5, b"\xff")])
def test_a_nan_scale(tmp_path, forms, field, value):
    path = write_model(tmp_path, "qwen3_moe", residues=[7, 12], forms=[Quant(*form) for form in forms])
    piece = open_in_place(Located(path)).experts.pieces(1, 3)[field]
    assert model_is_read(path) is None
    with open(piece.path, "r+b") as opened:
        opened.seek(piece.offset + 2)
        opened.write(value)
    name = open_in_place(Located(path)).experts.layout.records[1].fields[field].name
    assert f"{piece.path}: {name} of expert 3 of layer 1 holds NaN or infinite values" in model_is_read(path)
    with pytest.raises(ModelFileError, match="NaN"):
        convert(path, tmp_path / "packed")
    streamed = load_model(path, dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    streamed.experts.request(1, np.array([2])).wait()
    with pytest.raises(ExpertIOError, match=f"{name} of expert 3 of layer 1 holds NaN or infinite values"):
        streamed.experts.request(1, np.array([3])).wait()
    streamed.experts.close()


def model_is_read(path):
    """Returns the lines that are printed while all experts are read into memory, if any."""
    try:
        load_model(path, dtype=mx.float32).experts.close()
    except ModelFileError as error:
        return str(error)


def test_a_configuration_is_read_once(tmp_path, monkeypatch):
    made, make = [], ModelArgs.from_dict.__func__
    monkeypatch.setattr(ModelArgs, "from_dict", classmethod(lambda cls, *given: made.append(1) or make(cls, *given)))
    load_model(write_model(tmp_path, "qwen3_moe", count=1)).experts.close()
    assert made == [1]


def test_experts_as_floats_must_be_converted(tmp_path):
    path = write_model(tmp_path, "qwen3_moe", count=1)
    tensors = goldens.variant_tensors("qwen3_moe", "mlx4")
    stem = "model.layers.1.mlp.switch_mlp.up_proj."
    codes = tensors[f"{stem}weight"][1]
    left = {name: one for name, one in tensors.items() if not name.startswith(stem)}
    left[f"{stem}weight"] = ("BF16", np.zeros((*codes.shape[:2], codes.shape[2] * 8), np.uint16))
    write_shards(path, [left])
    with pytest.raises(NotPackedError, match=rf"layers\.1.*has floats, BF16; .*run: python.*--hf-path {path} "):
        open_in_place(Located(path))


def test_a_tensor_that_is_missing(tmp_path):
    path = write_model(tmp_path, "qwen3_moe", count=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(ModelFileError, match="missing"):
        open_in_place(Located(path))
