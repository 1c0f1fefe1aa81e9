"""Adds the normed output of a layer's part to the stream, perhaps each with weights; for the rows of a step on a GPU in
one launch.
"""

from typing import NamedTuple

import mlx.core as mx

from . import backend
from .backend import AnyArray, Array
from .elementwise import scaled
from .launch import NO_KERNELS, Kernel, Launch, Reason
from .norm import Norm, rms_norm
from .tiles import MAX_TOKENS, planned

ADD_NORMED = Kernel("add_normed", "h made made_weight beside beside_weight weight eps factor", "out")
SIMDGROUPS = 8  # threads of a row: as many as any Apple GPU allows
WIDEST = 1 << 13  # values of a row, of which a thread holds 64


class Pair(NamedTuple):
    """Two results that are added, each with its own norm."""

    made: AnyArray
    made_norm: Norm
    beside: AnyArray
    beside_norm: Norm

    def sum(self) -> AnyArray:
        """norm(made) + norm(beside)."""
        return self.made_norm(self.made) + self.beside_norm(self.beside)


def add_normed(h: AnyArray, made: AnyArray | Pair, norm: Norm, factor: mx.array | None = None) -> AnyArray:
    """(h + norm(made)) * factor, with h and made [..., D]; the norms of a `Pair` have `norm`'s eps. `factor` [1], or
    None for 1.
    """
    launch = _planned(h, isinstance(made, Pair), factor is not None, 0)
    if not isinstance(launch, Reason):
        out = launch(h, *_inputs(made, norm), norm.weight, norm.eps, norm.weight if factor is None else factor)[0]
        return out.reshape(h.shape)
    joined: AnyArray = h + norm(made.sum() if isinstance(made, Pair) else made)
    return joined if factor is None else scaled(joined, factor)


def add_weighed(
    h: AnyArray, made: AnyArray, weights: tuple[mx.array, mx.array], eps: float, scale: mx.array | None
) -> AnyArray:
    """h times the first of `weights` [D], plus made * scale, normed without a weight, times the second; all rows
    [..., D]. `scale` [D]: None for 1.
    """
    kept, own = weights
    launch = _planned(h, False, False, 1 if scale is None else 2)
    if not isinstance(launch, Reason):
        out = launch(h, made, own if scale is None else scale, made, kept, own, eps, own)[0]
        return out.reshape(h.shape)
    normed = rms_norm(made if scale is None else scaled(made, scale), None, eps)
    joined: AnyArray = scaled(h, kept) + scaled(normed, own)
    return joined.astype(h.dtype)


def _planned(h: Array, is_pair: bool, has_factor: bool, weighed: int) -> Launch | Reason:
    """The launch for rows h [..., D]."""
    if not isinstance(h, mx.array):
        return NO_KERNELS
    rows, width = min(h.size // h.shape[-1], MAX_TOKENS + 1), h.shape[-1]
    return plan(backend.name(), rows, width, h.dtype, is_pair, has_factor, weighed)


def _inputs(made: AnyArray, norm: Norm) -> tuple[AnyArray, ...]:
    """The kernel's inputs: the results with their weights; a kernel needs an array for every input."""
    if not isinstance(made, Pair):
        return made, norm.weight, made, norm.weight
    return made.made, made.made_norm.weight, made.beside, made.beside_norm.weight


@planned("add_normed")
def plan(
    target: str, rows: int, width: int, dtype: mx.Dtype, is_pair: bool, has_factor: bool, weighed: int
) -> Launch | Reason:
    if rows > MAX_TOKENS:
        return Reason(f"there are more than {MAX_TOKENS} rows")
    if width > WIDEST:
        return Reason(f"rows of {width} values are wider than {WIDEST}")
    template = {"X": dtype, "D": width, "SG": SIMDGROUPS, "PAIR": int(is_pair), "FACTOR": int(has_factor)}
    template["WEIGHED"] = weighed
    return Launch(target, ADD_NORMED, template, (1, rows), 32 * SIMDGROUPS, [((rows, width), dtype)])
