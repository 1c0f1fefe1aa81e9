"""Codes as MLX stores them: a row is one stream of bits in uint32 words, the first code in the lowest bits."""

import mlx.core as mx

EIGHT = 8  # codes that fill whole bytes at any width


def packed(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., cols] below 2 ** bits -> uint32 words [..., cols * bits / 32]. `cols` is a multiple of 32."""
    *lead, columns = codes.shape
    words = codes.reshape(-1, columns // EIGHT, EIGHT).astype(mx.uint64)
    width = bits
    while words.shape[-1] > 1:  # neighbours are joined until eight codes are one number
        words = words[..., 0::2] | (words[..., 1::2] << width)
        width *= 2
    stream = mx.contiguous(words).view(mx.uint8)[..., :bits]
    return mx.contiguous(stream.reshape(-1, columns * bits // 8)).view(mx.uint32).reshape(*lead, columns * bits // 32)
