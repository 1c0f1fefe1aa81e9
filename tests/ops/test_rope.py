"""Rotary positions of three axes: those of text have the bits of plain ones, and each pair follows its own axis."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.kinds import Rotation, Yarn
from moeflux_mlx.ops.rope import Rope

AXES = (0, 1, 2, 0, 1, 2, 0, 0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("yarn", [None, Yarn(4.0, 4096)])
def test_a_text_has_the_bits_of_plain_positions(interleaved, yarn):
    """A prompt with images, its text without them and the next tokens write one cache."""
    rope = Rope(Rotation(16, 1e6, yarn, interleaved, axes=AXES))
    x = mx.random.normal((2, 3, 40, 24), key=mx.random.key(0)).astype(mx.bfloat16)
    positions = np.tile(np.arange(9000, 9040), (3, 1))
    assert mx.array_equal(rope(x, positions), rope(x, 9000))


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_follows_its_axis(interleaved):
    """In MLX's kernel, whose cosines are fast ones on a Mac, as in the native one."""
    rope = Rope(Rotation(16, 1e4, interleaved=interleaved, axes=AXES))
    random = np.random.default_rng(0)
    x, positions = random.standard_normal((1, 3, 40, 24), np.float32), random.integers(0, 100, (3, 40))
    got, want = rope(mx.array(x), positions), rope(x.swapaxes(1, 2), positions).swapaxes(1, 2)
    assert np.abs(np.array(got) - want).max() < 1e-2
    assert np.abs(np.array(rope(mx.array(x), positions[::-1].copy())) - want).max() > 1
