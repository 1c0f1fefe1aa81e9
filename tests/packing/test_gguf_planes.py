"""Planes of GGUF's K types: their values are those of the `gguf` package, and they take no more bytes than blocks."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.ops.nested import NESTED, nested_values, stream
from moeflux_mlx.packing.gguf_planes import BYTES, packed_stream, planes_of

pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)


@pytest.mark.parametrize("kind", NESTED)
def test_planes_have_every_value(cpu_device, kind):
    rows = gguf_models.random_blocks(kind, (3, 5, 1024), 3)
    wanted = gguf_models.values_of(kind, rows)
    planes = planes_of(kind, rows)
    assert np.array_equal(np.array(nested_values(NESTED[kind], planes)), wanted)
    assert sum(plane.nbytes for plane in planes if plane is not None) == rows.nbytes == 3 * 5 * 4 * BYTES[kind]


@pytest.mark.parametrize("kind", NESTED)
def test_every_bit_of_a_block_matters(cpu_device, kind):
    """One flipped bit changes what the package computes, and the planes follow it."""
    rows = gguf_models.random_blocks(kind, (1, 256), 4).repeat(BYTES[kind] * 8, axis=0)
    flipped = rows.copy()
    for bit in range(BYTES[kind] * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    with np.errstate(all="ignore"):
        wanted, plain = gguf_models.values_of(kind, flipped), gguf_models.values_of(kind, rows)
    made = np.array(nested_values(NESTED[kind], planes_of(kind, flipped)))
    finite = np.isfinite(wanted).all(axis=1)
    assert np.array_equal(made[finite], wanted[finite]) and finite.mean() > 0.99
    assert (wanted != plain).any(axis=1).mean() > 0.85


def test_streams_of_every_width(cpu_device):
    rng = np.random.default_rng(0)
    for bits in range(1, 9):
        codes = rng.integers(0, 1 << bits, (3, 64), dtype=np.uint8)
        data = packed_stream(codes, bits)
        assert data.shape == (3, 8 * bits)
        assert np.array_equal(np.array(stream(mx.array(data), bits)), codes)
