"""GPTQ beside a plain one in numpy, and what it promises."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.quant import Quant
from moeflux_mlx.rounding.gptq import damped, gptq
from moeflux_mlx.rounding.methods import rounded

pytestmark = pytest.mark.usefixtures("cpu_device")


def weights(seed, *shape):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(mx.bfloat16)


def hessian(seed, columns, rank, dead=()):
    """Returns the sum of x x^T over `rank` correlated inputs, in which the columns `dead` are zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rank, columns)) @ (np.eye(columns) + rng.standard_normal((columns, columns)) / 8)
    x[:, list(dead)] = 0
    return (x.T @ x).astype(np.float32)


def unpacked(parts, quant):
    wide = [part.astype(mx.float32) for part in parts[1:]]
    return np.array(mx.dequantize(parts[0], *wide, quant.group_size, quant.bits)).astype(np.float64)


def output_error(values, parts, quant, h):
    off = np.array(values.astype(mx.float32)) - unpacked(parts, quant)
    return np.einsum("...ij,...jk,...ik->...", off, h.astype(np.float64), off)


def by_numpy(values, quant, h, damping):
    """Algorithm 1 of the paper without blocks, in float64: the error of a column is divided by the diagonal of the
    inverse Hessian's Cholesky factor, and is taken from all columns behind it at once."""
    w, h = np.array(values.astype(mx.float32)).astype(np.float64), h.astype(np.float64)
    diagonal = np.diag(h)
    mean = diagonal.mean() or 1.0
    u = np.linalg.cholesky(np.linalg.inv(h + np.diag(damping * mean + np.where(diagonal > 0, 0, mean)))).T
    made = np.zeros_like(w)
    for j in range(w.shape[1]):
        if j % quant.group_size == 0:
            group = slice(j, j + quant.group_size)
            given = mx.array(w[:, group].astype(np.float32)), quant, "fit", mx.array(diagonal[group].astype(np.float32))
            scale, bias = (np.array(one.astype(mx.float32))[:, 0].astype(np.float64) for one in rounded(*given)[1:])
        code = np.clip(np.rint((w[:, j] - bias) / scale), 0, 2**quant.bits - 1)
        made[:, j] = scale * code + bias
        w[:, j + 1 :] -= np.outer((w[:, j] - made[:, j]) / u[j, j], u[j, j + 1 :])
    return made


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    quant=st.sampled_from([Quant(2, 32), Quant(3, 64), Quant(4, 64), Quant(6, 128)]),
    groups=st.integers(1, 5),
    damping=st.sampled_from([0.01, 0.1]),
    dead=st.sets(st.integers(0, 31), max_size=3),
)
def test_it_rounds_as_the_paper_says(seed, quant, groups, damping, dead):
    columns = groups * quant.group_size
    values, h = weights(seed, 4, columns), hessian(seed, columns, columns, dead)
    parts = gptq(values, quant, mx.array(h), damping, turns=0)
    wanted = by_numpy(values, quant, h, damping)
    off = np.abs(unpacked(parts, quant) - wanted) > 1e-3
    assert off.any(-1).sum() <= 2  # one float32 near the middle of two codes changes the rest of its row


@pytest.mark.parametrize("quant", [Quant(2, 64), Quant(3, 32), Quant(4, 128)], ids=str)
def test_products_with_correlated_inputs_change_less_than_by_fit(quant):
    values, h = weights(1, 48, 256), hessian(2, 256, 384)
    best = output_error(values, gptq(values, quant, mx.array(h)), quant, h)
    assert best < 0.85 * output_error(values, rounded(values, quant, "fit", mx.array(np.diag(h).copy())), quant, h)


@pytest.mark.parametrize("factor", [1.0, 37.0])
def test_without_correlations_it_is_fit(factor):
    values, quant = weights(3, 8, 320), Quant(4, 64)
    for part, wanted in zip(gptq(values, quant, mx.eye(320) * factor, turns=0), rounded(values, quant), strict=True):
        assert mx.array_equal(part, wanted)


def test_without_any_input_it_is_fit():
    values, quant = weights(4, 8, 128), Quant(3, 64)
    for part, wanted in zip(gptq(values, quant, mx.zeros((128, 128)), turns=0), rounded(values, quant), strict=True):
        assert mx.array_equal(part, wanted)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    quant=st.sampled_from([Quant(2, 32), Quant(3, 64), Quant(8, 64)]),
    rank=st.sampled_from([0, 1, 40, 300]),
    dead=st.sets(st.integers(0, 31), max_size=3),
    dtype=st.sampled_from([mx.bfloat16, mx.float32]),
)
def test_no_turn_makes_the_error_larger(seed, quant, rank, dead, dtype):
    values = weights(seed, 4, 192)
    h = hessian(seed, 192, rank, dead) if rank else np.eye(192, dtype=np.float32)  # which fit is best for already
    by_turns = [gptq(values, quant, mx.array(h), 0.1, dtype, turns) for turns in (0, 1, 4)]
    seen = np.array(damped(mx.array(h)[None], 0.1)[0])
    each = [output_error(values, parts, quant, seen) for parts in by_turns]
    each = [one.sum() for one in each]
    assert each[1] <= each[0] * (1 + 1e-5) and each[2] <= each[1] * (1 + 1e-5)


@pytest.mark.parametrize("bits", [2, 3])
def test_turns_end_where_no_code_or_scale_alone_can_be_better(bits):
    values, quant, h = weights(6, 24, 128), Quant(bits, 64), hessian(7, 128, 200)
    parts = gptq(values, quant, mx.array(h), 0.1, mx.float32, turns=30)
    seen = np.array(damped(mx.array(h)[None], 0.1)[0]).astype(np.float64)
    q, (scales, biases) = unpacked(parts, quant), (np.repeat(np.array(part), 64, -1) for part in parts[1:])
    codes = np.rint((q - biases) / scales)
    pull = (np.array(values.astype(mx.float32)) - q) @ seen
    for step in (-1, 1):  # the error changes by step * scale * (step * scale * h_jj - 2 * pull)
        change = step * scales * (step * scales * np.diag(seen) - 2 * pull)
        assert change[(codes + step >= 0) & (codes + step < 2**bits)].min() > -1e-3
    for direction in (codes, np.ones_like(codes)):  # derivatives by scale and bias
        by_line = (pull * direction).reshape(24, 2, 64).sum(-1) / np.abs(pull * direction).reshape(24, 2, 64).sum(-1)
        assert np.abs(by_line).max() < 1e-3
    plain = output_error(values, gptq(values, quant, mx.array(h), 0.1, mx.float32, turns=0), quant, seen)
    assert output_error(values, parts, quant, seen).sum() < 0.95 * plain.sum()


def test_matrices_side_by_side_have_the_codes_that_they_have_alone():
    values, quant = weights(5, 3, 8, 192), Quant(3, 64)
    h = np.stack([hessian(seed, 192, 96) for seed in range(3)])  # fewer inputs than columns
    together = gptq(values, quant, mx.array(h))
    for i in range(3):
        alone = output_error(values[i], gptq(values[i], quant, mx.array(h[i])), quant, h[i])
        assert np.isclose(output_error(values, together, quant, h)[i], alone, rtol=0.02)
    assert [part.shape for part in together] == [(3, 8, 18), (3, 8, 3), (3, 8, 3)]


def test_forms_and_shapes_that_it_does_not_take():
    for quant, columns in ((Quant(4, 32, "mxfp4"), 64), (Quant(4, 64), 128)):
        with pytest.raises(ValueError, match="GPTQ of 4 bits"):
            gptq(weights(0, 2, 64), quant, mx.eye(columns))
