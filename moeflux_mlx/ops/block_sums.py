"""A part's input from the sums of blocks of layers and the sum so far (Kimi K3's attention residuals; the order of
operations is that of mlx-lm's `kimi_k3.py`), whose weights are computed in float32.

For a single token a GPU computes a part's input in one launch, which also adds the output of the part before; after a
layer's last part a launch only adds.
"""

from functools import lru_cache

import mlx.core as mx

from . import backend
from .backend import AnyArray, Array, kernels_take
from .elementwise import float32, softmax
from .launch import LEAST_ELEMENTS, SEVERAL, Kernel, Launch, Reason, Shape, ceildiv
from .norm import rms_norm
from .streams import plan_scatter
from .tiles import planned

MIX = Kernel("block_sums_mix", "h out weight", "x next")
THREADS, EACH = 256, 4  # of a threadgroup; and columns of a thread
MOST_NUMBERS = 64  # that a thread has in registers: for each sum one of its length and one of each input
KEPT, ADDED, BEHIND = range(3)  # what becomes of `out` in the kernel


def mixed_normed(h: Array, queries: mx.array, eps: float) -> Array:
    """The inputs [B, L, inputs * D] of a part: of the normed rows of h [B, L, n * D] sums that are weighed by a softmax
    of their products with each of the queries [inputs, D] float32.
    """
    if takes_token(h, h.shape[-1] // queries.shape[1], len(queries)):
        return _mixed_on_kernel(h, h, queries, eps, KEPT, True)[0]
    rows = rms_norm(float32(h).reshape(*h.shape[:2], -1, queries.shape[1]), None, eps)
    shares = (softmax((rows * query).sum(axis=-1))[..., None] for query in backend.of_kind(queries, h))
    parts = [(share * rows).sum(axis=2).astype(h.dtype) for share in shares]
    return parts[0] if len(parts) == 1 else backend.library_of(h).concatenate(parts, axis=-1)


def mixed(h: Array, weight: mx.array, eps: float) -> Array:
    """The sum [B, L, D] of the rows of h [B, L, n * D], n sums of D values, weighed by a softmax of numbers: the sum of
    each row's values, normed, times weight [D] float32. It is a part's input.
    """
    if h.shape[-1] == len(weight):
        return h
    count = h.shape[-1] // len(weight)
    if takes_token(h, count):
        return _mixed_on_kernel(h, h, weight, eps, KEPT, False)[0]
    rows = float32(h).reshape(*h.shape[:2], -1, len(weight))
    shares = softmax(rms_norm(rows, weight, eps).sum(axis=-1))
    return (shares[..., None] * rows).sum(axis=2).astype(h.dtype)


def mixed_behind(
    h: Array, out: Array, weight: mx.array, eps: float, begins: bool, normed: bool = False
) -> tuple[Array, Array]:
    """The sums behind a part with the output out [B, L, D], and `mixed`, or `mixed_normed` by queries `weight`, of
    them. The output is added to the last sum; or, if it `begins` a block, becomes a sum of its own behind the others.
    """
    if not takes_token(h, h.shape[-1] // out.shape[-1] + begins, weight.size // out.shape[-1]):
        sums = backend.library_of(h).concatenate([h, out], axis=-1) if begins else added(h, out)
        return sums, (mixed_normed if normed else mixed)(sums, weight, eps)
    x, sums = _mixed_on_kernel(h, out, weight, eps, BEHIND if begins else ADDED, normed)
    return sums, x


def _mixed_on_kernel(h: AnyArray, out: AnyArray, weight: mx.array, eps: float, adds: int, normed: bool) -> AnyArray:
    """The inputs of a part, and the sums behind `out`."""
    width = weight.shape[-1]
    sizes = h.shape[-1] // width + (adds == BEHIND), weight.size // width, width
    return plan_mix(backend.name(), sizes, h.dtype, eps, adds, normed)(h, out, weight)


def added(h: AnyArray, out: AnyArray) -> AnyArray:
    """The sums h [B, L, n * D], to the last of which out [B, L, D] is added."""
    D = out.shape[-1]
    count = h.shape[-1] // D
    if takes_token(h, count):
        return plan_scatter(backend.name(), h.shape[-1], h.dtype, count, False)(h, out, _only_last(count))[0]
    if count == 1:
        return h + out
    return backend.library_of(h).concatenate([h[..., :-D], h[..., -D:] + out], axis=-1)


@lru_cache(64)
def _only_last(count: int) -> mx.array:
    """The weights with which `plan_scatter` adds to the last stream alone."""
    return mx.array([0.0] * (count - 1) + [1.0] + [0.0] * max(LEAST_ELEMENTS - count, 0))


def takes_token(h: Array, count: int, inputs: int = 1) -> bool:
    """Whether the kernels take the sums h [B, L, n * D], where `count` are to be weighed for each of `inputs`."""
    return kernels_take(h, refusal, h.shape[0] * h.shape[1], count, inputs)


@planned("block_sums")
def refusal(target: str, tokens: int, count: int, inputs: int = 1) -> Reason | None:
    """Why the kernels do not take this number of tokens, or of sums for so many inputs."""
    if tokens != 1:
        return SEVERAL
    most = MOST_NUMBERS // (inputs + 1)
    return None if count <= most else Reason(f"there are {count} sums, more than {most}")


@planned("block_sums")
def plan_mix(target: str, sizes: tuple[int, int, int], dtype: mx.Dtype, eps: float, adds: int, normed: bool) -> Launch:
    """The launch that weighs sums and adds them up, with a part's output as one of the three constants says. `sizes`:
    how many sums, of how many inputs, and the width of each.
    """
    count, inputs, width = sizes
    template = {"X": dtype, "N": count, "Q": inputs, "D": width, "EPS": eps, "ADDS": adds, "NORMED": int(normed)}
    template |= {"T": THREADS, "EACH": EACH}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, 1, inputs * width), dtype)]
    outputs.append(((1, 1, count * width if adds != KEPT else LEAST_ELEMENTS), dtype))
    return Launch(target, MIX, template, (ceildiv(width, EACH * THREADS), 1), THREADS, outputs)
