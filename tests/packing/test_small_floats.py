"""Small floats as publishers store them, compared with values calculated from the formats' definitions."""

import json

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from geometries import E2M1, e4m3, spread, unpacked
from safetensors_writer import write_unpadded
from tiny_models import on_cpu

from moeflux_mlx import load_model
from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.files import read_json, tagged
from moeflux_mlx.formats.checkpoint import read_config, read_header
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.packing.expert_parts import find_matrix
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.source_format import SourceFormat
from moeflux_mlx.quant import Quant
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.usefixtures("cpu_device")
TOLERANCE = 2e-4
MXFP4, MXFP8 = Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8")
NVFP4 = Quant(4, 16, "nvfp4", has_global_scale=True)


def quantized(values, mode):
    """Returns bytes of codes and of scales, as `mx.quantize` makes them, and their values in float64."""
    quant = {"mxfp4": MXFP4, "mxfp8": MXFP8}[mode]
    codes, scales = map(np.array, mx.quantize(mx.array(values), quant.group_size, quant.bits, mode))
    bits = unpacked(codes, quant.bits)
    powers = spread(2.0 ** (scales.astype(np.float64) - 127), 32)
    return codes.view(np.uint8), scales, (e4m3(bits) if mode == "mxfp8" else E2M1[bits]) * powers


def mxfp4_packed(path, values):
    """Writes compressed-tensors' "mxfp4-pack-quantized"."""
    codes, scales, wanted = quantized(values, "mxfp4")
    return {f"{path}.weight_packed": ("U8", codes), f"{path}.weight_scale": ("U8", scales)}, wanted


def mxfp4_bytes(path, values):
    """Writes MiMo-V2.6's experts, next to fp8 in blocks (mlx-vlm 0.7.10, `mimo_v2/language.py`)."""
    codes, scales, wanted = quantized(values, "mxfp4")
    return {f"{path}.weight": ("U8", codes), f"{path}.weight_scale": ("U8", scales)}, wanted


def mxfp8(path, values):
    """Writes MiniMax's form, which is compressed-tensors' "mxfp8-quantized" except for the scales' name."""
    codes, scales, wanted = quantized(values, "mxfp8")
    return {f"{path}.weight": ("F8_E4M3", codes), f"{path}.weight_scale_inv": ("U8", scales)}, wanted


def blocks(path, values, size=128, dtype="F8_E8M0"):
    """Writes DeepSeek's fp8 with scales that are powers of two, one for `size` rows and columns."""
    rows, columns = values.shape
    exponents = np.random.default_rng(rows).integers(112, 118, (-(-rows // size), -(-columns // size)))
    scale = np.repeat(np.repeat(2.0 ** (exponents - 127.0), size, 0), size, 1)[:rows, :columns]
    codes = np.array(mx.to_fp8(mx.array((values / scale).astype(np.float32))))
    stored = {f"{path}.weight": ("F8_E4M3", codes), f"{path}.weight_scale_inv": (dtype, exponents.astype(np.uint8))}
    return stored, e4m3(codes.astype(np.int64)) * scale


def nvfp4(path, values, divides):
    """Writes compressed-tensors' "nvfp4-pack-quantized" if the global scale `divides`, otherwise ModelOpt's form."""
    largest = mx.array(np.abs(values).max(), mx.float32)
    codes, scales = map(np.array, mx.quantize(mx.array(values), 16, 4, "nvfp4", global_scale=largest))
    factor = np.float32(2688 / largest.item()) if divides else np.float32(largest.item() / 2688)
    bytes_of = codes.view(np.uint8)
    wanted = E2M1[unpacked(codes, 4)] * spread(e4m3(scales.astype(np.int64)), 16)
    wanted = wanted / np.float64(factor) if divides else wanted * np.float64(factor)
    if divides:
        stored = {"weight_packed": ("U8", bytes_of), "weight_global_scale": ("F32", factor.reshape(1))}
    else:
        stored = {"weight": ("U8", bytes_of), "weight_scale_2": ("F32", factor)}
        stored["input_scale"] = ("F32", np.float32(1))
    stored["weight_scale"] = ("F8_E4M3", scales)
    return {f"{path}.{name}": one for name, one in stored.items()}, wanted


def compressed(form):
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {}}


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FORMS = {
    "mxfp4 of compressed-tensors": (mxfp4_packed, compressed("mxfp4-pack-quantized"), MXFP4),
    "mxfp4 of MiMo": (mxfp4_bytes, {"quant_method": "fp8", "weight_block_size": [128, 128]}, MXFP4),
    "mxfp8": (mxfp8, {"quant_method": "mxfp8"}, MXFP8),
    "fp8 in blocks": (blocks, DEEPSEEK, MXFP8),
    "nvfp4 of compressed-tensors": (lambda *it: nvfp4(*it, True), compressed("nvfp4-pack-quantized"), NVFP4),
    "nvfp4 of ModelOpt": (lambda *it: nvfp4(*it, False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
}


def drawn(*shape):
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32) / 16


def matrix_of(tmp_path, tensors, shape, hub):
    write_unpadded(tmp_path / "x.safetensors", tensors)
    return find_matrix(read_header(tmp_path / "x.safetensors"), "m", shape, SourceFormat({"quantization_config": hub}))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", [(160, 320), (48, 64)])
def test_values_are_those_of_the_definition(tmp_path, name, shape):
    make, hub, quant = FORMS[name]
    tensors, wanted = make("m", drawn(*shape))
    matrix = matrix_of(tmp_path, tensors, shape, hub)
    assert matrix.quant == quant
    assert np.allclose(np.array(matrix.values()), wanted, rtol=3e-7, atol=0)
    assert np.allclose(np.array(matrix.rows(7, 40).rows(3, 30).values()), wanted[10:37], rtol=3e-7, atol=0)
    assert len(matrix.codes()) == len(quant.parts)


def test_blocks_of_a_fused_matrix_begin_anew_in_each_shard(tmp_path):
    halves = [blocks(f"{i}", drawn(80 + i, 128)[:80]) for i in range(2)]
    stored = {
        f"m.{end}": (kind, np.concatenate([tensors[f"{i}.{end}"][1] for i, (tensors, _) in enumerate(halves)]))
        for end, (kind, _) in ((key[2:], one) for key, one in halves[0][0].items())
    }
    write_unpadded(tmp_path / "x.safetensors", stored)
    form = SourceFormat({"quantization_config": DEEPSEEK})
    matrix = find_matrix(read_header(tmp_path / "x.safetensors"), "m", (160, 128), form, shards=2)
    assert np.array_equal(np.array(matrix.values()), np.concatenate([wanted for _, wanted in halves]))


def write_model(folder, make, hub):
    """Writes the family's tiny model with experts in this form.

    Returns all weights in float64 under the hub's names.
    """
    tensors, weights = {}, {}
    for name, tensor in goldens.split_experts(goldens.source("qwen3_moe")).items():
        values = goldens.as_float(tensor)
        weights[name], tensors[name] = values.astype(np.float64), tensor
        if ".experts." in name:
            path = name.removesuffix(".weight")
            stored, weights[name] = make(path, values.astype(np.float32))
            del tensors[name]
            tensors |= stored
    folder.mkdir()
    write_unpadded(folder / "model.safetensors", tensors)
    config = goldens.variant_config("qwen3_moe", "hub")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": hub}))
    return weights


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_packed_without_a_loss(tmp_path, name):
    make, hub, quant = FORMS[name]
    weights = write_model(tmp_path / "source", make, hub)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert not report.lossy and not report.made_experts
    experts = open_packed(tmp_path / "out", ModelArgs.from_file(tmp_path / "out"))
    record = experts.layout.records[1]
    assert record.quants == (quant,) * 3
    rows = np.fromfile(experts.paths[1], np.uint8).reshape(-1, record.stride)
    for projection in record.projections:
        parts = {field.part: rows[3, field.offset : field.end] for field in projection.fields}
        bits = unpacked(parts["weight"].view(np.uint32).reshape(projection.rows, -1), quant.bits)
        scales = parts["scales"].reshape(projection.rows, -1).astype(np.int64)
        powers = e4m3(scales) if quant == NVFP4 else 2.0 ** (scales - 127.0)
        got = (e4m3(bits) if quant == MXFP8 else E2M1[bits]) * spread(powers, quant.group_size)
        if quant == NVFP4:
            got = got * (parts["global_scale"].view(np.float32)[0] / 2688)
        wanted = weights[f"model.layers.1.mlp.experts.3.{projection.name}.weight"]
        assert np.allclose(got, wanted, rtol=3e-7, atol=0), projection.name


@pytest.mark.parametrize("name", ["mxfp4 of compressed-tensors", "mxfp8"])
def test_forms_with_mlxs_bytes_run_in_place(tmp_path, name):
    make, hub, quant = FORMS[name]
    weights = write_model(tmp_path / "source", make, hub)
    tokens = goldens.golden("qwen3_moe")[0]
    wanted = oracle.forward(goldens.config("qwen3_moe"), weights, tokens)
    assert open_weights(Located(tmp_path / "source")).in_place
    for mode in ("pread", "resident"):
        with on_cpu():
            model = load_model(tmp_path / "source", dtype=mx.float32, expert_io=mode)
            got = np.array(model(mx.array(tokens)[None]))[0]
        assert model.experts.layout.records[0].quants == (quant,) * 3
        assert np.abs(got - wanted).max() < TOLERANCE
        model.experts.close()


def test_modelopts_file_beside_config_json_counts(tmp_path):
    make, _, _ = FORMS["nvfp4 of ModelOpt"]
    write_model(tmp_path / "source", make, {})
    config = read_json(tmp_path / "source" / "config.json")
    (tmp_path / "source" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "quant" not in k}))
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "source" / "hf_quant_config.json").write_text(json.dumps(stated))
    assert SourceFormat(read_config(tmp_path / "source")).method == "modelopt"
    assert convert(tmp_path / "source", tmp_path / "out").lossy == ()
    (tmp_path / "source" / "hf_quant_config.json").write_text('{"quantization": 4}')
    with pytest.raises(ModelFileError, match="hf_quant_config.json: 'quantization' is not an object"):
        convert(tmp_path / "source", tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nvfp4 of ModelOpt", {"m.weight_scale_2": None}, "m.weight_scale_2 or m.weight_global_scale is missing"),
        ("nvfp4 of ModelOpt", {"m.weight_scale_2": ("F32", np.float32(np.nan))}, "m.weight_scale_2 holds NaN"),
        ("nvfp4 of ModelOpt", {"m.weight_scale_2": ("BF16", np.uint16(1))}, "m.weight_scale_2 is BF16; expected F32"),
        ("nvfp4 of ModelOpt", {"m.weight_scale": ("F32", np.zeros((48, 4), np.float32))}, "is F32; expected F8_E4M3"),
        ("nvfp4 of compressed-tensors", {"m.weight_global_scale": ("F32", np.zeros(1, np.float32))}, "holds NaN"),
        ("mxfp8", {"m.weight": ("F8_E4M3", np.full((48, 64), 0x7F, np.uint8))}, "m.weight holds NaN"),
        ("mxfp8", {"m.weight_scale_inv": ("U8", np.full((48, 2), 255, np.uint8))}, "m.weight_scale_inv holds NaN"),
        ("mxfp8", {"m.weight_scale_inv": ("U8", np.zeros((48, 3), np.uint8))}, r"has shape \[48, 3\]"),
        ("fp8 in blocks", {"m.weight": ("F8_E4M3", np.zeros((48, 60), np.uint8))}, r"m.weight has shape \[48, 60\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, change, message):
    make, hub, _ = FORMS[name]
    tensors = {**make("m", drawn(48, 64))[0], **change}
    with pytest.raises(ModelFileError, match=message):
        given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        matrix_of(tmp_path, given, (48, 64), hub).values()


def test_blocks_that_are_not_groups(tmp_path):
    tensors, _ = blocks("m", drawn(48, 64), size=16)
    with pytest.raises(ModelFileError, match="has a scale for 16 columns; mxfp8 has one for 32"):
        matrix_of(tmp_path, tensors, (48, 64), {**DEEPSEEK, "weight_block_size": [16, 16]})


@pytest.mark.parametrize(
    ("hub", "words"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"},
            "'modelopt' cannot be converted: quant_algo 'INT4_AWQ'",
        ),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        (compressed("float-quantized"), "format 'float-quantized'"),
        (compressed(["nvfp4-pack-quantized"]), "format ['nvfp4-pack-quantized']"),
    ],
)
def test_what_is_refused_is_named(hub, words):
    with pytest.raises(ConfigError) as refused:
        SourceFormat({"quantization_config": hub})
    assert words in str(refused.value) and "supported: floats" in str(refused.value)


def test_a_tagged_float_is_one(tmp_path):
    config = {
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "other": {"__float__": "x"},
        "low": {"__float__": "NaN"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    value = read_json(tmp_path / "config.json")
    assert value["time_step_limit"] == [0.0, np.inf] and np.isnan(value["low"]) and value["other"] == {"__float__": "x"}
    assert tagged(value) == config and "Infinity" in json.dumps(tagged(value), allow_nan=False)


def test_a_module_that_config_json_does_not_name_is_told_by_its_tensors(tmp_path):
    """mlx-lm loads it in the same way: the form of the whole model is only a default."""
    weight, scales = mx.quantize(mx.array(drawn(48, 64)), 32, 8, "mxfp8")
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"m.weight": weight, "m.scales": scales})
    tensors = read_header(tmp_path / "x.safetensors")
    form = SourceFormat({"quantization": {"group_size": 64, "bits": 4}})
    assert find_matrix(tensors, "m", (48, 64), form).quant == MXFP8
    named = SourceFormat({"quantization": {"group_size": 64, "bits": 4, "m": {"group_size": 64, "bits": 8}}})
    with pytest.raises(ModelFileError, match="is stored with 8 bits, group_size 32, mode mxfp8; config.json says 8"):
        find_matrix(tensors, "m", (48, 64), named)
