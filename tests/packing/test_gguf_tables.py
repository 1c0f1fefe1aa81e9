"""GGUF's types with tables: values bit-equal to the `gguf` package's, for random blocks."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.ops import table_values as twins
from moeflux_mlx.packing.gguf_tables import BYTES, grid_of, separated

gguf = pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

pytestmark = pytest.mark.usefixtures("cpu_device")
KINDS = list(BYTES)


def values(kind, rows):
    grid = grid_of(kind)
    parts = map(mx.array, separated(kind, rows))
    return np.array(twins.table_values(kind.lower(), *parts, None if grid is None else mx.array(grid)))


def wanted(kind, rows):
    return gguf_models.values_of(kind, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_that_of_gguf(kind):
    rows = gguf_models.random_blocks(kind, (3, 5, 768), 1)
    made = values(kind, rows)
    assert made.shape == (3, 5, 768) and np.array_equal(made, wanted(kind, rows)) and len(np.unique(made)) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_separating_keeps_every_byte(kind):
    rows = gguf_models.random_blocks(kind, (2, 512), 2)
    weight, scales = separated(kind, rows)
    assert weight.nbytes + scales.nbytes == rows.nbytes
    assert np.array_equal(
        *(np.sort(part) for part in (rows.reshape(-1), np.concatenate([weight.view(np.uint8), scales], 1).reshape(-1)))
    )
