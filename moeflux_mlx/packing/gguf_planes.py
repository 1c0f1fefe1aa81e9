"""Brings blocks of GGUF's K types to planes (`ops/nested.py`), bit for bit.

A block has 256 weights; i counts them, and j the groups. Where the fields begin, and how they are used, is from
llama.cpp's ggml-common.h and `dequantize_row_*` in ggml-quants.c:

- Q2_K: halves of bytes 0 to 15 are S (low) and M of groups 0 to 15. Byte 16 + 32 (i div 128) + i mod 32 has in bits
  2 (i mod 128 div 32) the code of weight i. d is at byte 80, m at 82.
- Q3_K: byte i mod 32 has in bit i div 32 the third bit of code i, and bytes from 32 on have the others as in Q2_K. From
  byte 96 on are the low 4 bits of S in halves of 8 bytes, and the high 2 in 4 bytes. d is at 108.
- Q4_K: d, m, 12 bytes with S and M (`_sixes`), and 128 bytes: byte 32 (i div 64) + i mod 32 of them has code i in its
  half i div 32 mod 2.
- Q5_K: as Q4_K, with 32 bytes before the 128: byte i mod 32 has in bit i div 32 the fifth bit of code i.
- Q6_K: byte 64 (i div 128) + i mod 64 has in its half i mod 128 div 64 the low 4 bits of code i; 64 bytes from 128 on
  have the high 2, as Q2_K has its codes. S of group j is the int8 at 192 + j, and d is at 208.
"""

import mlx.core as mx
import numpy as np

from ..ops.nested import NESTED, SUPER, Planes

BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def planes_of(kind: str, stored: np.ndarray) -> Planes:
    """The planes of rows of blocks, uint8 [..., bytes of a row]."""
    form, lead = NESTED[kind], stored.shape[:-1]
    blocks = np.ascontiguousarray(stored).reshape(-1, BYTES[kind])
    codes, scales, minima, d, m = UNPACK[kind](blocks)

    def plane(values: np.ndarray) -> mx.array:
        return mx.array(np.ascontiguousarray(values).reshape(*lead, -1))

    supers = [None if at is None else plane(blocks[:, at : at + 2].copy().view("<f2")) for at in (d, m)]
    assert supers[0] is not None and codes.shape[1] == SUPER
    mins = None if minima is None else plane(packed_stream(minima, form.scale_bits))
    return Planes(
        plane(packed_stream(codes, form.bits)),
        plane(packed_stream(scales, form.scale_bits)),
        supers[0],
        mins,
        supers[1],
    )


def packed_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [n, count] -> streams of their lowest `bits` bits, uint8 [n, count * bits / 8]."""
    each = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(each.reshape(len(codes), -1), axis=-1, bitorder="little")


Fields = tuple[np.ndarray, np.ndarray, np.ndarray | None, int, int | None]


def _twos(data: np.ndarray) -> np.ndarray:
    """Pairs of bits [n, 32 k] -> [n, 128 k]: the lowest two of 32 bytes, then the next two of the same, and so on."""
    parts = data.reshape(len(data), -1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return parts.reshape(len(data), -1)


def _fours(data: np.ndarray, run: int) -> np.ndarray:
    """Halves of bytes: the low ones of `run` bytes, then the high ones of the same, and so on."""
    parts = data.reshape(len(data), -1, 1, run) >> np.array([[0], [4]], np.uint8) & 15
    return parts.reshape(len(data), -1)


def _ones(data: np.ndarray) -> np.ndarray:
    """Bits of 32 bytes [n, 32] -> [n, 256]: the lowest of all, then the next of all, and so on."""
    return (data[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(data), -1)


def _q2(b: np.ndarray) -> Fields:
    return _twos(b[:, 16:80]), b[:, :16] & 15, b[:, :16] >> 4, 80, 82


def _q3(b: np.ndarray) -> Fields:
    low, high = _fours(b[:, 96:104], 8), b[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return _twos(b[:, 32:96]) | _ones(b[:, :32]) << 2, low | high.reshape(-1, 16) << 4, None, 108, None


def _sixes(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S and M of 8 groups in 12 bytes: of the first four the low 6 bits of bytes j and j + 4; of the others the halves
    of byte j + 4, and the 2 high bits of bytes j - 4 and j."""
    first, second, third = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)


def _q4(b: np.ndarray) -> Fields:
    return _fours(b[:, 16:], 32), *_sixes(b[:, 4:16]), 0, 2


def _q5(b: np.ndarray) -> Fields:
    return _fours(b[:, 48:], 32) | _ones(b[:, 16:48]) << 4, *_sixes(b[:, 4:16]), 0, 2


def _q6(b: np.ndarray) -> Fields:
    return _fours(b[:, :128], 64) | _twos(b[:, 128:192]) << 4, b[:, 192:208] ^ 0x80, None, 208, None


UNPACK = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6}
