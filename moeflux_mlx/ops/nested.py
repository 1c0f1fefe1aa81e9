"""The scales and biases of groups in GGUF's forms, by MLX's operations: every weight is scale * code + bias, as in mode
affine, and every product in it is exact in float32, so the values are those of `gguf.dequantize`.

How bytes have S and M of group j, and d and m of 256 weights (llama.cpp's ggml-common.h):

- q2_k: S is the low half of byte j of 16, M the high half.
- q3_k: the low half of byte j of 12 (j < 8), or the high half of byte j - 8, has the low 4 bits of S + 32; bits
  2 (j div 4) of byte 8 + j mod 4 are the other two.
- q4_k and q5_k: d and m are before 12 bytes. For j < 4, S is the low 6 bits of byte j of these, M of byte j + 4.
  Otherwise the low half of byte j + 4 has the low 4 bits of S, its high half those of M, and the high 2 bits of bytes
  j - 4 and j are the others.
- q6_k: S is byte j of 16, signed.
"""

from collections.abc import Callable

import mlx.core as mx

from ..quant import MODES, Quant

HALF = 16  # weights of the smaller of the two sizes of groups
Groups = tuple[mx.array, mx.array | None]  # scales and minima [..., groups], float32


def group_scales(quant: Quant, scales: mx.array, third: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The scale and bias of each group, float32 [..., groups].

    Args:
        quant: a form of GGUF.
        scales, third: its parts but the codes, [..., values].
    """
    if not quant.is_nested:
        wide = scales.astype(mx.float32)
        return wide, wide * -quant.zero if third is None else third.astype(mx.float32)
    lead, blocks = scales.shape[:-1], scales.reshape(*scales.shape[:-1], -1, MODES[quant.mode].nested)
    supers = None if third is None else third.reshape(*blocks.shape[:-1], -1).astype(mx.float32)
    factors, minima = NESTED[quant.scale](blocks, supers)
    biases = factors * -quant.zero if minima is None else -minima
    return factors.reshape(*lead, -1), biases.reshape(*lead, -1)


def _q2(blocks: mx.array, supers: mx.array | None) -> Groups:
    assert supers is not None
    return supers[..., :1] * (blocks & 15), supers[..., 1:] * (blocks >> 4)


def _q3(blocks: mx.array, supers: mx.array | None) -> Groups:
    assert supers is not None
    low = mx.concatenate([blocks[..., :8] & 15, blocks[..., :8] >> 4], axis=-1)
    high = mx.concatenate([blocks[..., 8:] >> 2 * i & 3 for i in range(4)], axis=-1)
    return supers * ((low | high << 4).astype(mx.float32) - 32), None


def _q4(blocks: mx.array, _: mx.array | None) -> Groups:
    """Also of q5_k."""
    supers = mx.contiguous(blocks[..., :4]).view(mx.float16).astype(mx.float32)
    first, second, third = (blocks[..., i : i + 4] for i in (4, 8, 12))
    scales = mx.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = mx.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return supers[..., :1] * scales, supers[..., 1:] * minima


def _q6(blocks: mx.array, supers: mx.array | None) -> Groups:
    assert supers is not None
    return supers * blocks.view(mx.int8), None


NESTED: dict[str, Callable[[mx.array, mx.array | None], Groups]] = {"q2_k": _q2, "q3_k": _q3, "q4_k": _q4, "q6_k": _q6}


def of_halves(unpack: Callable[[mx.array, mx.array], mx.array], scales: mx.array, biases: mx.array) -> mx.array:
    """The weights [..., columns] of groups of HALF weights, by `unpack`, which gives those of groups twice as large for
    scales and biases.

    MLX has no such groups. So all are unpacked with the scales of each pair's first group, and of its second.
    """
    pairs = [unpack(scales[..., i::2], biases[..., i::2]) for i in (0, 1)]
    shape = (*scales.shape[:-1], -1, 2, HALF)
    parts = [pair.reshape(shape)[..., i, :] for i, pair in enumerate(pairs)]
    return mx.stack(parts, axis=-2).reshape(pairs[0].shape)
