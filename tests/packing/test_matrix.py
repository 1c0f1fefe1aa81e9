"""Matrices of a checkpoint: dequantisation and quantisation compared with the oracle, in every stored form."""

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.checkpoint import read_header
from moeflux_mlx.packing import matrix
from moeflux_mlx.packing.expert_parts import find_matrix
from moeflux_mlx.packing.matrix import Matrix
from moeflux_mlx.packing.source_format import SourceFormat
from moeflux_mlx.quant import MLX_MODES, Quant

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
pytestmark = pytest.mark.usefixtures("cpu_device")
MLX = {"quantization": {"group_size": 64, "bits": 4}}
NAMED = {"quantization": {**MLX["quantization"], "m": MLX["quantization"]}}


def stored(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    goldens.write_safetensors(path, tensors)
    return read_header(path)


def matrix_of(tmp_path, tensors, shape, config):
    return find_matrix(stored(tmp_path, tensors), "m", shape, SourceFormat(config))


def triplet(w, bits=4):
    """Returns the three tensors of a stored matrix, computed by the oracle."""
    weight, scales, biases = oracle.quantize(w, bits=bits)
    return {"m.weight": ("U32", weight), "m.scales": ("BF16", scales), "m.biases": ("BF16", biases)}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_numpy(array):
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@settings(max_examples=examples(25))
@given(rows=st.integers(1, 300), cols=st.integers(1, 300), data=st.data())
def test_fp8_blocks_with_partial_ends(tmp_path_factory, rows, cols, data):
    rng = np.random.default_rng(rows * 1000 + cols)
    codes = rng.integers(0, 127, (rows, cols), dtype=np.uint8)
    scale = rng.uniform(0.01, 2, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
    kind = data.draw(st.sampled_from(["F32", "BF16"]))
    held = ("F32", scale) if kind == "F32" else ("BF16", oracle.f32_to_bf16(scale))
    tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": held}
    made = matrix_of(tmp_path_factory.mktemp("fp8"), tensors, (rows, cols), FP8)
    wanted = oracle.dequantize_fp8(codes, scale if kind == "F32" else oracle.bf16_to_f32(held[1]))
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert np.array_equal(np.array(made.values(start, stop)), wanted[start:stop])


def test_fp8_is_dequantised_in_float32(tmp_path):
    codes = np.random.default_rng(0).integers(0, 127, (64, 128), dtype=np.uint8)
    scale = np.array([[0.3]], np.float32)
    tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scale)}
    got = np.array(matrix_of(tmp_path, tensors, (64, 128), FP8).values())
    assert np.array_equal(got, oracle.dequantize_fp8(codes, scale))
    in_bf16 = np.array((mx.from_fp8(mx.array(codes)) * mx.array(scale).astype(mx.bfloat16)).astype(mx.float32))
    assert not np.array_equal(got, in_bf16)


def test_a_stack_of_fp8_matrices(tmp_path):
    rng = np.random.default_rng(0)
    codes, scale = (
        rng.integers(0, 127, (3, 192, 64), dtype=np.uint8),
        rng.uniform(1, 2, (3, 2, 1)).astype(np.float32),
    )
    tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scale)}
    made = matrix_of(tmp_path, tensors, codes.shape, FP8)
    assert np.array_equal(np.array(made[1].values(96, 192)), oracle.dequantize_fp8(codes[1], scale[1])[96:])
    assert np.array_equal(np.array(made.values())[2], oracle.dequantize_fp8(codes[2], scale[2]))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bytes_are_those_of_mx_quantize_on_bfloat16(tmp_path, monkeypatch, kind, bits):
    w = normal(10, 128)
    held = {"F32": w, "F16": w.astype(np.float16), "BF16": oracle.f32_to_bf16(w)}[kind]
    path = tmp_path / "x.safetensors"
    mx.save_safetensors(str(path), {"m.weight": mx.array(held).view(mx.bfloat16) if kind == "BF16" else mx.array(held)})
    made = find_matrix(read_header(path), "m", (10, 128), SourceFormat({}))
    values = oracle.bf16_to_f32(held) if kind == "BF16" else held
    wanted = mx.quantize(mx.array(values).astype(mx.bfloat16), 64, bits)
    by_oracle = oracle.quantize(oracle.bf16_to_f32(oracle.f32_to_bf16(values.astype(np.float32))), bits=bits)
    for chunk in (1 << 24, 300):  # a chunk of two rows
        monkeypatch.setattr(matrix, "CHUNK_VALUES", chunk)
        for got, one, other in zip(made.quantized(Quant(bits, 64), "minmax"), wanted, by_oracle, strict=True):
            assert np.array_equal(as_numpy(got), as_numpy(one))
            assert np.array_equal(as_numpy(got), other)


def test_affine_codes_come_as_stored_and_dequantise_in_float32(tmp_path):
    tensors = triplet(normal(6, 128))
    made = matrix_of(tmp_path, tensors, (6, 128), MLX)
    assert made.quant == Quant(4, 64)
    for got, (_, wanted) in zip(made.codes(), tensors.values(), strict=True):
        assert np.array_equal(as_numpy(got), wanted)
    wanted = oracle.dequantize(*(array for _, array in tensors.values()))
    assert np.abs(np.array(made.values(2, 5)) - wanted[2:5]).max() < 1e-6


@pytest.mark.parametrize(("group_size", "bits", "mode"), [(64, 8, "affine"), (32, 4, "affine"), (64, 6, "affine")])
def test_other_affine_storage_is_told_from_shapes(tmp_path, group_size, bits, mode):
    parts = mx.quantize(mx.array(normal(4, 128)).astype(mx.bfloat16), group_size, bits)
    mx.save_safetensors(
        str(tmp_path / "x.safetensors"), dict(zip(("m.weight", "m.scales", "m.biases"), parts, strict=True))
    )
    config = {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
    made = find_matrix(read_header(tmp_path / "x.safetensors"), "m", (4, 128), SourceFormat(config))
    assert made.quant == Quant(bits, group_size)
    wanted = mx.dequantize(*parts, group_size, bits).astype(mx.float32)
    assert np.abs(np.array(made.values()) - np.array(wanted)).max() < 0.02


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_microscaling_modes_dequantise(tmp_path, mode):
    group_size, bits = MLX_MODES[mode].group_size, MLX_MODES[mode].bits
    weight, scales = mx.quantize(mx.array(normal(4, 128)), group_size, bits, mode)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"m.weight": weight, "m.scales": scales})
    config = {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
    made = find_matrix(read_header(tmp_path / "x.safetensors"), "m", (4, 128), SourceFormat(config))
    wanted = mx.dequantize(weight, scales, None, group_size, bits, mode, dtype=mx.float32)
    assert np.array_equal(np.array(made.values(1, 3)), np.array(wanted)[1:3])
    with pytest.raises(ModelFileError, match="stored with"):
        find_matrix(read_header(tmp_path / "x.safetensors"), "m", (4, 128), SourceFormat(NAMED))


@pytest.mark.parametrize("mode, value", [("mxfp4", 0xFF), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])  # E4M3 has a signed NaN
def test_a_nan_scale_of_8_bits(tmp_path, mode, value):
    weight, scales = mx.quantize(mx.array(normal(4, 128)), MLX_MODES[mode].group_size, 4, mode)
    scales[2, 1] = value
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"m.weight": weight, "m.scales": scales})
    config = {"quantization": {"mode": mode}}
    made = find_matrix(read_header(tmp_path / "x.safetensors"), "m", (4, 128), SourceFormat(config))
    assert len(made.rows(0, 2).codes()) == 2
    for use in (made.codes, made.values):
        with pytest.raises(ModelFileError, match=r"tensor m\.scales holds NaN"):
            use()


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("value", [0x7FC0, 0xFF80])  # NaN, -infinity
def test_infinite_and_nan_scales(tmp_path, part, value):
    tensors = triplet(normal(4, 64))
    tensors[f"m.{part}"][1][2, 0] = value
    made = matrix_of(tmp_path, tensors, (4, 64), MLX)
    for use in (made.codes, made.values):
        with pytest.raises(ModelFileError, match=rf"tensor m\.{part} holds NaN"):
            use()


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_nan_weights(tmp_path, kind):
    w = normal(4, 64)
    w[3, 3] = np.nan
    held = w if kind == "F32" else w.view(np.uint32).__rshift__(16).astype(np.uint16)
    with pytest.raises(ModelFileError, match=r"tensor m\.weight holds NaN"):
        matrix_of(tmp_path, {"m.weight": (kind, held)}, (4, 64), {}).quantized(Quant(4, 64), "minmax")


def test_a_float32_too_large_for_bfloat16(tmp_path):
    w = normal(4, 64)
    w[0, 0] = np.finfo(np.float32).max
    with pytest.raises(ModelFileError, match=r"tensor m\.weight holds NaN or infinite"):
        matrix_of(tmp_path, {"m.weight": ("F32", w)}, (4, 64), {}).quantized(Quant(4, 64), "minmax")


@pytest.mark.parametrize("where", ["weight", "weight_scale_inv"])
def test_nan_in_fp8(tmp_path, where):
    codes, scale = np.full((4, 64), 0x38, np.uint8), np.ones((1, 1), np.float32)
    if where == "weight":
        codes[2, 2] = 0x7F
    else:
        scale[0, 0] = np.inf
    tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scale)}
    with pytest.raises(ModelFileError, match=rf"tensor m\.{where} holds NaN"):
        matrix_of(tmp_path, tensors, (4, 64), FP8).quantized(Quant(4, 64), "minmax")


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"m.weight": None}, MLX, "m.weight is missing"),
        ({"m.biases": None}, MLX, "m.biases is missing"),
        ({"m.scales": ("BF16", np.zeros((4, 2), np.uint16))}, MLX, "m.biases has shape"),
        ({"m.scales": ("F8_E4M3", np.zeros((4, 1), np.uint8))}, MLX, "m.scales is F8_E4M3"),
        ({"m.weight": ("BF16", np.zeros((4, 64), np.uint16))}, MLX, "m.weight is BF16; expected U32"),
        ({"m.weight": ("U32", np.zeros((4, 16), np.uint32))}, NAMED, "stored with 8 bits.* says 4 bits"),
        ({"m.weight": ("U32", np.zeros((4, 14), np.uint32))}, {}, "m.weight with shape"),
        ({"m.weight": ("U32", np.zeros((3, 8), np.uint32))}, MLX, "m.weight has shape"),
        ({}, {"quantization": {**MLX["quantization"], "m": {"bits": 8}}}, "config.json says 8 bits"),
        ({}, {"quantization": {**MLX["quantization"], "language_model.m": False}}, "config.json says None"),
    ],
)  # fmt: skip
def test_storage_that_contradicts_itself(tmp_path, change, config, message):
    tensors = {name: t for name, t in {**triplet(normal(4, 64)), **change}.items() if t is not None}
    with pytest.raises(ModelFileError, match=message):
        matrix_of(tmp_path, tensors, (4, 64), config)


def test_fp8_scales_of_another_shape(tmp_path):
    tensors = {
        "m.weight": ("F8_E4M3", np.zeros((130, 64), np.uint8)),
        "m.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
    }
    with pytest.raises(ModelFileError, match=r"m\.weight_scale_inv has shape \[1, 1\]; the model needs \[2, 1\]"):
        matrix_of(tmp_path, tensors, (130, 64), FP8)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        {"quantization": {"group_size": 64, "bits": 7}},
        {"quantization": {"group_size": 64, "bits": 4, "mode": "mystery"}},
        {"quantization": {"group_size": 64, "bits": 4, "mode": ["affine"]}},
        {"quantization": {"group_size": 64, "bits": 4, "m": {"bits": "4"}}},
        {"quantization": [4]},
    ],
)
def test_quantisation_that_is_not_known(config):
    with pytest.raises(ConfigError):
        SourceFormat(config)


def test_a_quantization_config_that_repeats_mlx_settings():
    form = SourceFormat({"quantization_config": {"group_size": 64, "bits": 8}})
    assert form.mlx and form.of("m") == Quant(8, 64)
    both = {**MLX, "quantization_config": {"quant_method": "fp8"}}  # left over from an earlier checkpoint
    assert SourceFormat(both).of("m") == Quant(4, 64)


def test_a_matrix_names_its_tensors(tmp_path):
    made = matrix_of(tmp_path, triplet(normal(4, 64)), (4, 64), MLX)
    assert isinstance(made, Matrix)
    assert [t.name for t in made.tensors] == ["m.weight", "m.scales", "m.biases"]
