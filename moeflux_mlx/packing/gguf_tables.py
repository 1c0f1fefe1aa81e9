"""Separates blocks [n, bytes] of GGUF's types with tables into codes and scales (`ops/table_values.py`), on numpy
arrays, and takes their grids from the `gguf` package.

Fields of a block, from llama.cpp's ggml-common.h: d, but for IQ1_M, and then

- IQ4_NL: 16 bytes of codes. IQ4_XS: the high bits of scales, 4 bytes of their low bits, 128 bytes of codes.
- IQ3_XXS: 64 indices, 8 words. IQ3_S: 64 indices, 8 bytes of high bits, 32 of signs, 4 of scales.
- IQ2_XXS: 8 times 4 indices and a word. IQ2_XS: 32 halfwords, 8 bytes of scales. IQ2_S: 32 indices, 32 bytes of
  signs, 8 of high bits, 8 of scales.
- IQ1_S: 32 indices, 8 halfwords. IQ1_M: 32 indices, 16 bytes of high bits and shifts, 4 halfwords.

A block of TQ1_0 and TQ2_0 has d last. Before it TQ1_0 has 32 and 16 bytes of five codes and 4 bytes of four codes, the
first code of all bytes of a kind before the second of all of them; TQ2_0 has 64 bytes of four codes, 32 at a time.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution

import numpy as np

Parts = tuple[np.ndarray, np.ndarray]  # codes and scales, as bytes [n, ...]


@cache
def grid_of(kind: str) -> np.ndarray:
    """The entries of a type's table as `ops/table_values.py` has them, uint8 [entries, 4 or 8]."""
    from gguf import quants

    known = getattr(quants, kind)
    known.init_grid()
    grid = known.grid.reshape(known.grid_shape)
    return (128 + 8 * grid if kind.startswith("IQ1") else grid).astype(np.uint8)


def license_text() -> str:
    """The licence of the package, which a copy of its tables goes with."""
    package = distribution("gguf")
    stated = package.read_text("licenses/LICENSE") or package.read_text("LICENSE") or package.metadata["License"]
    source = f"the package gguf {package.version}, under this licence"
    return f"The tables in the fields and tensors `grid` are from {source}:\n\n{stated}"


def _by_units(*parts: np.ndarray) -> np.ndarray:
    """Joins the parts of each of 8 units of a block: [n, 8 a], [n, 8 b] -> [n, 8, a + b]."""
    return np.concatenate([part.reshape(len(part), 8, -1) for part in parts], axis=2)


def _iq4_nl(b: np.ndarray) -> Parts:
    return b[:, 2:].copy(), b[:, :2].copy().view("<f2")


def _iq4_xs(b: np.ndarray) -> Parts:
    return b[:, 8:].copy(), b[:, :8].copy()


def _iq3_xxs(b: np.ndarray) -> Parts:
    return _by_units(b[:, 2:66], b[:, 66:]), b[:, :2].copy()


def _iq3_s(b: np.ndarray) -> Parts:
    return _by_units(b[:, 2:66], b[:, 74:106]), np.concatenate([b[:, :2], b[:, 66:74], b[:, 106:]], axis=1)


def _iq2_xxs(b: np.ndarray) -> Parts:
    return b[:, 2:].copy(), b[:, :2].copy()


def _iq2_xs(b: np.ndarray) -> Parts:
    return b[:, 2:66].copy(), np.concatenate([b[:, :2], b[:, 66:]], axis=1)


def _iq2_s(b: np.ndarray) -> Parts:
    pairs = _by_units(b[:, 66:74], b[:, 74:]).reshape(len(b), 16)
    return _by_units(b[:, 2:34], b[:, 34:66]), np.concatenate([b[:, :2], pairs], axis=1)


def _iq1_s(b: np.ndarray) -> Parts:
    return b[:, 2:34].copy(), np.concatenate([b[:, :2], b[:, 34:]], axis=1)


def _iq1_m(b: np.ndarray) -> Parts:
    """The highest 4 bits of four halfwords are d, the others scales; both go before the rest."""
    four = np.ascontiguousarray(b[:, 48:]).view("<u2").astype(np.uint64)
    d = ((four >> 12) << np.arange(0, 16, 4, dtype=np.uint64)).sum(axis=1)
    scales = ((four & 0xFFF) << np.arange(0, 48, 12, dtype=np.uint64)).sum(axis=1)
    first = (d | scales << 16).astype("<u8")[:, None].view(np.uint8)
    return b[:, :32].copy(), np.concatenate([first, b[:, 32:48]], axis=1)


def _tq2_0(b: np.ndarray) -> Parts:
    codes = b[:, :64].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    words = codes.reshape(-1, 8, 2, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return words.sum(axis=3, dtype=np.uint8).reshape(-1, 64), b[:, 64:].copy()


def _digits(data: np.ndarray, count: int) -> np.ndarray:
    """[n, k] -> the first digits of all bytes, then the second ones, and so on, [n, count * k]."""
    turned = data[:, None] * 3 ** np.arange(count, dtype=np.uint8)[:, None]  # the integer part is lost
    return (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)


def _as_byte(digits: np.ndarray) -> np.ndarray:
    """Digits to the base 3 [..., up to 5] -> the byte that is the least fraction of 256 with them."""
    values = (digits * 3 ** np.arange(4, -1, -1)[: digits.shape[-1]]).sum(axis=-1)
    return ((values * 256 + 242) // 243).astype(np.uint8)


def _tq1_0(b: np.ndarray) -> Parts:
    parts = _digits(b[:, :32], 5), _digits(b[:, 32:48], 5), _digits(b[:, 48:52], 4)
    codes = np.concatenate(parts, axis=1).reshape(-1, 8, 32)
    words = _as_byte(codes[..., :20].reshape(-1, 8, 5, 4).swapaxes(2, 3)).reshape(-1, 32)
    pairs = [_as_byte(codes[..., columns]) for columns in ([20, 21, 24, 25, 28], [22, 23, 26, 27, 30])]
    shared = _as_byte(codes[..., [29, 31]].reshape(-1, 4, 4))
    return words, np.concatenate([b[:, 52:], np.stack(pairs, axis=-1).reshape(-1, 16), shared], axis=1)


SEPARATE: dict[str, Callable[[np.ndarray], Parts]] = {
    **{"IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s},
    **{"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m},
    **{"TQ1_0": _tq1_0, "TQ2_0": _tq2_0},
}
