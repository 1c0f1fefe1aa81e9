"""Packed records as dense matrices: the kernel, its twin and MLX's own dequantisation give the same bits."""

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tile_choices import Chosen

from metal import msl
from moeflux_mlx.errors import RequestError
from moeflux_mlx.formats.record import Record
from moeflux_mlx.ops.dequantize import dequantized_records
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.tiles import Tile, using
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
FLOATS = [mx.float32, mx.bfloat16, mx.float16]


def random_records(count, record, seed=0):
    """Returns random codes, with scales and biases of any exponent that float16 holds."""
    rng = np.random.default_rng(seed)
    blob = rng.integers(0, 1 << 32, (count, record.stride // 4), np.uint32)
    for field in record.fields:
        if field.dtype == "BF16":
            values = rng.normal(size=(count, field.size // 2)) * 2.0 ** rng.integers(-12, 3, (count, field.size // 2))
            blob[:, field.words] = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
    return blob


def wanted(blob, projection, slots, dtype):
    """Computes scale * code + bias in float64, rounded to float32 and then to `dtype`."""
    codes, scales, biases = (np.ascontiguousarray(blob[slots][:, field.words]) for field in projection.fields)
    nibbles = codes[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    scales, biases = ((p.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for p in (scales, biases))
    groups = nibbles.reshape(*scales.shape, 64)
    values = groups * scales[..., None].astype(np.float64) + biases[..., None]
    shape = len(slots), projection.rows, projection.columns
    return mx.array(values.astype(np.float32).reshape(shape)).astype(dtype)


def same(got, want):
    return got.dtype == want.dtype and got.shape == want.shape and mx.array_equal(got, want).item()


def check(blob, record, slots, dtype):
    gate_up, down = dequantized_records(Records(mx.array(blob), record), mx.array(slots, mx.uint32), dtype)
    want = [wanted(blob, part, slots, dtype) for part in (record.gate, record.up, record.down)]
    return same(gate_up, mx.concatenate(want[:2], axis=1)) and same(down, want[2])


SHAPES, SLOTS = [(64, 64), (192, 64), (128, 320)], [[0], [4, 1, 3], [2, 2, 0, 2]]


@pytest.mark.parametrize("shape, slots, dtype", drawn(SHAPES, SLOTS, FLOATS, turns=2))
def test_kernel_gives_the_bits_of_one_rounding(host, shape, slots, dtype):
    H, I = shape
    record = Record.make(H, I, stride=-(-H * I * 27 // 16 // 64) * 64 + 64)
    assert check(random_records(5, record), record, slots, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_twin_gives_the_same_bits(dtype):
    record = Record.make(128, 192)
    assert check(random_records(5, record), record, [4, 1, 1], dtype)


@pytest.mark.parametrize("rows, simdgroups", [(1, 1), (3, 2), (8, 4)])
def test_kernel_at_other_tiles(host, rows, simdgroups):
    record = Record.make(192, 64)
    with using(Chosen({"expert_dequantize": Tile(rows, 32, simdgroups)})):
        assert check(random_records(3, record), record, [2, 0], mx.bfloat16)


def test_records_in_a_form_that_no_kernel_reads_go_to_the_twin(host):
    record = Record.make(64, 128, (Quant(8, 64), Quant(4, 32), Quant(6, 64)))
    blob = random_records(3, record)
    gate_up, down = dequantized_records(Records(mx.array(blob), record), mx.array([2, 0], mx.uint32), mx.bfloat16)
    assert gate_up.shape == (2, 256, 64) and down.shape == (2, 64, 128)
    codes, scales, biases = (mx.array(blob[[2, 0]][:, field.words]) for field in record.down.fields)
    scales, biases = (p.view(mx.bfloat16).astype(mx.float32).reshape(2, 64, 2) for p in (scales, biases))
    assert same(down, mx.dequantize(codes.reshape(2, 64, -1), scales, biases, 64, 6).astype(mx.bfloat16))


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("expert_dequantize.metal", "out + place * (8 * COUNT", "out + place * (4 * COUNT"),
        ("expert_dequantize.metal", "last ? LAST_S", "last ? FIRST_S"),
        ("expert_dequantize.metal", "last ? piece - EACH", "last ? piece - EACH + 1"),
        ("dense.h.metal", "- 8388608.0f, bias", "- 8388607.0f, bias"),
        ("dense.h.metal", "piece.y = dense_pair<X>(v[2], v[3])", "piece.y = dense_pair<X>(v[3], v[2])"),
    ],
)
def test_a_planted_fault_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    record = Record.make(128, 64)
    with pytest.raises((AssertionError, msl.Failure)):
        assert check(random_records(3, record), record, [2, 1], mx.bfloat16)


@msl.needed
@pytest.mark.parametrize("H, I", [(2048, 512), (4096, 1024), (7168, 2048)])
def test_source_compiles_for_named_shapes(H, I):
    record = Record.make(H, I)
    with msl.launching(msl.TextKernel):
        dequantized_records(
            Records(mx.zeros((1, record.stride // 4), mx.uint32), record), mx.array([0] * 9), mx.bfloat16
        )
    assert len(msl.TextKernel.texts) == 2


def test_bad_shapes_are_refused():
    record = Record.make(64, 64)
    records = Records(mx.zeros((1, record.stride // 4), mx.uint32), record)
    with pytest.raises(RequestError, match=r"expected \[n\]"):
        dequantized_records(records, mx.zeros((1, 1), mx.uint32), mx.bfloat16)
    with pytest.raises(RequestError, match="int32"):
        dequantized_records(records, mx.zeros((1,), mx.uint32), mx.int32)
    with pytest.raises(RequestError, match="at least 1728"):
        dequantized_records(Records(mx.zeros((1, 1720), mx.uint32), record), mx.array([0]), mx.bfloat16)
