"""The values of GGUF's types whose codes name entries of tables, by MLX's operations: the twins of their kernels.

A code of IQ4_NL and IQ4_XS names one of 16 values. In the other iq types it names an entry of a grid, 4 or 8
magnitudes, and each weight has a sign. A code of the tq types is the value plus 1. A stored matrix has these parts
(`Quant`):

| type | block | weight, uint32 words of 32 weights | scales, bytes of a block | grid, uint8 |
|---|---|---|---|---|
| iq4_nl | 32 | 4: byte i has the code of weight i (low) and of weight i + 16 | 2: d | |
| iq4_xs | 256 | 4: the same | 8: d, the high bits of 8 scales, 4 bytes of low bits | |
| iq3_xxs | 256 | 3: 8 indices of 8 bits; a word with 4 times 7 signs and a scale | 2: d | 256 x 4 |
| iq3_s | 256 | 3: 8 low bytes of indices; 4 bytes of signs | 14: d, 8 bytes of high bits, 8 scales | 512 x 4 |
| iq2_xxs | 256 | 2: 4 indices of 8 bits; a word as in iq3_xxs | 2: d | 256 x 8 |
| iq2_xs | 256 | 2: 4 halfwords with an index of 9 bits and 7 signs | 10: d, 16 scales | 512 x 8 |
| iq2_s | 256 | 2: 4 low bytes of indices; 4 bytes of signs | 18: d, 8 times high bits and 2 scales | 1024 x 8 |
| iq1_s | 256 | 1: 4 low bytes of indices | 18: d, 8 halfwords with high bits, a scale and a shift | 2048 x 8 |
| iq1_m | 256 | 1: the same | 24: d, a stream of 16 scales, 16 bytes of high bits and shifts | 2048 x 8 |
| tq1_0 | 256 | 1: the codes of columns 0 to 19 | 22: d, 8 times 2 bytes, 4 bytes with the other codes | |
| tq2_0 | 256 | 2: byte i of word w has in bits 2 m the code of weight 16 w + 4 m + i | 2: d | |

d is a float16. A scale has 4 bits, in iq4_xs 6, in iq1 3. Where 8 weights have only 7 signs, the number of minus signs
is even. The values of iq1 are g + 1/8 or g - 1/8 with g of -1, 0 or 1, which its grid has as 128 + 8 g.
All bytes are those of GGUF's blocks, but for the order of the scales of iq1_m and of the codes of tq; the formulas are
those of `dequantize_row_*` in llama.cpp's ggml-quants.c.

A byte of tq1_0 is a fraction of 256 whose digits to the base 3 are up to five codes. Digit n of byte i of a word is the
code of weight 4 n + i. The digits of the two bytes a and b of 32 weights are those of weights 20 and 21 (a), 22 and 23
(b), 24 and 25 (a), 26 and 27 (b), 28 (a), 30 (b). Each of the 4 bytes has the codes of weights 29 and 31 of 32 weights,
then those of the next 32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..quant import MODES, SUPER, Quant

# The values of 4-bit codes, `kvalues_iq4nl` in llama.cpp's ggml-common.h.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Stored:
    """Blocks: words uint32 [n, 32-weight units, words], scales uint8 [n, bytes] behind d, d float32 [n, 1]."""

    words: mx.array
    scales: mx.array
    d: mx.array
    grid: mx.array | None

    def entries(self, indices: mx.array) -> mx.array:
        """The magnitudes that indices name, float32 [n, weights]."""
        assert self.grid is not None
        return mx.take(self.grid, indices.astype(mx.uint32), axis=0).astype(mx.float32).reshape(len(self.d), -1)

    def bytes(self, first: int, last: int) -> mx.array:
        """Bytes [first, last) of the words of each 32 weights, [n, units, last - first]."""
        return self.words.view(mx.uint8)[..., first:last]


def table_values(quant: Quant, weight: mx.array, scales: mx.array, grid: mx.array | None = None) -> mx.array:
    """The weights [..., columns] in float32, with the bits of `gguf.dequantize`.

    Args:
        quant: a form whose codes name entries of a table.
        weight: uint32 [..., words].
        scales: uint8 [..., bytes], or float16 [..., blocks].
        grid: uint8 [..., entries, values], if the form has it; of several equal ones the first is used.
    """
    columns = weight.shape[-1] * 32 // quant.bits
    words = weight.reshape(-1, min(quant.multiple, SUPER) // 32, quant.bits)
    fields = scales.view(mx.uint8).reshape(len(words), -1)[:, 2:]
    first = grid if grid is None else grid.reshape(-1, *MODES[quant.mode].grid or ())[0]
    stored = Stored(words, fields, block_scales(quant, scales).reshape(-1, 1), first)
    factors, values = VALUES[quant.mode](stored)
    weights = factors[..., None] * values.reshape(*factors.shape, -1)
    return weights.reshape(*weight.shape[:-1], columns)


def block_scales(quant: Quant, scales: mx.array) -> mx.array:
    """The float16 of each block, float32 [..., blocks]."""
    if quant.has_supers:
        return scales.astype(mx.float32)
    blocks = scales.reshape(*scales.shape[:-1], -1, MODES[quant.mode].nested)
    return mx.contiguous(blocks[..., :2]).view(mx.float16)[..., 0].astype(mx.float32)


def _bits(data: mx.array, width: int) -> mx.array:
    """Fields of `width` bits of each value, lowest first, [..., values * fields]."""
    shifts = mx.arange(0, 8 * data.dtype.size, width).astype(data.dtype)
    fields = data[..., None] >> shifts & ((1 << width) - 1)
    return fields.reshape(*data.shape[:-1], -1)


def _signed(magnitudes: mx.array, signs: mx.array) -> mx.array:
    """Magnitudes [n, weights] with the signs that bytes [n, ...] have, lowest bit first; 1 is negative."""
    return mx.where(_bits(signs.reshape(len(signs), -1), 1) == 0, magnitudes, -magnitudes)


def _even(signs: mx.array) -> mx.array:
    """Seven signs, with the eighth that makes the number of minus signs even."""
    signs = signs & 127
    folded = signs ^ signs >> 4
    folded = folded ^ folded >> 2
    return (signs | ((folded ^ folded >> 1) & 1) << 7).astype(mx.uint8)


def _with_signs_and_scale(words: mx.array) -> tuple[mx.array, mx.array]:
    """Words uint32 [n, units] -> bytes of signs [n, units, 4] and the scales in the highest bits, plus a half."""
    sevens = words[..., None] >> mx.array([0, 7, 14, 21], mx.uint32)
    return _even(sevens), (words >> 28).astype(mx.float32) + 0.5


def _of_codes(stored: Stored) -> mx.array:
    """The values of 4-bit codes, [n, weights]."""
    codes = stored.words.view(mx.uint8).reshape(len(stored.d), -1, 1, 16)
    codes = mx.concatenate([codes & 15, codes >> 4], axis=2)
    return mx.take(mx.array(IQ4_VALUES, mx.float32), codes.astype(mx.uint32).reshape(len(stored.d), -1))


def _iq4_nl(stored: Stored) -> tuple[mx.array, mx.array]:
    return stored.d, _of_codes(stored)


def _iq4_xs(stored: Stored) -> tuple[mx.array, mx.array]:
    codes = _bits(stored.scales[:, 2:], 4) | _bits(stored.scales[:, :2], 2) << 4
    return stored.d * (codes.astype(mx.float32) - 32), _of_codes(stored)


def _iq3_xxs(stored: Stored) -> tuple[mx.array, mx.array]:
    signs, scales = _with_signs_and_scale(stored.words[..., 2])
    return stored.d * scales * 0.5, _signed(stored.entries(stored.bytes(0, 8)), signs)


def _iq3_s(stored: Stored) -> tuple[mx.array, mx.array]:
    high = _bits(stored.scales[:, :8], 1).reshape(len(stored.d), 8, 8).astype(mx.uint32)
    indices = stored.bytes(0, 8).astype(mx.uint32) | high << 8
    scales = 1 + 2 * _bits(stored.scales[:, 8:], 4).astype(mx.float32)
    return stored.d * scales, _signed(stored.entries(indices), stored.bytes(8, 12))


def _iq2_xxs(stored: Stored) -> tuple[mx.array, mx.array]:
    signs, scales = _with_signs_and_scale(stored.words[..., 1])
    return stored.d * scales * 0.25, _signed(stored.entries(stored.bytes(0, 4)), signs)


def _iq2_xs(stored: Stored) -> tuple[mx.array, mx.array]:
    codes = stored.words.view(mx.uint16)
    scales = _bits(stored.scales, 4).astype(mx.float32) + 0.5
    return stored.d * scales * 0.25, _signed(stored.entries(codes & 511), _even(codes >> 9))


def _iq2_s(stored: Stored) -> tuple[mx.array, mx.array]:
    pairs = stored.scales.reshape(len(stored.d), 8, 2)
    indices = stored.bytes(0, 4).astype(mx.uint32) | _bits(pairs[..., :1], 2).astype(mx.uint32) << 8
    scales = _bits(pairs[..., 1], 4).astype(mx.float32) + 0.5
    return stored.d * scales * 0.25, _signed(stored.entries(indices), stored.bytes(4, 8))


def _shifted(stored: Stored, high: mx.array, minus: mx.array) -> mx.array:
    """Values of grids of iq1, by the high bits of indices [n, 32] and whether 1/8 is subtracted [n, 32]."""
    indices = stored.bytes(0, 4).astype(mx.uint32) | high.reshape(len(stored.d), 8, 4).astype(mx.uint32) << 8
    eights = (stored.entries(indices).reshape(len(stored.d), 32, 8) - 128) / 8
    return (eights + mx.where(minus == 0, 0.125, -0.125)[..., None]).reshape(len(stored.d), -1)


def _iq1_s(stored: Stored) -> tuple[mx.array, mx.array]:
    codes = mx.contiguous(stored.scales).view(mx.uint16)
    high = codes[..., None] >> mx.array([0, 3, 6, 9], mx.uint16) & 7
    scales = (2 * (codes >> 12 & 7) + 1).astype(mx.float32)
    return stored.d * scales, _shifted(stored, high, mx.repeat(codes >> 15, 4, axis=-1))


def _iq1_m(stored: Stored) -> tuple[mx.array, mx.array]:
    codes = _bits(stored.scales[:, :6], 1).reshape(-1, 16, 3) << mx.arange(3, dtype=mx.uint8)
    nibbles = _bits(stored.scales[:, 6:], 4)
    scales = (2 * codes.sum(axis=-1) + 1).astype(mx.float32)
    return stored.d * scales, _shifted(stored, nibbles & 7, nibbles >> 3)


def _digits(data: mx.array, count: int) -> mx.array:
    """The first digits to the base 3 of bytes, as fractions of 256, [..., count]."""
    turned = data[..., None] * mx.array([3**i for i in range(count)], mx.uint8)  # the integer part is lost
    return (turned.astype(mx.uint16) * 3 >> 8).astype(mx.float32)


def _tq1_0(stored: Stored) -> tuple[mx.array, mx.array]:
    n = len(stored.d)
    first = _digits(stored.bytes(0, 4), 5).swapaxes(-1, -2).reshape(n, 8, 20)
    pairs = _digits(stored.scales[:, :16].reshape(n, 8, 2), 5)
    next = pairs[..., :4].reshape(n, 8, 2, 2, 2).swapaxes(2, 3).reshape(n, 8, 8)
    shared = _digits(stored.scales[:, 16:], 4).reshape(n, 8, 2)
    last = mx.stack([pairs[..., 4], shared], axis=-1).reshape(n, 8, 4)
    return stored.d, mx.concatenate([first, next, last], axis=-1).reshape(n, -1) - 1


def _tq2_0(stored: Stored) -> tuple[mx.array, mx.array]:
    codes = stored.bytes(0, 8).reshape(-1, 8, 2, 1, 4) >> mx.arange(0, 8, 2, dtype=mx.uint8)[:, None] & 3
    return stored.d, codes.reshape(len(stored.d), -1).astype(mx.float32) - 1


VALUES: dict[str, Callable[[Stored], tuple[mx.array, mx.array]]] = {
    **{"iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s},
    **{"iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq1_s": _iq1_s, "iq1_m": _iq1_m},
    **{"tq1_0": _tq1_0, "tq2_0": _tq2_0},
}
