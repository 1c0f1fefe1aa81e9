"""The kernels for codes of tables, GGUF's IQ types: Metal's text against the `gguf` package's values in float64."""

import mlx.core as mx
import numpy as np
import pytest
from grids import one_in_three
from test_forms import error
from tile_choices import OF_CUDA, Chosen

from metal import msl
from moeflux_mlx.formats.record import Record, rounded
from moeflux_mlx.ops import backend, experts, forms, linear
from moeflux_mlx.ops.dequantize import dequantized_records
from moeflux_mlx.ops.records import Records
from moeflux_mlx.ops.tiles import using
from moeflux_mlx.packing.gguf_forms import FORMS, grids, repacked
from moeflux_mlx.packing.gguf_tables import SEPARATE

gguf = pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

pytestmark = pytest.mark.usefixtures("cpu_device")
KINDS = list(SEPARATE)
H, I, SLOTS, LIMIT = 512, 256, 4, 4e-5


@pytest.fixture
def host():
    with msl.launching():
        yield


@pytest.fixture
def integers(host, monkeypatch):
    """Gives the experts' kernels in the form that CUDA uses."""
    monkeypatch.setitem(forms.INTEGERS, "metal", forms.INTEGERS["cuda"])
    with using(Chosen(OF_CUDA)):
        yield


class Stored:
    """A random matrix: its parts, and its values in float64."""

    def __init__(self, kind, rows, columns, seed):
        blocks = gguf_models.random_blocks(kind, (rows, columns), seed, columns**-0.5)
        self.parts = dict(zip(FORMS[kind].quant.parts, (*repacked(kind, blocks), *grids(kind)), strict=True))
        self.values = gguf_models.values_of(kind, blocks).astype(np.float64)


class Experts:
    """Packed records of experts in one type each for gate and up, and down; the slots of two tokens."""

    def __init__(self, first, last):
        kinds, rng = (first, first, last), np.random.default_rng(1)
        quants = tuple(FORMS[kind].quant for kind in kinds)
        size = rounded(Record.make(H, I, quants, None, "F16").size, 16)
        self.record = Record.make(H, I, quants, size + 64, "F16")
        self.matrices, self.blob = [], np.full((SLOTS, self.record.stride // 4), 0xFFFFFFFF, np.uint32)
        for slot, row in enumerate(self.blob):
            given = zip(kinds, self.record.projections, strict=True)
            made = [Stored(kind, one.rows, one.columns, 10 * slot + i) for i, (kind, one) in enumerate(given)]
            for one, matrix in zip(self.record.projections, made, strict=True):
                for field in one.fields:
                    row.view(np.uint8)[field.offset : field.end] = matrix.parts[field.part].reshape(-1).view(np.uint8)
            self.matrices.append(made)
        self.slots = rng.integers(0, SLOTS, (2, 3)).astype(np.int32)
        self.x, self.mid = rng.standard_normal((2, 2, H), dtype=np.float32)
        self.weights = rng.random((2, 3), dtype=np.float32)
        self.records = Records(mx.array(self.blob), self.record)

    def error(self):
        """The largest error of gate and up, and of down."""
        slots, x, mid, weights = map(mx.array, (self.slots, self.x, self.mid, self.weights))
        act = experts.expert_gate_up(x, slots, self.records)
        out = experts.expert_down_combine(act, slots, self.records, weights, mid)
        wanted, outs = np.zeros(act.shape), self.mid.astype(np.float64)
        for t, k in np.ndindex(self.slots.shape):
            gate, up, down = (matrix.values for matrix in self.matrices[self.slots[t, k]])
            g = gate @ self.x[t]
            wanted[t, k] = g / (1 + np.exp(-g)) * (up @ self.x[t])
            outs[t] += self.weights[t, k] * (down @ np.array(act, np.float64)[t, k])
        return max(error(np.array(act), wanted), error(np.array(out), outs))


def product_error(kind, tokens=1, rows=24):
    matrix, x = Stored(kind, rows, H, 3), np.random.default_rng(4).standard_normal((tokens, H), dtype=np.float32)
    parts = map(mx.array, matrix.parts.values())
    return error(np.array(linear.qmv(mx.array(x), FORMS[kind].quant, *parts)), x @ matrix.values.T)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_multiply(host, kind):
    assert product_error(kind) < LIMIT


def test_kernels_multiply_several_rows(host):
    assert product_error("IQ2_S", tokens=3) < LIMIT


@pytest.mark.parametrize("first, last", [("IQ2_XXS", "IQ4_XS"), ("IQ3_S", "IQ2_S")])
def test_kernels_of_experts(host, first, last):
    assert Experts(first, last).error() < LIMIT


@pytest.mark.parametrize("first, last", [("IQ2_XXS", "IQ3_XXS"), ("IQ4_XS", "IQ1_M")])
def test_codes_times_integers(integers, first, last):
    assert Experts(first, last).error() < 2e-6


@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ2_S"])
def test_dequantised_values_are_exact(host, kind):
    made = Experts(kind, kind)
    gate_up, down = dequantized_records(made.records, mx.array([2, 0], mx.uint32), mx.float32)
    for i, slot in enumerate((2, 0)):
        gate, up, last = (matrix.values for matrix in made.matrices[slot])
        assert np.array_equal(np.array(gate_up[i]), np.concatenate([gate, up])) and np.array_equal(down[i], last)


def test_the_twins_of_experts(monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: "ops")
    assert Experts("IQ3_XXS", "IQ4_NL").error() < 2e-6


FAULTS = {
    "sign parity": ("IQ3_XXS", "folded ^= folded >> 1;", ""),
    "the other half of eight signs": ("IQ2_S", "signs >> (8 * k + 4)", "signs >> (8 * k)"),
    "nibbles of scales": (
        "IQ4_XS",
        ">> (4 * (unit % 2));\n  const uint high",
        ">> (4 - 4 * (unit % 2));\n  const uint high",
    ),
    "high bits of scales": ("IQ4_XS", "(high & 3u) << 4", "(high & 1u) << 4"),
    "high bits of indices": ("IQ3_S", "((high >> i) & 1u) << 8", "0u"),
    "the index of a grid": ("IQ2_XS", "(words[0] >> 16) & 511u", "(words[0] >> 16) & 255u"),
    "the second scale": ("IQ2_XS", "scale[1] = d", "scale[1] = scale[0]"),
    "a shift by an eighth": ("IQ1_S", "fields >> 15 ? 0x8888u", "fields >> 14 ? 0x8888u"),
    "halves of codes": ("IQ4_NL", "(at + 4)) & 15u", "at) & 15u"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_a_planted_fault_is_caught(host, monkeypatch, name):
    kind, old, new = FAULTS[name]
    msl.plant(monkeypatch, "tables.h.metal", old, new)
    assert product_error(kind) > 10 * LIMIT
