"""The kernel before one token's latent attention against the plain operations, which goldens hold."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest

from metal import msl
from moeflux_mlx.kinds import Rotation, Yarn
from moeflux_mlx.model.layers import RMSNorm
from moeflux_mlx.ops import latent
from moeflux_mlx.ops.rope import Rope

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 1.2e-2, mx.float16: 2e-3}  # largest error over largest value
YARN = Yarn(4.0, 32, attention_factor=1.7)
CASES = [  # heads, nope, latent, rotation
    (3, 16, 64, Rotation(8, 1e4, interleaved=True)),
    (4, 48, 40, Rotation(64, 1e6, YARN)),
    (128, 128, 512, Rotation(64, 1e4, YARN, interleaved=True)),
]


@pytest.fixture
def host():
    with msl.launching():
        yield


def error(case, dtype, position):
    """The largest of the four outputs; whoever rounds more often is the reference in float32."""
    heads, nope, width, rotation = case
    rng = np.random.default_rng([heads, nope])
    shapes = (1, 1, heads, nope + rotation.dims), (1, 1, width + rotation.dims), (width,)
    q, kv, weight = (mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes)
    norm, exact, rope = RMSNorm(width, 0.1), RMSNorm(width, 0.1), Rope(rotation)
    norm.weight, exact.weight = weight, weight.astype(mx.float32)
    offset = mx.array(position, mx.int32) if position % 2 else position
    got = latent._step(q, kv, norm, rope, offset)
    want = latent._parts(q.astype(mx.float32), kv.astype(mx.float32), exact, rope, position)
    pairs = [(np.array(a.astype(mx.float32)), np.array(b)) for a, b in zip(got, want, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("position", [0, 3001])
def test_latent_step_equals_plain_operations(host, case, dtype, position):
    assert error(case, dtype, position) < LIMITS[dtype]


FAULTS = {
    "queries of the first head": ("kv : q + head * (NOPE + R)", "kv : q"),
    "no epsilon": ("+ eps[0]", "+ 0 * eps[0]"),
    "unturned values too": ("x[width + second]", "x[second]"),
    "pairs of the other kind": ("NEXT ?", "!NEXT ?"),
    "turned backwards": ("a * cosine - b * sine", "a * cosine + b * sine"),
    "no magnitude": ("magnitude[0] * metal::sin", "metal::sin"),
    "a weight for all": ("weight[i]", "weight[0]"),
}


@msl.needed
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(host, monkeypatch, name):
    msl.plant(monkeypatch, "latent_step.metal", *FAULTS[name])
    with contextlib.suppress(msl.Failure):
        assert not max(error(case, mx.float32, 37) for case in CASES[:2]) < LIMITS[mx.float32]
