"""A part's input from the sums of blocks, by kernels and plain operations, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import msl
from moeflux_mlx.ops import backend, block_sums

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
EPS = 0.5


def case(count, D, dtype):
    """Returns sums h [1, 1, count * D], out [1, 1, D] and weight [D]."""
    rng = np.random.default_rng(count)
    h, out = (mx.array(rng.normal(size=(1, 1, width)).astype(np.float32)).astype(dtype) for width in (count * D, D))
    return h, out, mx.array((rng.normal(size=D) / D**0.5).astype(np.float32))


def wanted(h, weight):
    """Returns a part's input as mlx-lm's `_attn_res_combine` makes it."""
    weight, h = wide(weight), wide(h).reshape(-1, len(weight))
    logits = h @ weight / np.sqrt((h**2).mean(-1) + EPS)
    shares = np.exp(logits) / np.exp(logits).sum()
    return shares @ h


def check(count, D, dtype):
    h, out, weight = case(count, D, dtype)
    behind = mx.concatenate([h, out], axis=-1)
    added = mx.concatenate([h[..., :-D], h[..., -D:] + out], axis=-1)
    assert np.array_equal(wide(block_sums.added(h, out)), wide(added))
    assert_close(block_sums.mixed(h, weight, EPS), wanted(h, weight), dtype)
    for begins, sums in ((False, added), (True, behind)):
        got, x = block_sums.mixed_behind(h, out, weight, EPS, begins)
        assert got.dtype == dtype and np.array_equal(wide(got), wide(sums))
        assert_close(x, wanted(sums, weight), dtype)


def wanted_normed(h, queries):
    """Returns a part's inputs as transformers' `Inkling2BlockAttentionResidual` makes them, side by side."""
    queries, h = wide(queries), wide(h).reshape(-1, queries.shape[1])
    rows = h / np.sqrt((h**2).mean(-1, keepdims=True) + EPS)
    shares = np.exp(queries @ rows.T)
    return (shares / shares.sum(-1, keepdims=True) @ rows).reshape(-1)


def check_normed(count, D, inputs, dtype):
    h, out, _ = case(count, D, dtype)
    queries = mx.array((3 * np.random.default_rng(1).normal(size=(inputs, D)) / D**0.5).astype(np.float32))
    assert_close(block_sums.mixed_normed(h, queries, EPS), wanted_normed(h, queries), dtype)
    for begins in (False, True):
        sums, x = block_sums.mixed_behind(h, out, queries, EPS, begins, normed=True)
        assert sums.shape[-1] == (count + begins) * D
        assert_close(x, wanted_normed(sums, queries), dtype)


def assert_close(x, want, dtype):
    assert x.dtype == dtype and x.shape == (1, 1, len(want))
    assert np.abs(wide(x)[0, 0] - want).max() / np.abs(want).max() < LIMITS[dtype]


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("count", [1, 3])
def test_plain_operations(count):
    check(count, 40, mx.float32)
    check_normed(count, 40, 3, mx.float32)


@pytest.mark.parametrize("count, D, dtype", [(1, 40, mx.float32), (9, 1200, mx.float32), (4, 300, mx.bfloat16)])
def test_a_token_on_kernels(count, D, dtype):
    with msl.launching():
        assert not block_sums.refusal(backend.name(), 1, count)
        check(count, D, dtype)
        check_normed(count, D, 1 + count % 4, dtype)


def test_more_sums_than_a_thread_has_registers_for():
    with msl.launching():
        assert not block_sums.refusal(backend.name(), 1, 32)
        assert "33 sums, more than 32" in str(block_sums.refusal(backend.name(), 1, 33))
        assert "13 sums, more than 12" in str(block_sums.refusal(backend.name(), 1, 13, 4))
        check(32, 40, mx.float32)  # 33 where a block begins


@pytest.mark.parametrize("rows", [3, 20, 320])  # 320: as many as a sum has values
def test_rows_of_a_step_have_the_bits_that_they_have_alone(rows):
    """Also on numpy arrays, as the CPU computes."""
    h = np.random.default_rng(1).normal(size=(1, rows, 3 * 320)).astype(np.float32)
    weight = mx.array(np.linspace(-1, 1, 320, dtype=np.float32))
    together = block_sums.mixed(h, weight, EPS)
    alone = [block_sums.mixed(h[:, i : i + 1], weight, EPS) for i in range(rows)]
    assert np.array_equal(together, np.concatenate(alone, axis=1))


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("weight[q * D + column]", "weight[column]"),
        ("/ float(D) + EPS", "/ float(D)"),
        ("ADDS == 1 && k == N - 1", "ADDS == 1 && k == 0"),
        ("dot[q * N + k] / total", "dot[q * N + k]"),
        ("part[(Q * N + k) * SG + s]", "part[(Q * N + k) * SG]"),
        ("most = metal::fmax(most, dot[q * N + k])", "most = metal::fmax(most, 300.0f)"),
        ("(NORMED ? square[k] : 1.0f)", "1.0f"),
        ("x * EACH + i", "x + i"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, old, new):
    msl.plant(monkeypatch, "block_sums_mix.metal", old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        check(3, 1200, mx.float32)
        check_normed(3, 1200, 2, mx.float32)
