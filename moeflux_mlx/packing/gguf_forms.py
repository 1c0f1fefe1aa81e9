"""Brings blocks of GGUF's types to our forms without changing a value, on numpy arrays: codes are put in our order, and
bytes of scales are copied.

Formulas: `dequantize_row_*` in llama.cpp's ggml-quants.c; the package `gguf` has them as `quants.py`, and the tests
compare every value with it. A block of the simple types is 32 weights of a row:

| type | a block's bytes | weight i | our form |
|---|---|---|---|
| Q4_0 | d float16, 16 bytes of codes | d * (q - 8) | q4_0 |
| Q4_1 | d, m float16, 16 bytes | d * q + m | q4_1 |
| Q5_0 | d, a word with the fifth bits, 16 bytes | d * (q - 16) | q5_0 |
| Q5_1 | d, m, a word with the fifth bits, 16 bytes | d * q + m | q5_1 |
| Q8_0 | d, 32 int8 | d * q | q8_0, of codes q + 128 |
| MXFP4 | an exponent e, 16 bytes | 2 ** (e - 127) * E2M1(q) | mxfp4 |

Byte i of 16 bytes of codes has code i in its low half and code i + 16 in its high half; ours follow one another.

A block of NVFP4 is 64 weights: four scales of E4M3, and for each 16 weights 8 bytes, whose low halves come first, too.
A tensor `.scale` beside the matrix has what multiplies all of them, for each expert; `.input_scale` is not used.

A block of the K types is 256 weights. `Quant` says how weights are computed, and `ops/nested.py` what the bytes of
scales are. i counts the weights of a block:

- Q2_K: 16 bytes of scales. Byte 16 + 32 (i div 128) + i mod 32 has in bits 2 (i mod 128 div 32) the code of weight i.
  d and m are at byte 80.
- Q3_K: byte i mod 32 has in bit i div 32 the third bit of code i, and bytes from 32 on have the others as in Q2_K. 12
  bytes of scales are at byte 96, and d at 108.
- Q4_K: 16 bytes with d, m and scales, and 128 bytes: byte 32 (i div 64) + i mod 32 of them has code i in its half i div
  32 mod 2.
- Q5_K: as Q4_K, with 32 bytes before the 128: byte i mod 32 has in bit i div 32 the fifth bit of code i.
- Q6_K: byte 64 (i div 128) + i mod 64 has in its half i mod 128 div 64 the low 4 bits of code i; 64 bytes from 128 on
  have the high 2, as Q2_K has its codes. 16 bytes of scales are at byte 192, and d at 208.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..formats.record import ITEM_BYTES
from ..installation import module_if_here
from ..quant import GRID, SUPER, Quant, of_mode
from .gguf_tables import SEPARATE, grid_of

BlockArrays = tuple[np.ndarray, ...]
BLOCK = 32
TYPES = {"U32": "<u4", "F16": "<f2", "U8": "u1"}  # of a part's values


extension = module_if_here("moeflux_mlx.packing._blocks")  # None if it is not built


class GgufForm(NamedTuple):
    """Args:
    quant: our form.
    weights, nbytes: of a stored block.
    unpack: the blocks [n, bytes] of rows -> codes as bytes [n, words * 4], and the other parts [n] or [n, values].
    """

    quant: Quant
    weights: int
    nbytes: int
    unpack: Callable[[np.ndarray], BlockArrays]


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Halves of k bytes [n, k] -> the same codes in their order, two in each of k bytes."""
    pairs = np.ascontiguousarray(stored).view("<u2")  # [n, k / 2]: codes i, i + k, i + 1, i + k + 1
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


def _q4_0(blocks: np.ndarray) -> BlockArrays:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0)


def _q4_1(blocks: np.ndarray) -> BlockArrays:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: np.ndarray) -> BlockArrays:
    return _fives(blocks[:, 6:], blocks[:, 2:6]), _halves(blocks, 0)


def _q5_1(blocks: np.ndarray) -> BlockArrays:
    return _fives(blocks[:, 8:], blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> BlockArrays:
    return blocks[:, 2:] ^ 0x80, _halves(blocks, 0)


def _mxfp4(blocks: np.ndarray) -> BlockArrays:
    return _nibbles(blocks[:, 1:]), np.ascontiguousarray(blocks[:, 0])


def _nvfp4(blocks: np.ndarray) -> BlockArrays:
    return _nibbles(blocks[:, 4:].reshape(-1, 8)).reshape(-1, 32), blocks[:, :4].copy()


def _two_bits(data: np.ndarray) -> np.ndarray:
    """[n, 32 k] -> [n, 128 k]: the lowest two bits of 32 bytes, then the next two of the same, and so on."""
    return (data.reshape(len(data), -1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(
        len(data), -1
    )


def _four_bits(data: np.ndarray, run: int) -> np.ndarray:
    """The low halves of `run` bytes, then the high halves of the same, and so on."""
    return (data.reshape(len(data), -1, 1, run) >> np.array([[0], [4]], np.uint8) & 15).reshape(len(data), -1)


def _one_bit(data: np.ndarray) -> np.ndarray:
    """[n, 32] -> [n, 256]: the lowest bit of all, then the next of all, and so on."""
    return (data[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(data), -1)


def _stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, 256] -> streams of their lowest `bits` bits, uint8 [n, 32 * bits]."""
    each = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(each.reshape(len(codes), -1), axis=-1, bitorder="little")


def _q2_k(blocks: np.ndarray) -> BlockArrays:
    return _stream(_two_bits(blocks[:, 16:80]), 2), blocks[:, :16].copy(), blocks[:, 80:].copy().view("<f2")


def _q3_k(blocks: np.ndarray) -> BlockArrays:
    codes = _two_bits(blocks[:, 32:96]) | _one_bit(blocks[:, :32]) << 2
    return _stream(codes, 3), blocks[:, 96:108].copy(), _halves(blocks, 108)


def _q4_k(blocks: np.ndarray) -> BlockArrays:
    return _stream(_four_bits(blocks[:, 16:], 32), 4), blocks[:, :16].copy()


def _q5_k(blocks: np.ndarray) -> BlockArrays:
    return _stream(_four_bits(blocks[:, 48:], 32) | _one_bit(blocks[:, 16:48]) << 4, 5), blocks[:, :16].copy()


def _q6_k(blocks: np.ndarray) -> BlockArrays:
    codes = _four_bits(blocks[:, :128], 64) | _two_bits(blocks[:, 128:192]) << 4
    return _stream(codes, 6), blocks[:, 192:208].copy(), _halves(blocks, 208)


FORMS = {
    "Q4_0": GgufForm(of_mode("q4_0"), BLOCK, 18, _q4_0),
    "Q4_1": GgufForm(of_mode("q4_1"), BLOCK, 20, _q4_1),
    "Q5_0": GgufForm(of_mode("q5_0"), BLOCK, 22, _q5_0),
    "Q5_1": GgufForm(of_mode("q5_1"), BLOCK, 24, _q5_1),
    "Q8_0": GgufForm(of_mode("q8_0"), BLOCK, 34, _q8_0),
    "Q2_K": GgufForm(of_mode("q2_k"), SUPER, 84, _q2_k),
    "Q3_K": GgufForm(of_mode("q3_k"), SUPER, 110, _q3_k),
    "Q4_K": GgufForm(of_mode("q4_k"), SUPER, 144, _q4_k),
    "Q5_K": GgufForm(of_mode("q5_k"), SUPER, 176, _q5_k),
    "Q6_K": GgufForm(of_mode("q6_k"), SUPER, 210, _q6_k),
    "MXFP4": GgufForm(Quant(4, BLOCK, "mxfp4"), BLOCK, 17, _mxfp4),
    "NVFP4": GgufForm(Quant(4, 16, "nvfp4"), 64, 36, _nvfp4),
    "IQ4_NL": GgufForm(of_mode("iq4_nl"), BLOCK, 18, SEPARATE["IQ4_NL"]),
    "IQ4_XS": GgufForm(of_mode("iq4_xs"), SUPER, 136, SEPARATE["IQ4_XS"]),
    "IQ3_XXS": GgufForm(of_mode("iq3_xxs"), SUPER, 98, SEPARATE["IQ3_XXS"]),
    "IQ3_S": GgufForm(of_mode("iq3_s"), SUPER, 110, SEPARATE["IQ3_S"]),
    "IQ2_XXS": GgufForm(of_mode("iq2_xxs"), SUPER, 66, SEPARATE["IQ2_XXS"]),
    "IQ2_XS": GgufForm(of_mode("iq2_xs"), SUPER, 74, SEPARATE["IQ2_XS"]),
    "IQ2_S": GgufForm(of_mode("iq2_s"), SUPER, 82, SEPARATE["IQ2_S"]),
    "IQ1_S": GgufForm(of_mode("iq1_s"), SUPER, 50, SEPARATE["IQ1_S"]),
    "IQ1_M": GgufForm(of_mode("iq1_m"), SUPER, 56, SEPARATE["IQ1_M"]),
    "TQ1_0": GgufForm(of_mode("tq1_0"), SUPER, 54, SEPARATE["TQ1_0"]),
    "TQ2_0": GgufForm(of_mode("tq2_0"), SUPER, 66, SEPARATE["TQ2_0"]),
}


def repacked(kind: str, stored: np.ndarray) -> BlockArrays:
    """Blocks of one of `FORMS` in our form.

    Args:
        stored: uint8 [..., bytes of a row].

    Returns:
        Words of codes, uint32 [..., words], and the other parts of the form but a grid, in memory of their own.
    """
    form, lead = FORMS[kind], stored.shape[:-1]
    columns, rows = stored.shape[-1] // form.nbytes * form.weights, math.prod(lead)
    shapes = [form.quant.of_part(part, columns, "") for part in form.quant.parts if part != GRID]
    ends = list(accumulate(rows * count * ITEM_BYTES[dtype] for count, dtype in shapes))
    starts, memory = [0, *ends[:-1]], stored.reshape(-1).copy()
    rearrange(kind, memory, starts)
    parts = [memory[start:end] for start, end in zip(starts, ends, strict=True)]
    return tuple(part.view(TYPES[dtype]).reshape(*lead, -1) for part, (_, dtype) in zip(parts, shapes, strict=True))


def rearrange(kind: str, memory: np.ndarray, places: Sequence[int], start: int = 0, nbytes: int | None = None) -> None:
    """Brings blocks of one of `FORMS` to the parts of our form, in the same memory.

    `native/blocks.c` is the native form; without a compiler numpy does it, at a fiftieth of the speed or less.

    Args:
        memory: uint8 [bytes].
        places: where in it each part will begin, the first of them at `start`. All have the bytes of the blocks.
        start, nbytes: where the blocks are; None: to the end.
    """
    form = FORMS[kind]
    count = ((len(memory) - start) if nbytes is None else nbytes) // form.nbytes
    if extension is not None:
        extension.rearrange(kind, memory, False, start, count, *places[1:])
        return
    blocks = memory[start : start + count * form.nbytes].reshape(count, form.nbytes)
    for place, part in zip(places, form.unpack(blocks), strict=True):
        memory[place : place + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def grids(kind: str) -> tuple[np.ndarray, ...]:
    """The grid of a type's form, uint8 [entries, values], if it has one."""
    return (grid_of(kind),) if FORMS[kind].quant.grid else ()
