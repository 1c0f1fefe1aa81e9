"""Mamba-2 in chunks and token by token, by MLX's operations and by numpy's, against its recurrence in float64."""

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.kinds import CHUNK, Mamba2
from moeflux_mlx.ops import mamba as operation
from moeflux_mlx.ops.mamba import MambaWeights, mamba
from moeflux_mlx.state.recurrent import RecurrentCache

SIZES = Mamba2(heads=6, head_dim=8, state_dim=16, groups=3, taps=4, least_step=0.4, most_step=1.5)
TOLERANCE = 1e-4  # the norm enlarges what is small


def drawn(seed, texts, length):
    """What comes of the projection, and parameters."""
    rng, channels, heads = np.random.default_rng(seed), SIZES.channels, SIZES.heads
    shapes = (channels, 4, 1), (channels,), (heads,), (heads,), (heads,), (SIZES.width,)
    parameters = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return rng.standard_normal((texts, length, SIZES.projected), dtype=np.float32), parameters


def recurrence(projected, parameters):
    """arXiv:2405.21060, section 3.1 and figure 6, and `NemotronHMamba2Mixer` of transformers, of one text."""
    conv, conv_bias, A_log, dt_bias, D, norm = (one.astype(np.float64) for one in parameters)
    S, out = np.zeros((SIZES.heads, SIZES.head_dim, SIZES.state_dim)), []
    z, inputs, dt = np.split(projected.astype(np.float64), [SIZES.width, SIZES.width + SIZES.channels], axis=-1)
    inputs = np.concatenate([np.zeros((SIZES.taps - 1, SIZES.channels)), inputs])
    for t in range(len(z)):
        mixed = (inputs[t : t + SIZES.taps].T * conv[..., 0]).sum(-1) + conv_bias
        mixed = mixed / (1 + np.exp(-mixed))
        x, B, C = np.split(mixed, [SIZES.width, SIZES.width + SIZES.groups * SIZES.state_dim])
        step = np.clip(np.log1p(np.exp(dt[t] + dt_bias)), SIZES.least_step, SIZES.most_step)
        y = np.zeros((SIZES.heads, SIZES.head_dim))
        for h in range(SIZES.heads):
            group = slice(h // 2 * SIZES.state_dim, (h // 2 + 1) * SIZES.state_dim)
            own = x[h * SIZES.head_dim : (h + 1) * SIZES.head_dim]
            S[h] = np.exp(-np.exp(A_log[h]) * step[h]) * S[h] + step[h] * np.outer(own, B[group])
            y[h] = S[h] @ C[group] + D[h] * own
        y = (y.reshape(-1) * z[t] / (1 + np.exp(-z[t]))).reshape(SIZES.groups, -1)
        out.append((y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)).reshape(-1) * norm)
    return np.stack(out)


def error(make, projected, parameters, lengths):
    """Of calls of these lengths, with arrays that `make` makes of activations."""
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
@pytest.mark.parametrize("fault", ["state", "later tokens", "order of groups"])
def test_faults_would_be_seen(monkeypatch, fault):
    right = operation._chunk
    wrong = {
        "state": lambda x, B, C, decay, S: right(x, B, C, decay, 0 * S),
        "later tokens": lambda x, B, C, decay, S: right(x, B, C, 0.9 * decay, S),
        "order of groups": lambda x, B, C, decay, S: right(x, B[:, ::-1], C[:, ::-1], decay, S),
    }
    monkeypatch.setattr(operation, "_chunk", wrong[fault])
    for lengths in ([CHUNK + 5], [9] + [1] * 5):
        assert error(np.array, *drawn(1, 1, sum(lengths)), lengths) > 100 * TOLERANCE
