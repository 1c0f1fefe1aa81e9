"""Fitted rounding: the native form, its twin, and a plain search in numpy agree; no group is worse than min-max."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.ops.forms import settings, unpacked_float32
from moeflux_mlx.quant import AFFINE_BITS, AFFINE_GROUPS, Quant
from moeflux_mlx.rounding import affine
from moeflux_mlx.rounding.affine import packed
from moeflux_mlx.rounding.methods import METHODS, rounded
from moeflux_mlx.rounding.weights import group_weights

pytestmark = pytest.mark.usefixtures("cpu_device")
FORMS = [Quant(bits, 64) for bits in AFFINE_BITS] + [Quant(bits, group) for bits in (2, 5) for group in (32, 128)]
FLOATS = [Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4"), Quant(8, 32, "mxfp8")]
needs_native = pytest.mark.skipif(affine.extension is None, reason="the native form is not built")


def drawn(seed, *shape, dtype=mx.bfloat16):
    """Returns weights with heavy tails; some rows are far from zero, some are constant, and some are zero."""
    values = np.random.default_rng(seed).standard_t(5, shape) * 0.02
    values[1::7] += 1
    values[2::7] = 0.3
    values[3::7] = 0
    return mx.array(values.astype(np.float32)).astype(dtype)


def unpacked(quant, parts):
    """Returns scale * code + bias in float32."""
    wide = [part.astype(mx.float32) if quant.mode == "affine" else part for part in parts[1:]]
    return np.array(mx.dequantize(parts[0], *wide, **settings(quant)).astype(mx.float32))


def errors(quant, parts, values, weights=1.0):
    """Returns the weighted squared error of each group."""
    off = (unpacked(quant, parts) - np.array(values.astype(mx.float32))).astype(np.float64)
    return (off**2 * weights).reshape(-1, quant.group_size).sum(-1)


def equal(parts, others):
    pairs = zip(parts, others, strict=True)
    return all(np.array_equal(np.array(a.view(mx.uint8)), np.array(b.view(mx.uint8))) for a, b in pairs)


def searched(values, quant, starts, turns):
    """Returns the least squared error of each group that a plain search over ranges finds, in float64, with scales and
    biases in bfloat16: from each shrunk range, nearest codes and least squares by turns."""
    x = np.array(values.astype(mx.float32)).astype(np.float64).reshape(-1, quant.group_size)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    least = np.full(len(x), np.inf)
    for shrink in starts:
        scale, bias = (high - low) * shrink / (2**quant.bits - 1), (low + high - (high - low) * shrink) / 2
        for _ in range(turns):
            q = codes_of(x, scale, bias, quant)
            spread = ((q - q.mean(-1, keepdims=True)) ** 2).sum(-1, keepdims=True)
            shared = ((q - q.mean(-1, keepdims=True)) * x).sum(-1, keepdims=True)
            scale = np.divide(shared, spread, out=scale.copy(), where=spread > 0)
            bias = x.mean(-1, keepdims=True) - scale * q.mean(-1, keepdims=True)
        scale, bias = (stored(one) for one in (scale, bias))
        least = np.minimum(least, ((scale * codes_of(x, scale, bias, quant) + bias - x) ** 2).sum(-1))
    return least


def codes_of(x, scale, bias, quant):
    return np.clip(np.rint((x - bias) / np.where(scale == 0, 1, scale)), 0, 2**quant.bits - 1)


def stored(values):
    return np.array(mx.array(values.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)).astype(np.float64)


@needs_native
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_twin_has_the_bits_of_the_native_form(dtype):
    importance = mx.array(np.random.default_rng(0).exponential(1, 256).astype(np.float32))
    for seed, quant in enumerate(FORMS):
        given = drawn(seed, 21, 256, dtype=dtype), quant, group_weights(importance, 256, quant.group_size), dtype
        assert equal(affine.fit_native(*given), affine.fit_ops(*given)), quant


@needs_native
def test_every_instruction_set_has_the_same_bits():
    for dtype in (mx.bfloat16, mx.float16):
        for quant in FORMS:
            given = drawn(8, 21, 256, dtype=dtype), quant, group_weights(None, 256, quant.group_size), dtype
            parts = affine.fit_native(*given)
            assert all(equal(parts, affine.fit_native(*given, least)) for least in (1, 2)), quant


@needs_native
@pytest.mark.parametrize(("rows", "bits", "group"), [(3, 4, 64), (2, 9, 64), (2, 4, 48)])
def test_the_extension_refuses_wrong_sizes(rows, bits, group):
    out = np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)
    with pytest.raises(ValueError):
        given = np.zeros((2, 64), np.float32), np.ones(64, np.float32), np.ones(1, np.float32)
        affine.extension.fit(*given, rows, 64, bits, group, False, 0, 1, 1, 0, *out)


@pytest.mark.parametrize("quant", [*FORMS, *FLOATS], ids=str)
def test_no_group_is_worse_than_by_min_to_max(quant):
    values = drawn(1, 40, 256)
    best, plain = (errors(quant, rounded(values, quant, method), values) for method in METHODS)
    assert (best <= plain * (1 + 1e-5)).all()
    assert best.sum() < plain.sum() or quant.mode == "mxfp8"


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_the_error_is_near_that_of_a_long_search(bits):
    quant = Quant(bits, 64)
    values = mx.array(np.random.default_rng(bits).standard_normal((64, 512)).astype(np.float32)).astype(mx.bfloat16)
    wanted = searched(values, quant, np.linspace(0.5, 1.05, 23), 12)
    assert errors(quant, rounded(values, quant), values).sum() < 1.03 * wanted.sum()


@pytest.mark.parametrize("quant", [Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4")], ids=str)
def test_no_other_scale_of_8_bits_is_better(quant):
    values = drawn(2, 16, 128)
    parts = rounded(values, quant)
    best = errors(quant, parts, values)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = np.array(values.astype(mx.float32)).astype(np.float64).reshape(-1, quant.group_size, 1)
    for bits in range(100, 140) if quant.mode == "mxfp4" else range(1, 127):
        scale = (
            2.0 ** (bits - 127) if quant.mode == "mxfp4" else mx.from_fp8(mx.array(bits, mx.uint8), mx.float32).item()
        )
        other = (np.abs(np.abs(x) - table * scale).min(-1) ** 2).sum(-1)
        assert (best <= other * (1 + 1e-5) + 1e-12).all(), bits


@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    quant=st.sampled_from([Quant(3, 32), Quant(4, 64), *FLOATS]),
    data=st.data(),
)
def test_rows_in_any_chunks_have_the_same_bits(rows, groups, quant, data):
    values = drawn(rows, rows, groups * quant.group_size * (2 if quant.group_size == 16 else 1))
    cut = data.draw(st.integers(0, rows))
    whole = rounded(values, quant)
    pieces = [rounded(part, quant) for part in (values[:cut], values[cut:]) if len(part)]
    assert equal(whole, [mx.concatenate(list(part)) for part in zip(*pieces, strict=True)])


def test_a_chunk_of_the_module_changes_nothing(monkeypatch):
    values, quant = drawn(3, 50, 128), Quant(4, 64)
    forms = [affine.fit_ops] if affine.extension is None else [affine.fit_ops, affine.fit_native]
    given = values, quant, group_weights(None, 128, 64), mx.bfloat16
    for fit in forms:
        whole = fit(*given)
        with monkeypatch.context() as patch:
            patch.setattr(affine, "CHUNK_VALUES", 300)  # two rows
            assert equal(whole, fit(*given)), fit


@pytest.mark.parametrize("quant", [Quant(2, 64), Quant(4, 32), Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4")], ids=str)
def test_important_columns_have_smaller_errors(quant):
    values = mx.array(np.random.default_rng(4).standard_normal((3, 32, 128)).astype(np.float32)).astype(mx.bfloat16)
    importance = np.random.default_rng(5).exponential(1, (3, 128)).astype(np.float32) ** 3
    weighted, plain = (
        errors(quant, rounded(values, quant, "fit", given), values, importance[:, None])
        for given in (mx.array(importance), None)
    )
    assert weighted.sum() < 0.97 * plain.sum()
    each = [rounded(values[i], quant, "fit", mx.array(importance[i])) for i in range(3)]
    assert equal(rounded(values, quant, "fit", mx.array(importance)), [mx.stack(p) for p in zip(*each, strict=True)])
    assert equal(rounded(values, quant, "fit", mx.zeros(128)), rounded(values, quant))  # none is important


@pytest.mark.parametrize("method", METHODS)
def test_a_global_scale_lets_the_error_follow_the_weights(method):
    """Without one, E4M3 has no scales small enough for weights of 0.002."""
    quant, drawn_ = Quant(4, 16, "nvfp4", has_global_scale=True), np.random.default_rng(9).standard_normal((3, 16, 64))
    drawn_[2] = 0
    relative = []
    for size in (1e-36, 0.002, 1.0, 1e30):
        values = mx.array((drawn_ * size).astype(np.float32))
        words, scales, largest = rounded(values, quant, method, dtype=mx.float32)
        assert largest.shape == (3, 1, 1) and largest[1, 0, 0] == mx.abs(values[1]).max()
        off = np.array(unpacked_float32(quant, words, scales, largest) / size) - drawn_
        assert not off[2].any()
        relative.append(np.sqrt(np.square(off[:2]).mean()))
    assert max(relative) < 0.11 and np.ptp(relative) < 0.001


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 3e4, 1e30])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_any_size_gives_finite_scales(scale, dtype):
    values = drawn(6, 14, 64, dtype=mx.float32) * scale
    if not mx.isfinite(values.astype(dtype)).all().item():
        return
    for quant in (Quant(1, 64), Quant(4, 64), Quant(8, 64)):
        parts = rounded(values, quant, dtype=dtype)
        assert all(mx.isfinite(part).all().item() for part in parts[1:])


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_codes_are_packed_as_mlx_packs_them(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96))
    read = mx.dequantize(packed(mx.array(codes), bits), mx.ones((3, 3)), mx.zeros((3, 3)), 32, bits)
    assert np.array_equal(np.array(read), codes)


def test_a_method_that_is_not_known():
    with pytest.raises(ValueError, match="'max' is not known; there are fit, minmax"):
        rounded(mx.zeros((1, 64)), Quant(4, 64), "max")


def test_groups_of_every_size_are_known():
    for group_size in AFFINE_GROUPS:
        values, quant = drawn(7, 2, 256), Quant(4, group_size)
        assert rounded(values, quant)[1].shape == (2, 256 // group_size)
