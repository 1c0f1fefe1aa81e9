"""The gated short convolution: calls of any lengths against its sum in float64, and the kernel for one token."""

import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from metal import msl
from moeflux_mlx.mixers.conv import op as operation
from moeflux_mlx.mixers.conv.cache import ConvCache
from moeflux_mlx.mixers.conv.op import short_conv
from moeflux_mlx.mixers.conv.spec import ShortConv
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.backend import library_of
from moeflux_mlx.ops.convolution import convolved
from moeflux_mlx.ops.rows import StepRows

SIZES, WIDE = ShortConv(channels=48, taps=3), ShortConv(channels=300, taps=4)  # WIDE has more than a threadgroup
TOLERANCE = 1e-5


def drawn(seed, texts, length, sizes=SIZES):
    """Returns random outputs of the projection, and taps."""
    rng = np.random.default_rng(seed)
    projected = rng.standard_normal((texts, length, sizes.projected), dtype=np.float32)
    return projected, rng.standard_normal((sizes.channels, sizes.taps, 1), dtype=np.float32)


def summed(projected, weight, sizes=SIZES):
    """Computes one text as transformers' `Lfm2MoeShortConv` does, in float64."""
    B, C, x = np.split(projected.astype(np.float64), 3, axis=-1)
    inputs = np.concatenate([np.zeros((sizes.taps - 1, sizes.channels)), B * x])
    sums = [(inputs[t : t + sizes.taps].T * weight[..., 0]).sum(-1) for t in range(len(x))]
    return C * np.stack(sums)


def error(make, projected, weight, lengths):
    """Returns the error of calls of these lengths. `make` converts activations."""
    cache, calls = ConvCache(SIZES), np.split(projected, np.cumsum(lengths)[:-1], axis=1)
    assert cache.empty()
    got = np.concatenate([np.array(short_conv(make(call), cache, mx.array(weight), SIZES)) for call in calls], axis=1)
    assert cache.offset == projected.shape[1] and not cache.empty()
    assert cache.nbytes == len(projected) * cache.bytes_for(1, 4)
    return np.abs(got - np.stack([summed(text, weight) for text in projected])).max()


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("make", [np.array, mx.array])
@given(
    seed=st.integers(0, 2**32),
    texts=st.integers(1, 2),
    lengths=st.lists(st.sampled_from([1, 1, 2, 5, 40]), min_size=1, max_size=4),
)
@settings(max_examples=examples(15), deadline=None)
def test_calls_of_any_lengths_match_the_sum(make, seed, texts, lengths):
    assert error(make, *drawn(seed, texts, sum(lengths)), lengths) < TOLERANCE


def with_gates_exchanged(*given, right=operation.split):
    return [right(*given)[i] for i in (1, 0, 2)]


FAULTS = {
    "order of gates": (operation, "split", with_gates_exchanged),
    "an activation": (operation, "float32", lambda x: x / (1 + library_of(x).exp(-x))),
    "a state that is lost": (ConvCache, "absorb", lambda self, arrays, tokens: None),
}


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("make", [np.array, mx.array])
@pytest.mark.parametrize("fault", ["order of taps", *FAULTS])
def test_faults_would_be_seen(monkeypatch, make, fault):
    projected, weight = drawn(1, 1, 12)
    if fault in FAULTS:
        monkeypatch.setattr(*FAULTS[fault])
    else:
        weight = weight[:, ::-1].copy()
    cache, got = ConvCache(SIZES), []
    for piece in (projected[:, :9], projected[:, 9:10], projected[:, 10:]):
        got.append(np.array(short_conv(make(piece), cache, mx.array(weight), SIZES)))
    want = summed(projected[0], drawn(1, 1, 12)[1])
    assert np.abs(np.concatenate(got, axis=1)[0] - want).max() > 100 * TOLERANCE


def tokens_on_the_kernel(sizes, dtype):
    """The error of five tokens of each of four sequences, which share a launch, over the largest value. Each row has
    the bits that it has alone."""
    projected, weight = drawn(1, 4, 5, sizes)
    rows = mx.array(projected).astype(dtype).swapaxes(0, 1)  # [5, 4, .]
    taps = mx.array(weight).astype(dtype)
    together, alone = ([ConvCache(sizes) for _ in range(4)] for _ in range(2))
    assert not operation.refusal(backend.name(), 1, 1)
    for row in rows:
        outs = short_conv(row[None], StepRows(together, lambda i: None), taps, sizes)
        own = [short_conv(row[None, i : i + 1], cache, taps, sizes) for i, cache in enumerate(alone)]
        assert mx.array_equal(outs, mx.concatenate(own, axis=1))
    for ours, other in zip(together, alone, strict=True):
        assert ours.offset == 5 and not ours.empty() and mx.array_equal(ours.conv, other.conv)
    given = np.array(rows.astype(mx.float32)).swapaxes(0, 1)
    want = np.stack([summed(text, np.array(taps.astype(mx.float32)), sizes)[-1] for text in given])
    return np.abs(np.array(outs[0].astype(mx.float32)) - want).max() / np.abs(want).max()


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "sizes, dtype, limit", [(SIZES, mx.float32, 1e-6), (WIDE, mx.float32, 1e-6), (WIDE, mx.bfloat16, 1e-2)]
)
def test_tokens_on_the_kernel(sizes, dtype, limit):
    with msl.launching():
        assert tokens_on_the_kernel(sizes, dtype) < limit


@pytest.mark.usefixtures("cpu_device")
def test_the_kernel_continues_a_prompt():
    """The state that MLX's operations leave is the kernel's, and the other way round."""
    projected, weight = drawn(2, 1, 12)
    cache, taps = ConvCache(SIZES), mx.array(weight)
    with msl.launching():
        ends = (0, 7, 8, 9, 12)
        parts = [
            short_conv(mx.array(projected[:, a:b]), cache, taps, SIZES) for a, b in zip(ends, ends[1:], strict=False)
        ]
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1))[0], summed(projected[0], weight), atol=TOLERANCE)


def short_tokens(heads, dtype, adds):
    """The error of tokens, added to themselves, on the kernel beside plain operations, over the largest value.
    `heads`: that have taps of each token, 0: none.
    """
    rng, channels, taps = np.random.default_rng(heads), 300, 4
    weight = mx.array(rng.normal(size=(channels, taps, 1))).astype(dtype)
    caches, lengths, worst = [ConvCache(WIDE) for _ in range(2)], [6, 1, 1], 0.0
    for length in lengths:
        x = mx.array(rng.normal(size=(1, length, channels))).astype(dtype)
        more = mx.array(rng.normal(size=(1, length, heads, taps))).astype(dtype) if heads else None
        beside = weight, 0.4, more, 2 * x if adds else None
        want = np.array(convolved(x, caches[0], *beside).astype(mx.float32))
        with msl.launching():
            got = convolved(x, caches[1], *beside)
            mx.eval(got, caches[1].conv)
        assert got.dtype == dtype and mx.array_equal(caches[0].conv, caches[1].conv)
        worst = max(worst, np.abs(np.array(got.astype(mx.float32)) - want).max() / np.abs(want).max())
    return worst


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("heads, dtype, adds", [(0, mx.float32, True), (6, mx.float32, False), (6, mx.bfloat16, True)])
def test_convolutions_that_are_added_to_their_input(heads, dtype, adds):
    assert short_tokens(heads, dtype, adds) < (1e-2 if dtype == mx.bfloat16 else 1e-6)


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "old, new",
    [
        ("TAPS + TAPS - 1 - j]) : 0.0f", "TAPS + j]) : 0.0f"),
        ("(newest + sum) * FACTOR", "sum * FACTOR"),
        ("float(residual[column]) +", ""),
        ("column / (C / OWN)", "column % OWN"),
    ],
)
def test_a_planted_fault_in_a_convolution_is_caught(monkeypatch, old, new):
    msl.plant(monkeypatch, "conv_step.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        assert short_tokens(6, mx.float32, True) < 1e-3


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "old, new",
    [
        ("taps[column * TAPS + j]", "taps[column * TAPS + TAPS - 1 - j]"),
        ("next_conv[(j - 1) * C", "next_conv[(TAPS - 1 - j) * C"),
        pytest.param("projected[C + column]", "projected[column]", marks=pytest.mark.full),
        pytest.param("projected[2 * C + column]", "projected[C + column]", marks=pytest.mark.full),
        pytest.param("j + 1 < TAPS ?", "j < TAPS ?", marks=pytest.mark.full),
        pytest.param("conv[j * C + column]", "conv[column]", marks=pytest.mark.full),
    ],
)
def test_a_planted_fault_in_the_kernel_is_caught(monkeypatch, old, new):
    msl.plant(monkeypatch, "conv_step.metal", old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        assert tokens_on_the_kernel(WIDE, mx.float32) < 1e-3
