"""Gated connections between several streams, by kernels and plain operations, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import msl
from moeflux_mlx.kinds import GatedConnections
from moeflux_mlx.layers import Linear
from moeflux_mlx.model.streams import MIXERS, MLP, GatedConnection, MessageGates
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
EPS = 1e-3
AFFINE, MXFP4 = Quant(4, 64), Quant(4, 32, "mxfp4")


def connection(D, rule, quant, dtype, is_last):
    """Returns a connection with random weights, and its matrices as they are stored, in float64."""
    rng, made, matrices = np.random.default_rng(D), GatedConnection(rule, D, EPS, is_last), []
    made.hc_norm.weight = mx.array(rng.normal(size=rule.streams * D)).astype(dtype)
    for layer in made._inputs.layers + (made.input_mix_weight_up,):
        w = mx.array(rng.normal(size=layer.shape) / layer.shape[-1] ** 0.5).astype(dtype)
        matrices.append(w)
        layer.filled, layer.weight, layer.quant = True, w, quant
        if quant is not None:
            layer.weight, *rest = mx.quantize(w, quant.group_size, quant.bits, quant.mode)
            for name, part in zip(quant.parts[1:], rest, strict=True):
                setattr(layer, name, part)
            matrices[-1] = mx.dequantize(
                layer.weight, *rest, group_size=quant.group_size, bits=quant.bits, mode=quant.mode
            )
    made.arrange()
    return made, [wide(w) for w in matrices]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def check(D=72, rank=64, streams=4, dtype=mx.float32, quant=None, is_last=False):
    """Checks the input of a part and the streams after it (transformers, `Qwen4ExpTextGatedResidual`)."""
    rule, rng = GatedConnections(streams, rank), np.random.default_rng(rank)
    by, (down, *inject, up) = connection(D, rule, quant, dtype, is_last)
    h, out = (mx.array(rng.normal(size=(1, 1, width))).astype(dtype) for width in (streams * D, D))
    streams_of = wide(h).reshape(streams, D)
    normed = streams_of / np.sqrt((streams_of**2).mean(-1, keepdims=True) + EPS)
    normed = normed.reshape(-1) * wide(by.hc_norm.weight)
    low = down @ normed / streams
    mean = (sigmoid(up @ (low * sigmoid(low))) * normed).reshape(streams, D).mean(0)
    if is_last:
        pairs = [(by.last(h), mean)]
    else:
        x, weights = by.gather(h)
        post = 2 * sigmoid(inject[0] @ normed / streams)
        behind = streams_of + post[:, None] * wide(out)[0, 0]
        pairs = [(x, mean), (weights, post), (by.scatter(h, out, weights), behind.reshape(-1))]
        following = by.gather_behind(h, out, weights)
        for one, same in zip(following, (pairs[2][0], *by.gather(pairs[2][0])), strict=True):
            assert mx.array_equal(one, same), "in one launch or in two"
    for got, want in pairs:
        assert np.abs(wide(got)[0, 0] - want).max() < LIMITS[dtype] * np.abs(want).max()


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("is_last", [False, True])
def test_plain_operations(is_last):
    check(is_last=is_last)


CASES = [
    dict(D=264, rank=40),
    dict(D=128, rank=192, streams=2, quant=AFFINE, dtype=mx.bfloat16),
    dict(D=64, quant=MXFP4, is_last=True),
]


@pytest.mark.parametrize("case", CASES)
def test_a_token_on_kernels(monkeypatch, case):
    monkeypatch.setattr("moeflux_mlx.model.streams.normed_streams", None)  # the plain operations must not run
    with msl.launching():
        check(**case)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("streams_low.metal", "piece < PIECES", "piece < PIECES - 1"),
        pytest.param("streams_low.metal", "out + 8 * piece", "out + 8 * at", marks=pytest.mark.full),
        pytest.param("streams_low.metal", "metal::fma(sum, factor, whole)", "sum * factor", marks=pytest.mark.full),
        ("streams_mean.metal", "float(weight[i * D + at])", "float(weight[at])"),
        pytest.param("streams_mean.metal", "made[O + i]", "made[O]", marks=pytest.mark.full),
        pytest.param(
            "streams_mean.metal", "-made[LOW + index] / float(N)", "-made[LOW + index]", marks=pytest.mark.full
        ),
        pytest.param("streams.h.metal", "added, own[k])", "added, own[0])", marks=pytest.mark.full),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        check()


def check_messages(names, dtype=mx.float32, quant=None, D=128, rank=64):
    """Messages that are let in, beside those of `MessageGate`, which goldens hold to transformers."""
    rng, gates = np.random.default_rng(len(names)), MessageGates(D, rank, EPS)
    for layer in (one for _, one in gates.named_modules() if isinstance(one, Linear)):
        w = mx.array(2 * rng.normal(size=layer.shape) / layer.shape[-1] ** 0.5).astype(dtype)
        layer.filled, layer.weight, layer.quant = True, w, quant
        if quant is not None:
            layer.weight, layer.scales, layer.biases = mx.quantize(w, quant.group_size, quant.bits)
    gates.arrange()
    inputs, messages = ([mx.array(rng.normal(size=(1, 1, D))).astype(dtype) for _ in names] for _ in range(2))
    want = np.concatenate([wide(gates[name](*pair)) for name, *pair in zip(names, inputs, messages, strict=True)], -1)
    with msl.launching():
        for name in names:
            gates[name].eps = 1e6  # of plain operations, which must not run
        got = gates(names, inputs, messages)
        assert got.dtype == dtype and got.shape == want.shape
        assert np.abs(wide(got) - want).max() < 2 * LIMITS[dtype] * np.abs(want).max()


@pytest.mark.parametrize("names", [MIXERS, MLP])
@pytest.mark.parametrize("dtype, quant", [(mx.float32, None), (mx.bfloat16, AFFINE)])
def test_messages_on_kernels(monkeypatch, names, dtype, quant):
    check_messages(names, dtype, quant)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("low", "top / (O / GATES) * N * D", "0"),
        ("mean", "made[gate * LOW + i]", "made[i]"),
        ("mean", "(gate * N + i) * D + at]", "i * D + at]"),
        ("mean", "(1.0f - tanh) * v", "v"),
        ("mean", "x[gate * D + column]", "x[column]"),
    ],
)
def test_a_planted_fault_in_messages_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, f"streams_{file}.metal", old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        check_messages(MIXERS)
