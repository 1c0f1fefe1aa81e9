"""What only the kernels for codes of tables do, GGUF's IQ types; `test_forms.py` has what all forms have in common."""

import mlx.core as mx
import numpy as np
import pytest
from grids import one_in_three
from test_forms import LIMIT, Experts, of, product_error, shared_error
from tile_choices import OF_CUDA, Chosen

from metal import msl
from moeflux_mlx.ops import experts, forms, linear, native
from moeflux_mlx.ops.dequantize import dequantized_records
from moeflux_mlx.ops.records import Records
from moeflux_mlx.ops.tiles import using
from moeflux_mlx.quant import GGUF_MODES, TABLE

pytestmark = pytest.mark.usefixtures("cpu_device")
TABLES = [name for name, mode in GGUF_MODES.items() if mode.codes == TABLE]


def experts_of(first, last):
    return Experts((of(first), of(first), of(last)), "")


@pytest.mark.parametrize("first, last", [("iq2_xxs", "iq4_xs"), ("iq4_nl", "iq3_xxs"), ("iq3_s", "iq2_s")])
def test_codes_times_integers(host, monkeypatch, first, last):
    """In the form that CUDA uses, with x in float32."""
    monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
    with using(Chosen(OF_CUDA)):
        assert experts_of(first, last).error() < 2e-6


@pytest.mark.parametrize("mode", ["iq2_xxs", *one_in_three([mode for mode in TABLES if GGUF_MODES[mode].grid][3:])])
def test_prepared_grids(host, monkeypatch, mode):
    """As on CUDA, where a threadgroup keeps a grid, with signs."""
    monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
    msl.plant(monkeypatch, "tables.h.metal", "#define CODES_ZERO 0u", "#define CODES_ZERO 0u\n#define CODES_NEAR_GRIDS")
    msl.plant(monkeypatch, "tables.h.metal", "*)room", "*)size_t(room)")  # CUDA does not tell memories apart
    with using(Chosen(OF_CUDA)):
        assert experts_of(mode, mode).error() < 2e-6
        assert mode != "iq2_xxs" or shared_error(of(mode)) < 2e-6


def test_codes_times_integers_of_narrow_x(host, monkeypatch):
    monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
    made = experts_of("iq1_m", "iq2_xs")
    x = mx.array(made.x).astype(mx.bfloat16)
    made.x = np.array(x.astype(mx.float32))
    with using(Chosen(OF_CUDA)):
        act = experts.expert_gate_up(x, mx.array(made.slots), Records(mx.array(made.blob), made.record))
    wanted = made.wanted(np.array(act.astype(mx.float32)))[0]
    assert (np.abs(np.array(act.astype(mx.float32)) - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 4e-3


@pytest.mark.parametrize("mode", one_in_three(TABLES))
def test_dequantised_values_are_exact(host, mode):
    made = experts_of(mode, mode)
    records = Records(mx.array(made.blob), made.record)
    gate_up, down = dequantized_records(records, mx.array([2, 0], mx.uint32), mx.float32)
    for i, slot in enumerate((2, 0)):
        gate, up, last = (matrix.values for matrix in made.matrices[slot])
        assert np.array_equal(np.array(gate_up[i]), np.concatenate([gate, up])) and np.array_equal(down[i], last)


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
@pytest.mark.parametrize("mode", TABLES)
def test_native_products(mode):
    """On the fastest path, which looks many codes up at once."""
    assert experts_of(mode, mode).error(np.array) < 2e-6


FAULTS = {
    "sign parity": ("iq3_xxs", "folded ^= folded >> 1;", ""),
    "the other half of eight signs": ("iq2_s", "signs >> (8 * k + 4)", "signs >> (8 * k)"),
    "the order of low halves": ("iq4_xs", "all.y >> (4 * unit)", "all.y >> (4 * (unit ^ 1u))"),
    "high bits of scales": ("iq4_xs", "low | high << 4", "low | high << 3"),
    "high bits of indices": ("iq3_s", "((high >> i) & 1u) << 8", "0u"),
    "the index of a grid": ("iq2_xs", "(words[0] >> 16) & 511u", "(words[0] >> 16) & 255u"),
    "the second scale": ("iq2_xs", "scale[1] = d", "scale[1] = scale[0]"),
    "a shift by an eighth": ("iq1_s", "fields >> 15 ? 0x8888u", "fields >> 14 ? 0x8888u"),
    "the digits of 32 columns before": ("tq1_0", "unit % 2 ? 9u : 1u", "1u"),
    "codes of two bits": ("tq2_0", "0x03030303u", "0x01030303u"),
    "halves of codes": ("iq4_nl", "(at + 4)) & 15u", "at) & 15u"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_a_planted_fault_is_caught(host, monkeypatch, name):
    mode, old, new = FAULTS[name]
    msl.plant(monkeypatch, "tables.h.metal", old, new)
    assert product_error(of(mode), "", 1, linear.qmv) > 10 * LIMIT
