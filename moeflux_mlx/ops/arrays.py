"""The type of arrays that are MLX's or numpy's: which of them, is decided when a model is built (`backend`)."""

from typing import Any

AnyArray = Any  # mx.array | np.ndarray, whose operations type checkers know for one or the other only
