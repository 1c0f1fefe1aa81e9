"""The kernel that makes an entry, or the key of a block, from a ring of positions, against plain operations."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from grids import one_in_three

from metal import msl
from moeflux_mlx.kinds import Rotation
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.grouped.blocks_op import block_keys
from moeflux_mlx.ops.entry_pool import Pool, pooled
from moeflux_mlx.ops.rope import Rope, turned

pytestmark = [pytest.mark.usefixtures("cpu_device"), msl.needed]
WIDTH, RATIO, SLOTS, BEFORE = 24, 4, 11, 8  # BEFORE: the number of a row's values before those of the entry


def check(series, offset=23, is_first=False):
    """Makes one entry, with gates that weigh the positions.

    With `series` 0 it makes a block's key, the mean of its keys.
    """
    rng, number = np.random.default_rng(offset), offset // RATIO
    normal = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    norm, rope = RMSNorm(WIDTH, 0.1), Rope(Rotation(16, 1e2, interleaved=series > 0), RATIO)
    norm.weight = normal(WIDTH)
    both = max(series, 1) * WIDTH
    ring, bias, gates = normal(1, 1, SLOTS, BEFORE + 2 * both), normal(RATIO, both), BEFORE + both if series else None
    pool = Pool(WIDTH, RATIO, BEFORE, gates, bias, max(series, 1), norm, rope, rotates_last=series > 0)
    count = RATIO if is_first else RATIO * max(series, 1)
    rows = ring[:, 0, mx.arange(offset - count + 1, offset + 1) % SLOTS, BEFORE:]
    with msl.launching():
        got = pool.entry(ring, mx.array(offset), is_first)
        if series:
            values, weights = mx.split(rows.reshape(1, -1, RATIO, 2 * both), 2, axis=-1)
            made = norm(pooled(values, weights, bias, series > 1, is_first))
            want = turned(made[:, :, None], rope, number)[:, :, 0]
        else:
            want = block_keys(rows[..., :WIDTH], norm, rope, number, RATIO)
    assert got.shape == (1, 1, 1, WIDTH)
    np.testing.assert_allclose(np.array(got)[0], np.array(want), atol=2e-5)


@pytest.mark.parametrize("series, offset, is_first", [(0, 23, False), (1, 7, False), (2, 23, False), (2, 3, True)])
def test_an_entry_is_that_of_plain_operations(series, offset, is_first):
    check(series, offset, is_first)


FAULTS = {
    "slots of other positions": ("entry_pool", "(own + 1 - COUNT + i) % SLOTS", "(own - COUNT + i) % SLOTS"),
    "one series for both blocks": ("entry_pool", "SERIES - 1 - (COUNT - 1 - i) / RATIO", "SERIES - 1"),
    "no bias": ("entry_pool", "+ float(bias[i % RATIO * SERIES * W + at])", ""),
    "values for gates": ("entry_pool", "+ GATES + at]", "+ VALUES + at]"),
    "not divided": ("entry_pool", "sum / total", "sum"),
    "the place for the number": ("entry_pool", "float(own / RATIO)", "float(own)"),
}


@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_a_planted_fault_is_caught(monkeypatch, name):
    file, old, new = FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure), pytest.raises(AssertionError):
        check(2)
