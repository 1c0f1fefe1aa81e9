"""The weight that the squared error of each column has."""

import mlx.core as mx
import numpy as np


def group_weights(importance: mx.array | None, columns: int, group_size: int) -> np.ndarray:
    """The weights by which a search compares errors, float32 [..., columns] with a mean of 1 in each group.

    Args:
        importance: [..., columns], not negative, such as the mean square of each input; None: all alike. A group that
            has none has equal weights, because its codes must still be something.
    """
    if importance is None:
        return np.ones(columns, np.float32)
    given = np.array(importance.astype(mx.float32))
    groups = given.reshape(*given.shape[:-1], columns // group_size, group_size)
    mean = groups.mean(-1, keepdims=True)
    weights = np.where(mean > 0, groups / np.where(mean > 0, mean, 1), 1).astype(np.float32)
    return np.ascontiguousarray(weights.reshape(given.shape))
