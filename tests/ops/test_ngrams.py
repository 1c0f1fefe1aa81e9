"""What n-grams add to streams, by the kernel for one token and by plain operations, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import msl
from moeflux_mlx.kinds import NGrams
from moeflux_mlx.ops import backend, ngrams

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
EPS = 1e-3


def normed(rows):
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def error(D=300, dtype=mx.float32, has_before=True, streams=3, taps=4, far=3):
    """Returns the error of the streams and of the convolution's next inputs, over the largest value.

    The reference is transformers' `Qwen4ExpTextPLELayer`.
    """
    rng, width = np.random.default_rng(D), streams * D
    part = NGrams((5,), (1,) * far, 5, 8, 0, taps, width)
    shapes = (1, 1, width), (1, 1, width), (1, 1, D), (1, part.remembered, width), *[(width,)] * 3, (width, taps, 1)
    h, key, value, before, *weights = (mx.array(rng.normal(size=shape)).astype(dtype) for shape in shapes)
    if not has_before:
        before = before * 0
    given = ngrams.NGramWeights(*weights[:3], EPS, weights[3])
    got = ngrams.with_ngrams(h, key, value, before if has_before else None, given, part)

    v, k = (wide(one).reshape(streams, D) for one in (h, key))
    by_key, by_query, by_input = (wide(one).reshape(streams, D) for one in weights[:3])
    g = (normed(k) * by_key * normed(v) * by_query).sum(-1, keepdims=True) / np.sqrt(D)
    gated = sigmoid(np.sign(g) * np.sqrt(np.maximum(np.abs(g), 1e-6))) * wide(value)[0]
    inputs = np.concatenate([wide(before)[0], (normed(gated) * by_input).reshape(1, -1)])
    convolved = (inputs[::far].T * wide(weights[3])[..., 0]).sum(-1)
    want = wide(h)[0, 0] + gated.reshape(-1) + convolved * sigmoid(convolved)
    pairs = zip(got, (want, inputs[1:]), strict=True)
    return max(np.abs(wide(one)[0] - two).max() / np.abs(two).max() for one, two in pairs)


@pytest.mark.usefixtures("plain_operations")
def test_plain_operations():
    assert error() < LIMITS[mx.float32]


@msl.needed
@pytest.mark.parametrize("case", [{}, {"D": 40, "dtype": mx.bfloat16}, {"has_before": False, "far": 2}])
def test_a_token_on_the_kernel(case):
    with msl.launching():
        assert not ngrams.refusal(backend.name(), 1)
        assert error(**case) < LIMITS[case.get("dtype", mx.float32)]


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [
        ("g < 0.0f ? root", "g < 0.0f ? -root"),
        pytest.param("conv[i * FAR * WIDTH", "conv[i * WIDTH", marks=pytest.mark.full),
        pytest.param("gate * gate * values", "gate * values", marks=pytest.mark.full),
        pytest.param("conv[(r + 1) * WIDTH", "conv[r * WIDTH", marks=pytest.mark.full),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, old, new):
    msl.plant(monkeypatch, "ngrams_step.metal", old, new)
    with msl.launching():
        assert error() > 1e-3
