"""The delta rule with a decay per channel, in chunks, compared with single steps in float64."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.mixers.delta.channel_op import CHUNK, channel_delta, inverse
from moeflux_mlx.mixers.delta.spec import LEAST_FLOOR
from moeflux_mlx.ops import native

HEADS, KEY, VALUE = 2, 16, 8


def steps(*given):
    """Returns the steps of both texts, in the oracle's form."""
    q, k, v, decays, beta, state = (part.astype(np.float64) for part in given)
    texts = zip(q, k, v, np.exp(decays), beta, state, strict=True)
    return map(np.stack, zip(*(oracle.gated_delta_recurrence(*text) for text in texts), strict=True))


def drawn(seed, length, least, alike):
    """Returns tokens of two texts. With `alike` the keys of all tokens are the same, like those of a repeated token."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(2, length, HEADS, KEY)) for _ in range(2))
    if alike:
        k = np.broadcast_to(k[:, :1], k.shape)
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    v, state = rng.normal(size=(2, length, HEADS, VALUE)), rng.normal(size=(2, HEADS, VALUE, KEY))
    decays, beta = least * rng.random(k.shape), rng.random((2, length, HEADS)) ** (0.01 if alike else 1)
    return [part.astype(np.float32) for part in (q, k, v, decays, beta, state)]


def in_chunks(*given):
    return channel_delta(*map(mx.array, given))


def in_chunks_without_a_bound(*given):
    return channel_delta(*map(mx.array, given), is_bounded=False)


def natively(q, k, v, decays, beta, state):
    texts = [native.gated_delta(*text) for text in zip(state, q, k, v, np.exp(decays), beta, strict=True)]
    return map(np.stack, zip(*texts, strict=True))


FORMS = [
    in_chunks,
    in_chunks_without_a_bound,
    pytest.param(natively, marks=pytest.mark.skipif(not native.available(), reason="no extension")),
]
lengths = st.integers(1, 3 * CHUNK + 2)


@given(seed=st.integers(0, 2**16), length=lengths, least=st.sampled_from([0.0, -0.1, LEAST_FLOOR]))
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("compute", FORMS)
@pytest.mark.parametrize("alike", [False, True])
def test_chunks_are_steps(compute, alike, seed, length, least):
    given = drawn(seed, length, least, alike)
    for one, wanted in zip(compute(*given), steps(*given), strict=True):
        np.testing.assert_allclose(np.array(one), wanted, atol=3e-5)


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK + 5])
def test_every_channel_decays_as_fast_as_it_can(length):
    given = drawn(1, length, LEAST_FLOOR, False)
    given[3][:] = LEAST_FLOOR
    for one, wanted in zip(in_chunks(*given), steps(*given), strict=True):
        np.testing.assert_allclose(np.array(one), wanted, atol=3e-5)


def test_decays_without_a_bound():
    given = drawn(3, CHUNK + 5, -200.0, False)
    for one, wanted in zip(in_chunks_without_a_bound(*given), steps(*given), strict=True):
        np.testing.assert_allclose(np.array(one), wanted, rtol=1e-4, atol=3e-5)


def test_a_prompt_in_several_parts(monkeypatch):
    given = drawn(2, 50, -1.0, False)
    wanted, state = steps(*given)
    monkeypatch.setattr("moeflux_mlx.mixers.delta.channel_op.DELTA_TOKENS", 20)
    for one, other in zip(in_chunks(*given), (wanted, state), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=3e-5)


def test_inverses_stay_small():
    """The powers of this matrix grow more than those of any other.

    Halves of it are inverted, so no power is computed.
    """
    assert np.array_equal(inverse(mx.tril(mx.ones((16, 16)), -1)), np.eye(16) - np.eye(16, k=-1))
