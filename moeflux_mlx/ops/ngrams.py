"""N-grams: the rows of a table that a token uses, and the computations with them (transformers,
`Qwen4ExpTextPLELayer`).

Row numbers are computed on the host, in numpy's int64: they are known as soon as the token is, and 32 bits cannot count
the rows. Everything else has one form for MLX's and numpy's arrays, and a kernel for one token on a GPU.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kinds import NGrams
from . import backend
from .backend import AnyArray, Array, kernels_take, library_of, of_kind
from .elementwise import float32, sigmoid
from .launch import SEVERAL, Kernel, Launch, Reason, Shape, ceildiv
from .streams import normed_streams
from .tiles import planned

STEP = Kernel("ngrams_step", "h key value key_norm query_norm conv_norm eps taps conv", "next next_conv")
THREADS = 256  # of a threadgroup


def row_numbers(tokens: np.ndarray, part: NGrams, token_map: np.ndarray | None = None) -> np.ndarray:
    """The rows int64 [B, L, heads] of the last L of tokens [B, longest - 1 + L].

    A token's hash is the exclusive or of products of it and of those before it with odd numbers; a head's row is the
    hash modulo the head's rows. Tokens before the end of an earlier text are replaced by that end token, and then all
    by the numbers that `token_map` int64 has for them, if there is one.
    """
    tokens, before, last = tokens.astype(np.int64), part.longest - 1, part.end
    if token_map is not None:
        tokens, last = token_map[tokens], int(token_map[part.end])
    count = tokens.shape[1] - before
    mixed, inside, numbers = tokens[:, before:] * part.multipliers[0], np.True_, []
    heads, first = len(part.sizes) // before, np.cumsum((0, *part.sizes[:-1]))
    for back in range(1, part.longest):
        earlier = tokens[:, before - back : before - back + count]
        inside = inside & (earlier != last) if part.ends_texts else inside
        mixed = mixed ^ np.where(inside, earlier, last) * part.multipliers[back]
        own = slice((back - 1) * heads, back * heads)
        numbers.append(mixed[..., None] % np.array(part.sizes[own]) + first[own])
    return np.concatenate(numbers, axis=-1)


class NGramWeights(NamedTuple):
    """Norms [channels] of keys, streams and the convolution's inputs, their eps, and the convolution [channels, taps,
    1]; without a convolution None in its place and in that of its inputs' norm."""

    key: mx.array
    query: mx.array
    conv_input: AnyArray
    eps: float
    conv: AnyArray


def with_ngrams(
    h: Array, key: Array, value: Array, before: Array | None, w: NGramWeights, part: NGrams
) -> tuple[Array, Array]:
    """The streams h [B, L, n * D] with what n-grams add; and the last inputs of the convolution.

    Args:
        key, value: [B, L, n * D] and [B, L, D], projections of the rows.
        before: [B, remembered, n * D], the convolution's inputs before these tokens; None: zeros.
    """
    if part.taps and kernels_take(h, refusal, h.shape[0] * h.shape[1]):
        return _on_kernel(h, key, value, before, w, part)
    library = library_of(h)
    (B, L, width), streams = h.shape, h.shape[-1] // value.shape[-1]
    in_wide = (float32(key), float32(h)) if not part.taps else (key, h)
    key, query = (normed_streams(x, n, w.eps, streams) for x, n in zip(in_wide, (w.key, w.query), strict=True))
    products = float32(key * query).reshape(B, L, streams, -1).sum(axis=-1)
    gates = products / math.sqrt(value.shape[-1])
    gates = library.sqrt(library.maximum(abs(gates), 1e-6)) * library.sign(gates)
    if not part.taps:
        made = float32(h) + (sigmoid(gates)[..., None] * float32(value)[:, :, None]).reshape(B, L, width)
        return made.astype(h.dtype), library.zeros((B, 0, width), h.dtype)
    gated = (sigmoid(gates).astype(h.dtype)[..., None] * value[:, :, None]).reshape(B, L, width)
    inputs = normed_streams(gated, w.conv_input, w.eps, streams)
    before = library.zeros((B, part.remembered, width), inputs.dtype) if before is None else before.astype(inputs.dtype)
    inputs = library.concatenate([before, inputs], axis=1)
    return h + gated + _convolved(inputs, w.conv, part, L), inputs[:, L:]


def _convolved(inputs: Array, weight: mx.array, part: NGrams, count: int) -> Array:
    """silu of the last `count` outputs of the convolution, whose inputs lie `longest` apart, summed in float32."""
    taps = of_kind(weight, inputs)
    total: AnyArray = 0.0
    for i in range(part.taps):
        start = i * part.longest
        total = total + float32(inputs[:, start : start + count]) * float32(taps[:, i, 0])
    return (total * sigmoid(total)).astype(inputs.dtype)


# ---- the kernel for one token on a GPU


@planned("ngrams")
def refusal(target: str, tokens: int) -> Reason | None:
    """Why the kernel does not take this number of tokens."""
    return None if tokens == 1 else SEVERAL


def _on_kernel(
    h: mx.array, key: AnyArray, value: AnyArray, before: AnyArray, w: NGramWeights, part: NGrams
) -> AnyArray:
    """`with_ngrams` of one token."""
    shape = 1, part.remembered, h.shape[-1]
    before = mx.zeros(shape, h.dtype) if before is None else before.astype(h.dtype)
    dtypes = h.dtype, w.key.dtype, w.conv.dtype
    launch = plan(backend.name(), shape, value.shape[-1], dtypes, part.taps, part.longest)
    h, inputs = launch(h, key, value, w.key, w.query, w.conv_input, w.eps, w.conv, before)
    return h, inputs


@planned("ngrams")
def plan(target: str, kept: Shape, width: int, dtypes: tuple[mx.Dtype, ...], taps: int, far: int) -> Launch:
    streams, blocks = kept[-1] // width, ceildiv(width, THREADS)
    template = dict(zip("XVW", dtypes, strict=True)) | {"N": streams, "D": width, "TAPS": taps, "FAR": far}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, 1, kept[-1]), dtypes[0]), (kept, dtypes[0])]
    return Launch(target, STEP, template | {"T": THREADS}, (blocks, streams), THREADS, outputs)
