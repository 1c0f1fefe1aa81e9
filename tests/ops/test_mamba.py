"""Mamba-2 in chunks and token by token, by kernels, MLX's operations and numpy's, against its recurrence in float64."""

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from metal import msl
from moeflux_mlx.caches.recurrent import RecurrentCache
from moeflux_mlx.mixers.mamba import op as operation
from moeflux_mlx.mixers.mamba.op import MambaWeights, mamba
from moeflux_mlx.mixers.mamba.spec import CHUNK, Mamba2
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.launch import pack
from moeflux_mlx.ops.rows import StepRows

SIZES = Mamba2(heads=6, head_dim=8, state_dim=16, groups=3, taps=4, least_step=0.4, most_step=1.5)
WIDE = Mamba2(heads=4, head_dim=20, state_dim=40, groups=2, taps=3)
TOLERANCE = 1e-4  # the norm amplifies small errors


def drawn(seed, texts, length, sizes=SIZES):
    """Returns random outputs of the projection, and parameters."""
    rng, channels, heads = np.random.default_rng(seed), sizes.channels, sizes.heads
    shapes = (channels, sizes.taps, 1), (channels,), (heads,), (heads,), (heads,), (sizes.width,)
    parameters = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return rng.standard_normal((texts, length, sizes.projected), dtype=np.float32), parameters


def recurrence(projected, parameters, sizes=SIZES):
    """Computes one text as arXiv:2405.21060 (section 3.1 and figure 6) and transformers' `NemotronHMamba2Mixer` do."""
    conv, conv_bias, A_log, dt_bias, D, norm = (one.astype(np.float64) for one in parameters)
    S, out = np.zeros((sizes.heads, sizes.head_dim, sizes.state_dim)), []
    z, inputs, dt = np.split(projected.astype(np.float64), [sizes.width, sizes.width + sizes.channels], axis=-1)
    inputs = np.concatenate([np.zeros((sizes.taps - 1, sizes.channels)), inputs])
    for t in range(len(z)):
        mixed = (inputs[t : t + sizes.taps].T * conv[..., 0]).sum(-1) + conv_bias
        mixed = mixed / (1 + np.exp(-mixed))
        x, B, C = np.split(mixed, [sizes.width, sizes.width + sizes.groups * sizes.state_dim])
        step = np.clip(np.log1p(np.exp(dt[t] + dt_bias)), sizes.least_step, sizes.most_step)
        y = np.zeros((sizes.heads, sizes.head_dim))
        for h in range(sizes.heads):
            group = slice(h // 2 * sizes.state_dim, (h // 2 + 1) * sizes.state_dim)
            own = x[h * sizes.head_dim : (h + 1) * sizes.head_dim]
            S[h] = np.exp(-np.exp(A_log[h]) * step[h]) * S[h] + step[h] * np.outer(own, B[group])
            y[h] = S[h] @ C[group] + D[h] * own
        y = (y.reshape(-1) * z[t] / (1 + np.exp(-z[t]))).reshape(sizes.groups, -1)
        out.append((y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)).reshape(-1) * norm)
    return np.stack(out)


def error(make, projected, parameters, lengths):
    """Returns the error of calls of these lengths. `make` converts activations."""
    weights, cache = MambaWeights(*map(mx.array, parameters), 1e-5), RecurrentCache(SIZES)
    calls = np.split(projected, np.cumsum(lengths)[:-1], axis=1)
    got = np.concatenate([np.array(mamba(make(call), cache, weights, SIZES)) for call in calls], axis=1)
    assert cache.offset == projected.shape[1]
    return np.abs(got - np.stack([recurrence(text, parameters) for text in projected])).max()


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("make", [np.array, mx.array])
@given(
    seed=st.integers(0, 2**32),
    texts=st.integers(1, 2),
    lengths=st.lists(st.sampled_from([1, 1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1]), min_size=1, max_size=4),
)
@settings(max_examples=examples(15), deadline=None)
def test_calls_of_any_lengths_match_the_recurrence(make, seed, texts, lengths):
    assert error(make, *drawn(seed, texts, sum(lengths)), lengths) < TOLERANCE


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("make", [np.array, mx.array])
def test_a_prompt_in_pieces_matches_the_recurrence(monkeypatch, make):
    monkeypatch.setattr(operation, "PIECE", 2 * CHUNK)
    assert error(make, *drawn(2, 2, 4 * CHUNK + 3), [4 * CHUNK + 3]) < TOLERANCE


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("fault", ["state", "later tokens", "order of groups"])
def test_faults_would_be_seen(monkeypatch, fault):
    right = operation.chunk
    wrong = {
        "state": lambda x, B, C, decay, S: right(x, B, C, decay, 0 * S),
        "later tokens": lambda x, B, C, decay, S: right(x, B, C, 0.9 * decay, S),
        "order of groups": lambda x, B, C, decay, S: right(x, B[:, ::-1], C[:, ::-1], decay, S),
    }
    monkeypatch.setattr(operation, "chunk", wrong[fault])
    for lengths in ([CHUNK + 5], [9] + [1] * 5):
        assert error(np.array, *drawn(1, 1, sum(lengths)), lengths) > 100 * TOLERANCE


def tokens_on_kernels(sizes, dtype):
    """The error of two tokens of each of four sequences, which share a launch, over the largest value. Each row has
    the bits that it has alone."""
    projected, parameters = drawn(1, 4, 2, sizes)
    rows = mx.array(projected).astype(dtype).swapaxes(0, 1)  # [2, 4, .]
    arrays = [mx.array(one) for one in parameters]
    weights = MambaWeights(*arrays, 1e-5, pack(arrays))
    together, alone = ([RecurrentCache(sizes) for _ in range(4)] for _ in range(2))
    assert not operation.refusal(backend.name(), 1, 1, sizes)
    for row in rows:
        outs = mamba(row[None], StepRows(together, lambda i: None), weights, sizes)
        own = [mamba(row[None, i : i + 1], cache, weights, sizes) for i, cache in enumerate(alone)]
        assert mx.array_equal(outs, mx.concatenate(own, axis=1))
    for ours, other in zip(together, alone, strict=True):
        assert ours.offset == 2 and mx.array_equal(ours.recurrent, other.recurrent)
        assert mx.array_equal(ours.conv, other.conv)
    given = np.array(rows.astype(mx.float32)).swapaxes(0, 1)
    want = np.stack([recurrence(text, parameters, sizes)[-1] for text in given])
    return np.abs(np.array(outs[0].astype(mx.float32)) - want).max() / np.abs(want).max()


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("sizes, dtype, limit", [(SIZES, mx.float32, 1e-5), (WIDE, mx.bfloat16, 1e-2)])
def test_tokens_on_kernels(sizes, dtype, limit):
    with msl.launching():
        assert tokens_on_kernels(sizes, dtype) < limit


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("mamba_step.metal", "NK + head / SHARED) * DK", "NK + head % NK) * DK"),
        ("mamba_step.metal", "dt > MOST ? MOST : dt", "dt"),
        pytest.param("mamba_step.metal", "dt < LEAST ? LEAST :", "", marks=pytest.mark.full),
        pytest.param("mamba_step.metal", "head % SHARED == 0", "head == 0", marks=pytest.mark.full),
        pytest.param("mamba_step.metal", "bias[column]", "0.0f", marks=pytest.mark.full),
        pytest.param("mamba_step.metal", "decay * s[", "s[", marks=pytest.mark.full),
        pytest.param("conv.h.metal", "next[(j - 1) * C", "next[(TAPS - 1 - j) * C", marks=pytest.mark.full),
        ("group_norm.metal", "weight[group * D + i]", "weight[i]"),
    ],
)
def test_a_planted_fault_in_the_kernels_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        assert tokens_on_kernels(SIZES, mx.float32) < 1e-3
