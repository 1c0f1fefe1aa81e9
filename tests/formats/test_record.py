"""Records: the place of each field, with biases, global scales and two matrices; and values that spoil an answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.formats.packed import not_finite
from moeflux_mlx.formats.record import LOAD_BYTES, SCALE_DTYPES, STRIDE_ALIGNMENT, UNIFORM, Record
from moeflux_mlx.quant import AFFINE_BITS, Quant

MXFP4, NVFP4, MXFP8 = Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4"), Quant(8, 32, "mxfp8")
GLOBAL = Quant(4, 16, "nvfp4", has_global_scale=True)
FORMS = st.builds(Quant, st.sampled_from(AFFINE_BITS), st.sampled_from([32, 64]))
FORMS |= st.sampled_from([MXFP4, MXFP8, NVFP4, GLOBAL])
QUANTS = st.tuples(FORMS, FORMS, FORMS) | st.tuples(FORMS, FORMS)
WIDTHS = st.integers(1, 5).map(lambda n: 64 * n)


def test_two_matrices_with_biases_and_global_scales():
    """Calculated by hand: after a global scale of 4 bytes the next field begins at a multiple of 16."""
    record = Record.make(128, 64, (GLOBAL, GLOBAL), dtype="F16", has_bias=True)
    assert [(one.name, one.offset, one.size, one.dtype, one.shape) for one in record.fields] == [
        ("up_proj.weight", 0, 4096, "U32", (64, 16)),
        ("up_proj.scales", 4096, 512, "U8", (64, 8)),
        ("up_proj.bias", 4608, 128, "F16", (64,)),
        ("up_proj.global_scale", 4736, 4, "F32", (1,)),
        ("down_proj.weight", 4752, 4096, "U32", (128, 8)),
        ("down_proj.scales", 8848, 512, "U8", (128, 4)),
        ("down_proj.bias", 9360, 256, "F16", (128,)),
        ("down_proj.global_scale", 9616, 4, "F32", (1,)),
    ]
    assert record.size == 9620 and record.stride == STRIDE_ALIGNMENT and record.dtype == "F16"
    assert (record.up, record.down) == record.projections and record.quants == (GLOBAL, GLOBAL)
    assert (record.hidden_size, record.moe_intermediate_size) == (128, 64)


def test_a_bias_follows_the_biases_of_groups():
    record = Record.make(64, 64, UNIFORM, has_bias=True)
    assert [one.part for one in record.gate.fields] == ["weight", "scales", "biases", "bias"]
    assert record != Record.make(64, 64, UNIFORM)


@given(hidden=WIDTHS, inner=WIDTHS, quants=QUANTS, dtype=st.sampled_from(SCALE_DTYPES), has_bias=st.booleans())
def test_fields_are_aligned_and_disjoint(hidden, inner, quants, dtype, has_bias):
    record = Record.make(hidden, inner, quants, None, dtype, has_bias)
    end = 0
    for field in record.fields:
        assert field.offset % LOAD_BYTES == 0 and 0 <= field.offset - end < LOAD_BYTES
        end = field.end
    assert end == record.size <= record.stride
    if not any(quant.has_global_scale for quant in quants):
        assert record.size == sum(field.size for field in record.fields)
    assert record.spaced(1 << 20).spaced(record.stride) == record


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("gate_proj.scales", [0x7F]),  # E4M3 has no infinity, and one NaN of each sign
        ("up_proj.scales", [0xFF]),  # a NaN of E8M0
        ("down_proj.scales", [0xFF]),
        ("up_proj.bias", [0x00, 0x7C]),
        ("down_proj.bias", [0x00, 0xFC]),
        ("down_proj.global_scale", [0, 0, 0x80, 0x7F]),
    ],
)
def test_a_nan_is_found(name, raw):
    record = Record.make(128, 64, (GLOBAL, MXFP4, GLOBAL), dtype="F16", has_bias=True)
    rows = np.full((3, record.stride), 0x7B, np.uint8)  # no NaN anywhere
    assert not_finite(record, rows) is None
    field = next(one for one in record.fields if one.name == name)
    rows[1, field.end - len(raw) : field.end] = raw
    assert not_finite(record, rows) == (1, field)
