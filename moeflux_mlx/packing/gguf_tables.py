"""Separates blocks of GGUF's types with tables into codes and scales (`ops/table_values.py`), on numpy arrays, and
takes their grids from the `gguf` package.

Fields of a block, from llama.cpp's ggml-common.h: d, but for IQ1_M, and then

- IQ4_NL: 16 bytes of codes. IQ4_XS: the high bits of scales, 4 bytes of their low bits, 128 bytes of codes.
- IQ3_XXS: 64 indices, 8 words. IQ3_S: 64 indices, 8 bytes of high bits, 32 of signs, 4 of scales.
- IQ2_XXS: 8 times 4 indices and a word. IQ2_XS: 32 halfwords, 8 bytes of scales. IQ2_S: 32 indices, 32 bytes of
  signs, 8 of high bits, 8 of scales.
- IQ1_S: 32 indices, 8 halfwords. IQ1_M: 32 indices, 16 bytes of high bits and shifts, 4 halfwords.
"""

from collections.abc import Callable

import numpy as np

BYTES = {"IQ4_NL": 18, "IQ4_XS": 136, "IQ3_XXS": 98, "IQ3_S": 110, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82}
BYTES |= {"IQ1_S": 50, "IQ1_M": 56}
Parts = tuple[np.ndarray, np.ndarray]  # words of codes and scales, as bytes [n, ...]


def separated(kind: str, stored: np.ndarray) -> Parts:
    """Blocks of one of `BYTES`, uint8 [..., bytes of a row] -> weight, uint32 [..., words], and scales, uint8 [...,
    bytes], in memory of their own.
    """
    blocks = np.ascontiguousarray(stored).reshape(-1, BYTES[kind])
    weight, scales = SEPARATE[kind](blocks)
    lead = stored.shape[:-1]
    return np.ascontiguousarray(weight).reshape(*lead, -1).view("<u4"), np.ascontiguousarray(scales).reshape(*lead, -1)


def grid_of(kind: str) -> np.ndarray | None:
    """The values of a type's entries as `ops/table_values.py` has them, uint8 [entries, 4 or 8]; None if its codes name
    single values.
    """
    from gguf import quants

    if kind.startswith("IQ4"):
        return None
    known = getattr(quants, kind)
    known.init_grid()
    grid = known.grid.reshape(known.grid_shape)
    return (128 + 8 * grid if kind.startswith("IQ1") else grid).astype(np.uint8)


def _by_units(*parts: np.ndarray) -> np.ndarray:
    """Joins the parts of each of 8 units of a block: [n, 8 a], [n, 8 b] -> [n, 8, a + b]."""
    return np.concatenate([part.reshape(len(part), 8, -1) for part in parts], axis=2)


def _iq4_nl(b: np.ndarray) -> Parts:
    return b[:, 2:], b[:, :2]


def _iq4_xs(b: np.ndarray) -> Parts:
    return b[:, 8:], b[:, :8]


def _iq3_xxs(b: np.ndarray) -> Parts:
    return _by_units(b[:, 2:66], b[:, 66:]), b[:, :2]


def _iq3_s(b: np.ndarray) -> Parts:
    return _by_units(b[:, 2:66], b[:, 74:106]), np.concatenate([b[:, :2], b[:, 66:74], b[:, 106:]], axis=1)


def _iq2_xxs(b: np.ndarray) -> Parts:
    return b[:, 2:], b[:, :2]


def _iq2_xs(b: np.ndarray) -> Parts:
    return b[:, 2:66], np.concatenate([b[:, :2], b[:, 66:]], axis=1)


def _iq2_s(b: np.ndarray) -> Parts:
    pairs = _by_units(b[:, 66:74], b[:, 74:]).reshape(len(b), 16)
    return _by_units(b[:, 2:34], b[:, 34:66]), np.concatenate([b[:, :2], pairs], axis=1)


def _iq1_s(b: np.ndarray) -> Parts:
    return b[:, 2:34], np.concatenate([b[:, :2], b[:, 34:]], axis=1)


def _iq1_m(b: np.ndarray) -> Parts:
    return b[:, :32], np.concatenate([b[:, 48:], b[:, 32:48]], axis=1)


SEPARATE: dict[str, Callable[[np.ndarray], Parts]] = {
    **{"IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s},
    **{"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m},
}
