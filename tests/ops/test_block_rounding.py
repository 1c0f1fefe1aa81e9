"""Values rounded to 8 or 4 bits in blocks, by both kinds of arrays, against the nearest of all codes."""

import mlx.core as mx
import numpy as np
import pytest

from metal import msl
from moeflux_mlx.ops.block_rounding import to_e2m1, to_e4m3

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)])


def nearest(values, codes):
    """Returns the nearest codes of positive and negative values; ties go to the even one, by its number."""
    magnitudes, numbers = np.abs(values)[..., None], np.arange(len(codes))
    distance = np.abs(magnitudes - codes)
    best = distance.min(-1, keepdims=True)
    number = np.where(distance == best, numbers + 1000 * (numbers % 2), 10**6).argmin(-1)
    return np.copysign(codes[number], values)


def wanted(x, block, codes, least, e4m3_scale=False):
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, block)
    most = np.maximum(np.abs(blocks).max(-1, keepdims=True), least) / codes[-1]
    scale = nearest(np.minimum(most, 448), E4M3) if e4m3_scale else 2.0 ** np.ceil(np.log2(most))
    return (nearest(np.clip(blocks / scale, -codes[-1], codes[-1]), codes) * scale).reshape(x.shape)


CASES = {
    "keys": (lambda x: to_e4m3(x, 32), lambda x: wanted(x, 32, E4M3, 1e-4)),
    "index keys": (lambda x: to_e2m1(x, 32), lambda x: wanted(x, 32, E2M1, 6 * 2.0**-126)),
    "entries": (lambda x: to_e2m1(x, 16, True), lambda x: wanted(x, 16, E2M1, 6 * 2.0**-9, True)),
}


def values():
    """Returns blocks of all sizes, one of zeros, one with the largest code and one of halves between two codes."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(1, 60, 64)) * 2.0 ** rng.integers(-12, 12, (60, 1))).astype(np.float32)
    x[0, 0], x[0, 1, :2] = 0, (6, 2.5)
    x[0, 1, 2:] = np.resize([0.25, 0.75, 1.25, 1.75, 3.5, 5, -0.25, -2.5], 62)
    return x


@pytest.mark.parametrize("case", CASES)
def test_every_value_becomes_the_nearest_code(case):
    (compute, want), x = CASES[case], values()
    for made in (compute(x), np.array(compute(mx.array(x)))):
        assert made.dtype == np.float32 and np.array_equal(made, want(x).astype(np.float32))
    narrow = mx.array(x).astype(mx.bfloat16)
    assert compute(narrow).dtype == mx.bfloat16


@msl.needed
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_has_the_same_bits(case):
    compute, _ = CASES[case]
    for dtype in (mx.float32, mx.bfloat16):
        x = mx.array(values()).astype(dtype)
        want = compute(x)
        with msl.launching():
            made = compute(x)
        assert made.dtype == dtype and mx.array_equal(made, want)


@msl.needed
def test_the_first_values_of_a_row():
    x = mx.array(np.random.default_rng(1).normal(size=(1, 1, 100)).astype(np.float32))
    with msl.launching():
        made = np.array(to_e4m3(x, 32, 64))
    assert np.array_equal(made[..., 64:], np.array(x)[..., 64:])
    assert np.array_equal(made, np.array(to_e4m3(np.array(x), 32, 64)))
    assert np.array_equal(made[..., :64], wanted(np.array(x)[..., :64], 32, E4M3, 1e-4).astype(np.float32))


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("o < BLOCK", "o < BLOCK / 2"),
        ("127 + LOWEST", "127"),
        ("metal::rint(x * inverse)", "metal::floor(x * inverse + 0.5f)"),
        ("(bits & 0x7FFFFF) != 0", "0"),
        ("metal::fmax(most, LEAST)", "metal::fmax(most, 1.0f)"),
        ("NESTED ?", "NESTED && most < 0 ?"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, old, new):
    file = "block_round.metal" if old[0] in "ocN" or "LEAST" in old else "block_round.h.metal"
    msl.plant(monkeypatch, file, old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        for case in CASES:
            test_a_kernel_has_the_same_bits(case)
