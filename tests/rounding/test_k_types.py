"""Floats that our own search rounds to GGUF's forms of integer codes."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.packing.gguf_forms import FORMS
from moeflux_mlx.quant import FLOAT, INTEGER
from moeflux_mlx.rounding import k_types
from moeflux_mlx.rounding.methods import METHODS, rounded

pytestmark = pytest.mark.usefixtures("cpu_device")
TYPES = {kind: form.quant for kind, form in FORMS.items() if form.quant.codes == INTEGER and form.quant.scale != FLOAT}


def drawn(seed, *shape):
    """Returns weights with heavy tails; some rows are positive, some negative, some constant, and some zero."""
    values = np.random.default_rng(seed).standard_t(5, shape).astype(np.float32) * 0.02
    values[1::9] = np.abs(values[1::9]) + 0.5
    values[2::9] = -np.abs(values[2::9])
    values[3::9], values[4::9] = 0.3, -0.3
    values[5::9] = 0
    return values


def errors(made, values, weights=1.0):
    """Returns the weighted squared error of each row."""
    return ((made.astype(np.float64) - values) ** 2 * weights).sum(-1)


def equal(parts, others):
    pairs = zip(parts, others, strict=True)
    return all(np.array_equal(np.array(a.view(mx.uint8)), np.array(b.view(mx.uint8))) for a, b in pairs)


@pytest.mark.parametrize("kind", TYPES)
def test_the_error_is_not_above_that_of_ggml(kind):
    """In any row that is not constant."""
    libgguf = pytest.importorskip("libgguf")
    quant, values = TYPES[kind], drawn(0, 36, 512)
    known = np.random.default_rng(1).exponential(1, 512).astype(np.float32)
    varied = np.ptp(values, axis=-1) > 0
    for given, most in ((None, 1.0), (known, 1.03)):
        blocks = libgguf.quantize_rows(values, libgguf.GGMLQuantizationType[kind], imatrix=given)
        theirs = libgguf.dequantize_rows(blocks, libgguf.GGMLQuantizationType[kind], n_per_row=512)
        weights = 1.0 if given is None else given
        parts = rounded(mx.array(values), quant, importance=None if given is None else mx.array(given))
        wanted = errors(theirs, values, weights)
        made = errors(np.array(unpacked_float32(quant, *parts)), values, weights)
        assert (made[varied] < 1.2 * wanted[varied]).all() and made[varied].sum() < most * wanted[varied].sum()


@pytest.mark.parametrize("kind", TYPES)
def test_every_kind_of_row_is_near_its_values(kind):
    """A type's error is at most what its bits allow, in rows of one sign and of one value too."""
    quant, values = TYPES[kind], drawn(2, 27, 256)
    back = np.array(unpacked_float32(quant, *rounded(mx.array(values), quant)))
    off, size = (np.sqrt((one**2).mean(-1)) for one in (back - values, values))
    assert (off <= 2.2 * 2.0**-quant.bits * size).all(), (off / np.maximum(size, 1e-9)).max()
    assert not back[5::9].any()


@pytest.mark.parametrize("kind", TYPES)
def test_a_matrix_has_the_same_bits_in_any_pieces(monkeypatch, kind):
    quant, values = TYPES[kind], mx.array(drawn(3, 2, 6, 512))
    importance = mx.array(np.random.default_rng(4).exponential(1, (2, 512)).astype(np.float32))
    whole = rounded(values, quant, importance=importance)
    assert all(equal(whole, rounded(values, quant, method, importance)) for method in METHODS)
    monkeypatch.setattr(k_types, "CHUNK_VALUES", 600)  # of one row
    each = [rounded(values[i], quant, importance=importance[i]) for i in (0, 1)]
    assert equal(whole, [mx.stack(list(parts)) for parts in zip(*each, strict=True)])


@pytest.mark.parametrize("kind", TYPES)
def test_important_columns_have_smaller_errors(kind):
    quant, values = TYPES[kind], drawn(5, 18, 256)
    importance = np.random.default_rng(6).exponential(1, 256).astype(np.float32) ** 3
    importance[:32] = 0  # of whole groups
    parts = [rounded(mx.array(values), quant, importance=given) for given in (mx.array(importance), None)]
    backs = (np.array(unpacked_float32(quant, *part)) for part in parts)
    weighted, plain = (errors(back, values, importance).sum() for back in backs)
    assert weighted < 0.97 * plain
    assert equal(rounded(mx.array(values), quant, importance=mx.zeros(256)), parts[1])


def test_large_weights_do_not_shrink_as_the_least_squares_make_them():
    values = np.random.default_rng(0).standard_normal((32, 512)).astype(np.float32) * 0.02
    back = np.array(unpacked_float32(TYPES["Q2_K"], *rounded(mx.array(values), TYPES["Q2_K"])))
    assert (values * back).sum() / (values * values).sum() > 0.945  # 0.931 with the least squares


@pytest.mark.parametrize("size", [1e-12, 1e-6, 3e4])
def test_any_size_gives_finite_values(size):
    for quant in TYPES.values():
        back = unpacked_float32(quant, *rounded(mx.array(drawn(7, 9, 256) * size), quant))
        assert mx.isfinite(back).all().item(), quant
