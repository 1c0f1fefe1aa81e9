"""Arrays of MLX as numpy's, to compare them with sums in float64."""

import mlx.core as mx
import numpy as np


def wide(array):
    """Returns an MLX array in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)
