"""Matrices in the forms of other tools, compared with values calculated by the tools' rules, and refusals."""

import json

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from minmax import convert
from test_convert import TINY, check_kept, write_tiny

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.checkpoint import read_header
from moeflux_mlx.formats.record import PROJECTIONS
from moeflux_mlx.packing.expert_parts import find_matrix
from moeflux_mlx.packing.source_format import SourceFormat
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
GROUP = 32
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": GROUP, "symmetric": True, "type": "int", "strategy": "group"},
        }
    },
    "ignore": ["lm_head"],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of a code's lowest three bits; the fourth is the sign (OCP MX, table 5)


def drawn(rows, columns, seed=0):
    """Returns codes 0..15 and positive scales in the range of float16 and bfloat16, as float32."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(1, 255, (rows, columns // GROUP)).astype(np.float32) / 1024
    return rng.integers(0, 16, (rows, columns)), scales, rng


def packed_tensors(path, codes, scales):
    """Packs integers -8..7 as compressed-tensors does: 8 is added, and eight go into an int32 from its low end."""
    rows, columns = codes.shape
    words = np.zeros((rows, columns // 8), np.uint64)
    for column in range(columns):
        words[:, column // 8] += codes[:, column].astype(np.uint64) << np.uint64(4 * (column % 8))
    return {
        f"{path}.weight_packed": ("I32", words.astype(np.uint32)),
        f"{path}.weight_scale": ("BF16", oracle.f32_to_bf16(scales)),
        f"{path}.weight_shape": ("I64", np.array([rows, columns])),
    }


def awq_tensors(path, codes, zeros, scales):
    """Packs along the output axis as AutoAWQ does: the k-th nibble of eight columns holds column order[k]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ, WQLinear_GEMM.from_linear, order_map

    def along(values):
        words = np.zeros((len(values), values.shape[1] // 8), np.uint64)
        for word in range(words.shape[1]):
            for nibble in range(8):
                words[:, word] |= values[:, 8 * word + order[nibble]].astype(np.uint64) << np.uint64(4 * nibble)
        return words.astype(np.uint32)

    return {
        f"{path}.qweight": ("I32", along(codes.T)),
        f"{path}.qzeros": ("I32", along(zeros.T)),
        f"{path}.scales": ("F16", scales.T.astype(np.float16)),
    }


def block_tensors(path, codes, exponents):
    """Packs mxfp4 as OpenAI publishes it: sixteen bytes for a group of 32, the first code in the low half."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 16, 2).astype(np.uint8)
    return {
        f"{path}_blocks": ("U8", pairs[..., 0] | pairs[..., 1] << 4),
        f"{path}_scales": ("U8", exponents.astype(np.uint8)),
    }


def write(path, tensors, config=None):
    """Writes tensors like goldens.write_safetensors, including integers."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        held = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return read_header(path)


def matrix_of(tmp_path, tensors, shape, hub):
    return find_matrix(
        write(tmp_path / "x.safetensors", tensors), "m", shape, SourceFormat({"quantization_config": hub})
    )


def wide(scales, columns):
    return np.repeat(scales, GROUP, axis=-1)[:, :columns].astype(np.float64)


def test_centred_integers_are_affine_exactly(tmp_path):
    codes, scales, _ = drawn(16, 96)
    matrix = matrix_of(tmp_path, packed_tensors("m", codes, scales), (16, 96), PACKED)
    assert matrix.quant == Quant(4, GROUP) and matrix.dtypes == ("U32", "BF16", "BF16")
    wanted = wide(oracle.bf16_to_f32(oracle.f32_to_bf16(scales)), 96) * (codes - 8)
    assert np.array_equal(np.array(matrix.values()), wanted)
    assert np.array_equal(np.array(matrix.rows(3, 7).values()), wanted[3:7])
    assert len(matrix.tensors) == 3


def test_awq_is_affine_with_a_bias_from_its_zeros(tmp_path):
    codes, scales, rng = drawn(64, 128)
    zeros = rng.integers(0, 16, scales.shape)
    matrix = matrix_of(tmp_path, awq_tensors("m", codes, zeros, scales), (64, 128), AWQ)
    assert matrix.quant == Quant(4, GROUP) and matrix.dtypes == ("U32", "F16", "F16")
    half = scales.astype(np.float16).astype(np.float64)
    wanted = wide(half, 128) * (codes - np.repeat(zeros, GROUP, axis=-1))
    got = np.array(matrix.values())
    assert np.abs(got - wanted).max() <= (half * zeros).max() * 2**-11, "the bias is rounded once, to float16"
    assert np.array_equal(np.array(matrix.rows(8, 24).values()), got[8:24])
    weight, kept, biases = matrix.codes()
    assert np.array_equal(np.array(kept), scales.astype(np.float16))
    assert np.array_equal(np.array(biases), (-half * zeros).astype(np.float16))


def test_a_wrong_order_of_nibbles_shows(tmp_path, monkeypatch):
    codes, scales, rng = drawn(16, 64)
    tensors = awq_tensors("m", codes, rng.integers(0, 16, scales.shape), scales)
    right = np.array(matrix_of(tmp_path, tensors, (16, 64), AWQ).values())
    monkeypatch.setattr("moeflux_mlx.packing.foreign.AWQ_NIBBLES", tuple(range(8)))
    assert not np.array_equal(np.array(matrix_of(tmp_path, tensors, (16, 64), AWQ).values()), right)


@pytest.mark.parametrize("shape", [(6, 96), (3, 4, 64)])
def test_blocks_are_only_another_view(tmp_path, shape):
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(0, 16, shape), rng.integers(100, 140, (*shape[:-1], shape[-1] // GROUP))
    matrix = matrix_of(tmp_path, block_tensors("m", codes, exponents), shape, MXFP4)
    assert matrix.quant == Quant(4, 32, "mxfp4")
    values = np.array(E2M1)[codes & 7] * np.where(codes & 8, -1, 1)
    wanted = values * 2.0 ** (np.repeat(exponents, GROUP, axis=-1) - 127.0)
    assert np.array_equal(np.array(matrix.values()), wanted)


@pytest.mark.parametrize("scale", [0, 255])
def test_the_smallest_and_the_largest_e8m0(tmp_path, scale):
    tensors = block_tensors("m", np.full((1, 32), 2), np.full((1, 1), scale))
    matrix = matrix_of(tmp_path, tensors, (1, 32), MXFP4)
    if scale:
        with pytest.raises(ModelFileError, match="m_scales holds NaN"):
            matrix.values()
    else:
        assert np.array(matrix.values()).max() == 2.0**-127


# ---- whole conversions


def mlx_of(path, codes, scales, biases):
    """Returns what a packed model must hold of a matrix with the values scale * code + bias."""
    shifts = 4 * np.arange(8, dtype=np.uint32)
    words = (codes.reshape(len(codes), -1, 8).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
    return {f"{path}.{name}": mx.array(part) for name, part in zip(PARTS, (words, scales, biases), strict=True)}


PARTS = ("weight", "scales", "biases")


@pytest.mark.parametrize("method", ["compressed-tensors", "awq"])
def test_experts_are_packed_without_a_loss(tmp_path, method):
    source = write_tiny(tmp_path / "source", "BF16")
    given = {t.name: t for t in read_header(source / "model.safetensors").values()}
    tensors, wanted = {}, {}
    for i, (name, tensor) in enumerate(given.items()):
        path = name.removesuffix(".weight")
        if ".experts." not in name:
            tensors[name] = ("BF16", np.array(tensor.read().view(mx.uint16)))
            continue
        codes, scales, rng = drawn(*tensor.shape, seed=i)
        if method == "awq":
            zeros = rng.integers(0, 16, scales.shape)
            tensors |= awq_tensors(path, codes, zeros, scales)
            half = scales.astype(np.float16)
            wanted |= mlx_of(path, codes, half, (-half.astype(np.float32) * zeros).astype(np.float16))
        else:
            tensors |= packed_tensors(path, codes, scales)
            wanted |= mlx_of(
                path, codes, mx.array(scales).astype(mx.bfloat16), mx.array(scales * -8).astype(mx.bfloat16)
            )
    write(source / "model.safetensors", tensors)
    hub = PACKED if method == "compressed-tensors" else AWQ
    (source / "config.json").write_text(json.dumps({**TINY, "quantization_config": hub}))
    report = convert(source, tmp_path / "out")
    assert not report.lossy and not report.made_experts
    stacks = {}
    for layer in range(TINY["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp."
        for name in (f"{projection}.{part}" for projection in PROJECTIONS for part in PARTS):
            each = [wanted[f"{stem}experts.{expert}.{name}"] for expert in range(TINY["num_experts"])]
            stacks[f"{stem}switch_mlp.{name}"] = mx.stack(each)
    check_kept(tmp_path / "out", stacks, resident_too=False)


# ---- what is refused


def test_experts_in_blocks_are_refused_with_the_reason(tmp_path):
    """gpt-oss has this form, with rows of gate and up in turn. For other families the form is unknown."""
    source = goldens.write_variant(tmp_path / "source", "qwen3_moe", "transformers5")
    config = json.loads((source / "config.json").read_text())
    shape = config["num_local_experts"], 2 * config["moe_intermediate_size"], config["hidden_size"]
    tensors = {}
    for name, tensor in read_header(source / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = (tensor.dtype, np.array(tensor.read().view(mx.uint16)))
    for layer in range(config["num_hidden_layers"]):
        path, exponents = f"model.layers.{layer}.mlp.experts.gate_up_proj", np.zeros((*shape[:-1], shape[-1] // GROUP))
        tensors |= block_tensors(path, np.zeros(shape, int), exponents)
    write(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    with pytest.raises(ModelFileError, match="gate_up_proj_blocks cannot be .* of gpt-oss only, not of qwen3_moe"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hub", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' cannot be converted: tensor m.qweight is I32 [4, 8], unknown"),
        ({"quant_method": "bitnet"}, "'bitnet' cannot be converted"),
        ({"quant_method": 3}, "quant_method 3 cannot be converted"),
        ({**AWQ, "bits": 8}, "'awq' cannot be converted: tensor m.qweight is I32 [4, 8], bits 8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "group_size": -1}, "group_size -1"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({**PACKED, "format": "marlin-24"}, "format 'marlin-24'"),
        ({**PACKED, "config_groups": {}}, "not exactly one group"),
        ({**PACKED, "config_groups": []}, "not exactly one group"),
        ({**PACKED, "config_groups": [1]}, "not exactly one group"),
        ({**PACKED, "config_groups": {"a": {"weights": {"num_bits": 8}}}}, "num_bits 8"),
        ({**PACKED, "config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": False}}}}, "symmetric False"),
    ],
)
def test_a_refusal_names_method_tensor_and_cause(tmp_path, hub, words):
    tensors = write(tmp_path / "x.safetensors", {"m.qweight": ("I32", np.zeros((4, 8), np.uint32))})
    with pytest.raises(ConfigError) as refused:
        SourceFormat({"quantization_config": hub}, tensors)
    text = str(refused.value)
    assert words in text[:200] and "supported: floats" in text[:200] and "\n" not in text
    assert str(hub["quant_method"]) in text[:40] and "m.qweight" in text[:200]


@pytest.mark.parametrize(
    ("change", "hub", "message"),
    [
        ({"m.weight_scale": None}, PACKED, "tensor m.weight_scale is missing"),
        ({"m.weight_scale": ("BF16", np.zeros((16, 2), np.uint16))}, PACKED, r"m.weight_scale has shape \[16, 2\]"),
        ({"m.weight_packed": ("I32", np.zeros((16, 11), np.uint32))}, PACKED, r"m.weight_packed has shape \[16, 11\]"),
        ({"m.weight_packed": ("F32", np.zeros((16, 12), np.float32))}, PACKED, "m.weight_packed is F32"),
        ({}, AWQ, "compressed-tensors: tensors of m are stored in this form"),
        ({}, MXFP4, "compressed-tensors: tensors of m are stored in this form"),
    ],
)
def test_tensors_that_do_not_fit_their_form(tmp_path, change, hub, message):
    tensors = {**packed_tensors("m", *drawn(16, 96)[:2]), **change}
    with pytest.raises(ModelFileError, match=message):
        matrix_of(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, (16, 96), hub)
