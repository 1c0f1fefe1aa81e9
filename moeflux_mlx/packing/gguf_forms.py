"""Brings blocks of GGUF's simple types to our forms without changing a value, on numpy arrays.

A block of these types is 32 weights of a row. Formulas: `dequantize_row_*` in llama.cpp's ggml-quants.c; the package
`gguf` has them as `quants.py`, and the tests compare every value with it.

| type | a block's bytes | weight i | our form |
|---|---|---|---|
| Q4_0 | d float16, 16 bytes of codes | d * (q - 8) | affine 4 bits, bias -8 d |
| Q4_1 | d, m float16, 16 bytes | d * q + m | affine 4 bits, bias m |
| Q5_0 | d, a word with the fifth bits, 16 bytes | d * (q - 16) | affine 5 bits, bias -16 d |
| Q5_1 | d, m, a word with the fifth bits, 16 bytes | d * q + m | affine 5 bits, bias m |
| Q8_0 | d, 32 int8 | d * q | affine 8 bits of q + 128, bias -128 d |
| MXFP4 | an exponent e, 16 bytes | 2 ** (e - 127) * E2M1(q) | mxfp4 |

Byte i of 16 bytes of codes has code i in its low half and code i + 16 in its high half; ours follow one another. The
products with d are exact, because they shift its exponent or stay within the 24 bits of float32; scales and biases stay
float16.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..quant import Quant

Arrays = tuple[np.ndarray, ...]
BLOCK = 32


class Form(NamedTuple):
    """Args:
    quant: our form.
    nbytes: of a stored block.
    scales: the dtype of our scales and biases, as files name it.
    unpack: the blocks [n, bytes] of rows -> codes as bytes [n, words * 4], scales [n] and, if affine, biases [n].
    """

    quant: Quant
    nbytes: int
    scales: str
    unpack: Callable[[np.ndarray], Arrays]


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Halves of 16 bytes [n, 16] -> the same codes in their order, two in each of 16 bytes."""
    pairs = np.ascontiguousarray(stored).view("<u2")  # [n, 8]: codes i, i + 16, i + 1, i + 17
    low = (pairs & 0x000F) | (pairs >> 4 & 0x00F0)
    high = (pairs >> 4 & 0x000F) | (pairs >> 8 & 0x00F0)
    return np.concatenate([low, high], axis=1).astype(np.uint8)


def _fives(stored: np.ndarray, fifth: np.ndarray) -> np.ndarray:
    """Halves of bytes [n, 16] and words with a fifth bit for each code [n, 4] -> streams of 5-bit codes [n, 20]."""
    halves = np.ascontiguousarray(stored)
    codes = np.concatenate([halves & 15, halves >> 4], axis=1)
    codes |= np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little") << 4
    pairs = codes.view("<u2")  # two codes side by side become one of 10 bits, then of 20, then of 40
    pairs = (pairs & 0x1F) | (pairs >> 3 & 0x3E0)
    fours = pairs.view("<u4")
    fours = (fours & 0x3FF) | (fours >> 6 & 0xFFC00)
    eights = fours.view("<u8")
    eights = (eights & 0xFFFFF) | (eights >> 12 & 0xFFFFF00000)
    return eights.view(np.uint8).reshape(-1, 4, 8)[:, :, :5].reshape(-1, 20)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _q4_0(blocks: np.ndarray) -> Arrays:
    d = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), d, _times(d, -8)


def _q4_1(blocks: np.ndarray) -> Arrays:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Arrays:
    d = _halves(blocks, 0)
    return _fives(blocks[:, 6:], blocks[:, 2:6]), d, _times(d, -16)


def _q5_1(blocks: np.ndarray) -> Arrays:
    return _fives(blocks[:, 8:], blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Arrays:
    d = _halves(blocks, 0)
    return blocks[:, 2:] ^ 0x80, d, _times(d, -128)


def _mxfp4(blocks: np.ndarray) -> Arrays:
    return _nibbles(blocks[:, 1:]), np.ascontiguousarray(blocks[:, 0])


def _times(d: np.ndarray, power: int) -> np.ndarray:
    """d times a power of two: exact, or infinite, which is refused later."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (d.astype(np.float32) * np.float32(power)).astype(np.float16)


FORMS = {
    "Q4_0": Form(Quant(4, BLOCK), 18, "F16", _q4_0),
    "Q4_1": Form(Quant(4, BLOCK), 20, "F16", _q4_1),
    "Q5_0": Form(Quant(5, BLOCK), 22, "F16", _q5_0),
    "Q5_1": Form(Quant(5, BLOCK), 24, "F16", _q5_1),
    "Q8_0": Form(Quant(8, BLOCK), 34, "F16", _q8_0),
    "MXFP4": Form(Quant(4, BLOCK, "mxfp4"), 17, "U8", _mxfp4),
}


def repacked(kind: str, stored: np.ndarray) -> Arrays:
    """Blocks of one of `FORMS` in our form.

    Args:
        stored: uint8 [..., bytes of a row].

    Returns:
        Words of codes, uint32 [..., words], scales [..., groups] and, if the form has them, biases [..., groups], in
        memory of their own.
    """
    form, lead = FORMS[kind], stored.shape[:-1]
    codes, *of_groups = form.unpack(np.ascontiguousarray(stored).reshape(-1, form.nbytes))
    words = np.ascontiguousarray(codes).view("<u4")
    return words.reshape(*lead, -1), *(part.reshape(*lead, -1) for part in of_groups)
