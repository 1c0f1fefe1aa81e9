"""Rounds floats to any form: to GGUF's with tables as files of llama.cpp have them, by ggml's own quantisers, which the
package libgguf (extra `libgguf`) has, and to all others by `rounding.methods`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType

import mlx.core as mx
import numpy as np

from ..errors import ConfigError
from ..installation import module_if_here
from ..ops.cores import cores
from ..quant import GRID, TABLE, Quant
from ..rounding import methods
from ..rounding.methods import FIT
from .gguf_forms import FORMS, grids, repacked

Codes = tuple[mx.array, ...]
TYPES = tuple(kind for kind, form in FORMS.items() if not form.quant.is_of_mlx)
PIECE_VALUES = 1 << 16  # of one thread's piece of work


@cache
def _library() -> ModuleType | None:
    return module_if_here("libgguf")


def check(quant: Quant, is_calibrated: bool) -> None:
    """Raises ConfigError: the form is one with a table that cannot be made of floats, here or without a text."""
    if quant.codes != TABLE:
        return
    kind, library = quant.mode.upper(), _library()
    if library is None:
        raise ConfigError(f"{kind} is made by the package libgguf: pip install 'moeflux-mlx[libgguf]'")
    if not is_calibrated and library.quantize_requires_imatrix(library.GGMLQuantizationType[kind]):
        raise ConfigError(f"{kind} needs a text that shows what its weights multiply: add --calibrate default")


def rounded(
    values: mx.array,
    quant: Quant,
    method: str = FIT,
    importance: mx.array | None = None,
    dtype: mx.Dtype = mx.bfloat16,
) -> Codes:
    """Rounds matrices to a stored form, which may have a table.

    Args:
        values, quant, importance: as of `rounding.methods.rounded`.
        method, dtype: likewise; GGUF's forms do not depend on them.

    Returns:
        As `rounding.methods.rounded`; for a form of GGUF its parts but a grid, [..., rows, values].

    Raises:
        ConfigError: as `check`.
    """
    if quant.codes != TABLE:
        return methods.rounded(values, quant, method, importance, dtype)
    check(quant, importance is not None)
    *lead, rows, columns = values.shape
    matrices = np.array(values.astype(mx.float32)).reshape(-1, rows, columns)
    weights: Sequence[np.ndarray | None] = [None] * len(matrices)
    if importance is not None:
        each = mx.broadcast_to(importance.astype(mx.float32), (*lead, columns))
        weights = list(np.array(each).reshape(-1, columns))
    blocks = np.stack([_blocks(one, quant, own) for one, own in zip(matrices, weights, strict=True)])
    parts = repacked(quant.mode.upper(), blocks.reshape(*lead, rows, -1))
    return tuple(map(mx.array, parts))


def _blocks(matrix: np.ndarray, quant: Quant, weights: np.ndarray | None) -> np.ndarray:
    """The blocks [rows, bytes] of a matrix [rows, columns], by ggml."""
    library = _library()
    assert library is not None
    kind = library.GGMLQuantizationType[quant.mode.upper()]
    known = None if weights is None or not weights.any() else weights
    step = max(1, PIECE_VALUES // matrix.shape[1])
    quantize: Callable[[np.ndarray], np.ndarray] = lambda rows: library.quantize_rows(rows, kind, imatrix=known)  # noqa: E731
    first = quantize(matrix[:step])  # ggml makes its tables in its first call
    with ThreadPoolExecutor(cores()) as pool:
        others = pool.map(quantize, [matrix[row : row + step] for row in range(step, len(matrix), step)])
        return np.concatenate([first, *others])


def tables(quant: Quant) -> Codes:
    """The part of a form that no row has: its grid [entries, values], if it has one."""
    return tuple(map(mx.array, grids(quant.mode.upper()))) if GRID in quant.parts else ()
