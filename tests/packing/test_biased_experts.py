"""Experts with biases in every form of checkpoint: the same records, and the same logits from every source."""

import json
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from test_foreign import MXFP4 as PUBLISHED
from test_foreign import block_tensors, write
from test_in_place import records_of
from tiny_models import on_cpu

from moeflux_mlx import load_model
from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.formats.checkpoint import read_header
from moeflux_mlx.formats.layout_file import OPEN_VERSION
from moeflux_mlx.kinds import Activation
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.located import Located
from moeflux_mlx.quant import Quant

FAMILY = "qwen3_moe"
IN_PLACE = ("pread", "resident")
MXFP4, ROWS = Quant(4, 32, "mxfp4"), ("gate_proj", "up_proj", "down_proj")


def with_biases(fields):
    """Returns the fields of a family whose experts are like those of gpt-oss, with limits that differ by layer."""
    plain = PLAIN.read(fields)
    layers = []
    for i, layer in enumerate(plain["layers"]):
        part = layer.feed_forward
        activation = Activation("clip then swish", 0.1 + 0.2 * i)
        part = replace(part, biases=True, activation=activation, router=replace(part.router, logit_bias=True))
        layers.append(replace(layer, feed_forward=part))
    return plain | {"layers": tuple(layers)}


PLAIN = FAMILIES[FAMILY]
BIASED = replace(PLAIN, read=with_biases, interleaved_experts=True)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, FAMILY, BIASED)
    with on_cpu():
        yield


def words(values):
    """Returns an array of MLX as numpy, bfloat16 as uint16."""
    return np.array(values.view(mx.uint16) if values.dtype == mx.bfloat16 else values)


class Checkpoint:
    """Random experts in several forms, with the resident tensors of the golden model."""

    def __init__(self, folder):
        self.folder = goldens.write_variant(folder / "plain", FAMILY, "mlx4")
        self.config = json.loads((self.folder / "config.json").read_text())
        self.sizes = tuple(self.config[name] for name in ("hidden_size", "moe_intermediate_size"))
        self.count, self.layers = self.config.get("num_experts", 0), self.config["num_hidden_layers"]
        rng = np.random.default_rng(3)
        self.resident = {
            name: (tensor.dtype, words(tensor.read()))
            for file in self.folder.glob("*.safetensors")
            for name, tensor in read_header(file).items()
            if ".switch_mlp." not in name
        }
        self.experts = {}
        (H, I), E = self.sizes, self.count
        for layer in range(self.layers):
            stem = f"model.layers.{layer}.mlp"
            self.resident[f"{stem}.gate.bias"] = ("F32", rng.standard_normal(E, dtype=np.float32))
            for name, (rows, columns) in zip(ROWS, ((I, H), (I, H), (H, I)), strict=True):
                codes, exponents = (
                    rng.integers(0, 16, (E, rows, columns)),
                    rng.integers(119, 123, (E, rows, columns // 32)),
                )
                bias = (rng.standard_normal((E, rows), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
                self.experts[f"{stem}.experts", name] = codes, exponents, bias

    def saved(self, path, tensors, quantization):
        path.mkdir(parents=True)
        config = {key: value for key, value in self.config.items() if not key.startswith("quantization")}
        (path / "config.json").write_text(json.dumps({**config, **quantization}))
        write(path / "model.safetensors", {**self.resident, **tensors})
        return path

    def stated(self):
        """Returns what mlx-lm writes into config.json."""
        return {"quantization": {**self.config["quantization"], **{f"{p}.{n}": MXFP4.entry() for p, n in self.experts}}}

    def of_mlx(self, path):
        """Writes mlx-lm's form: a stack for each matrix, with eight codes to a word."""
        tensors = {}
        for (stem, name), (codes, exponents, bias) in self.experts.items():
            words = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
            tensors[f"{stem}.{name}.weight"] = "U32", np.bitwise_or.reduce(words, axis=-1)
            tensors[f"{stem}.{name}.scales"] = "U8", exponents.astype(np.uint8)
            tensors[f"{stem}.{name}.bias"] = "BF16", bias
        return self.saved(path, tensors, self.stated())

    def fused(self, stem):
        """Returns rows of gate and up in turn, by array: codes, exponents and biases."""
        pairs = zip(self.experts[stem, ROWS[0]], self.experts[stem, ROWS[1]], strict=True)
        return [np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:]) for gate, up in pairs]

    def published(self, path, fault=lambda parts: parts, mlx=True):
        """Writes OpenAI's form. With `mlx`, the other tensors are quantised by MLX."""
        tensors = {}
        for stem in dict.fromkeys(stem for stem, _ in self.experts):
            for name, parts in (("gate_up_proj", fault(self.fused(stem))), (ROWS[2], self.experts[stem, ROWS[2]])):
                tensors |= block_tensors(f"{stem}.{name}", *parts[:2])
                tensors[f"{stem}.{name}_bias"] = "BF16", parts[2]
        stated = {"quantization": self.config["quantization"]} if mlx else {}
        return self.saved(path, tensors, stated | {"quantization_config": PUBLISHED})

    def floats(self, path, transposed):
        """Writes transformers' own form: a stack [experts, columns, rows], or the matrices of each expert apart."""
        tensors = {}
        for stem in dict.fromkeys(stem for stem, _ in self.experts):
            if transposed:
                for name, parts in (("gate_up_proj", self.fused(stem)), (ROWS[2], self.experts[stem, ROWS[2]])):
                    tensors[f"{stem}.{name}"] = "F32", np.float32(parts[0] - 7).swapaxes(-1, -2)
                    tensors[f"{stem}.{name}_bias"] = "BF16", parts[2]
                continue
            for name in ROWS:
                codes, _, bias = self.experts[stem, name]
                for expert in range(self.count):
                    tensors[f"{stem}.{expert}.{name}.weight"] = "F32", np.float32(codes[expert] - 7)
                    tensors[f"{stem}.{expert}.{name}.bias"] = "BF16", bias[expert]
        return self.saved(path, tensors, {"quantization": self.config["quantization"]})


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path)


def packed(path):
    convert(path, path.with_name(path.name + "-packed"))
    return path.with_name(path.name + "-packed")


def files_of(path):
    return {file.name: file.read_bytes() for file in sorted((path / "packed_experts").iterdir())}


def test_every_form_of_one_model_makes_the_same_records(checkpoint, tmp_path):
    want = files_of(packed(checkpoint.of_mlx(tmp_path / "mlx")))
    assert json.loads(want["layout.json"])["format_version"] == OPEN_VERSION
    assert files_of(packed(checkpoint.published(tmp_path / "published"))) == want
    turned = files_of(packed(checkpoint.published(tmp_path / "turned", lambda parts: [p[:, ::-1] for p in parts])))
    assert turned["layer_00.bin"] != want["layer_00.bin"], "the order of rows makes no difference"
    floats = [files_of(packed(checkpoint.floats(tmp_path / str(turned), turned))) for turned in (True, False)]
    assert floats[0] == floats[1] and floats[0] != want


def logits_of(model):
    """Returns the logits of a prompt and of the steps after it."""
    cache = model.make_cache()
    calls = ([*range(3, 40)], [5], [9, 11, 2], [7])
    return [np.array(model(mx.array([ids]), cache).astype(mx.float32)) for ids in calls]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_logits_do_not_depend_on_where_experts_are(checkpoint, tmp_path, dtype):
    path = checkpoint.of_mlx(tmp_path / "mlx")
    there = packed(path)
    want = logits_of(load_model(there, dtype=dtype, expert_io="resident"))
    turns = checkpoint.published(tmp_path / "published")
    folders = [(there, "pread"), (there, "mmap"), *((folder, how) for folder in (path, turns) for how in IN_PLACE)]
    for folder, how in folders:
        assert all(map(np.array_equal, logits_of(load_model(folder, dtype=dtype, expert_io=how)), want)), how


def test_what_is_published_runs_as_it_lies(checkpoint, tmp_path):
    """The matrices of its other parts, which have no codes, are used as they are."""
    there = goldens.write_variant(tmp_path / "floats", FAMILY, "transformers5")
    tensors = read_header(there / "model.safetensors").items()
    floats = {name: (one.dtype, words(one.read())) for name, one in tensors if ".experts." not in name}
    biases = {name: one for name, one in checkpoint.resident.items() if name.endswith(".gate.bias")}
    checkpoint.resident, checkpoint.config = floats | biases, json.loads((there / "config.json").read_text())
    weights = open_weights(Located(checkpoint.published(tmp_path / "published", mlx=False)))
    assert weights.in_place and weights.args.quantization.of("lm_head") is None
    assert all(np.array_equal(words(one), checkpoint.resident[name][1]) for name, one in weights.read().items())
    assert np.isfinite(logits_of(load_model(weights.path, dtype=mx.float32))[0]).all()


def test_records_in_place_are_those_of_the_packed_model(checkpoint, tmp_path):
    path = checkpoint.of_mlx(tmp_path / "mlx")
    in_place, there = open_weights(Located(path)), open_weights(Located(packed(path)))
    assert in_place.in_place and not there.in_place
    for layer in in_place.experts.layout.moe_layers:
        assert np.array_equal(records_of(in_place.experts, layer), records_of(there.experts, layer))


def test_a_bias_that_is_missing_is_named(checkpoint, tmp_path):
    path = checkpoint.of_mlx(tmp_path / "mlx")
    (path / "model.safetensors").rename(tmp_path / "whole")
    name = "model.layers.0.mlp.experts.up_proj.bias"
    tensors = {one: tensor for one, tensor in read_header(tmp_path / "whole").items() if one != name}
    kept = {one: (tensor.dtype, words(tensor.read())) for one, tensor in tensors.items()}
    write(path / "model.safetensors", kept)
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing"):
        packed(path)
