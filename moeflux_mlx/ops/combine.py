"""The weighted sum of experts' outputs with the residual stream and the shared expert: unscaled, in float32."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import backend, native
from .backend import Array, of_kind, view
from .launch import Kernel, Launch, Reason, Shape, Template, ceildiv
from .tiles import planned

COMBINE = Kernel("moe_combine", "expert_out places weights h_mid shared", "out")
THREADS = 256
COMBINED = 8192  # tokens whose outputs are gathered at once

RowNorm = Callable[[Any], Any]  # of the outputs [N, H] of experts, each by itself
Dtypes = tuple[mx.Dtype, mx.Dtype, mx.Dtype | None]  # dtypes of the experts' values, the residual and the shared expert


def combined(
    rows: Array, where: Array, weights: Array, residual: Array, shared: Array | None, norm: RowNorm | None = None
) -> Array:
    """residual + sum_k weights[:, k] * norm(rows[where[:, k]]) + shared, k ascending, rounded once: [T, H].

    Args:
        rows: [N, H] outputs of experts.
        where: [T, K] int32, the row of each token's k-th expert.
        weights: [T, K] float32.
        residual, shared: [T, H]; no shared expert: None.
        norm: of each row; None: no norm.
    """
    rows = rows if norm is None else norm(rows)
    where = of_kind(where, residual)
    if isinstance(residual, np.ndarray):
        return native.combine(view(rows), where, weights, residual, shared)
    parts: list[Array] = []
    for start in range(0, len(residual), COMBINED):
        part = slice(start, start + COMBINED)
        rest = None if shared is None else shared[part]
        parts.append(moe_combine(rows, where[part], weights[part], residual[part], rest))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def moe_combine(
    expert_out: mx.array, places: mx.array, weights: mx.array, residual: mx.array, shared: mx.array | None = None
) -> mx.array:
    """residual + sum_k weights[:, k] * expert_out[places[:, k]] + shared, k ascending, rounded once.

    Args:
        expert_out: [N, H] float32, bfloat16 or float16.
        places: [T, K] int32, rows of `expert_out`.
        weights: [T, K] float32.
        residual: [T, H].
        shared: [T, H] or None.

    Returns:
        [T, H] in residual's dtype.
    """
    other = residual if shared is None else shared
    dtypes = expert_out.dtype, residual.dtype, None if shared is None else other.dtype
    launch = plan(backend.name(), places.shape, expert_out.shape[1], dtypes)
    weights = weights.astype(mx.float32)
    if isinstance(launch, Reason):
        return moe_combine_ops(expert_out[places], weights, residual, shared)
    return launch(expert_out, places, weights, residual, other)[0]


def combine_types(dtypes: Dtypes) -> Template:
    """Template arguments of what is summed."""
    experts, residual, shared = dtypes
    return {"X": experts, "Y": residual, "Z": shared or residual, "SHARED": int(shared is not None)}


@planned("combine")
def plan(target: str, places: Shape, hidden: int, dtypes: Dtypes) -> Launch | Reason:
    tokens, top_k = places
    template = {"H": hidden, "K": top_k, **combine_types(dtypes)}
    groups = (ceildiv(hidden, THREADS), tokens)
    return Launch(target, COMBINE, template, groups, THREADS, [((tokens, hidden), dtypes[1])])


def moe_combine_ops(expert_out: mx.array, weights: mx.array, residual: mx.array, shared: mx.array | None) -> mx.array:
    """The twin of the kernel, of the rows expert_out [T, K, H] of each token."""
    total = residual.astype(mx.float32)
    for k in range(expert_out.shape[1]):
        total = total + weights[:, k, None] * expert_out[:, k].astype(mx.float32)
    if shared is not None:
        total = total + shared.astype(mx.float32)
    return total.astype(residual.dtype)
