"""A gated short convolution between its projections, as LFM2 uses it (transformers, `Lfm2MoeShortConv`).

B and x are multiplied, a causal convolution of each channel sums the last products, and C multiplies the sum, which is
float32. The state is the last products. On a GPU a single token takes one kernel, and more tokens take MLX's
operations; on the CPU numpy computes, because the native convolution (`ops.native.conv_silu`) ends with an activation
that this one does not have.
"""

from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ...ops import backend
from ...ops.backend import AnyArray, Array, kernels_take
from ...ops.convolution import convolution_sums, plan_step, refusal
from ...ops.elementwise import float32, split
from ...ops.launch import Launch
from ...ops.recurrent_state import RecurrentState
from ...ops.rows import RowSizes, StepRows, as_rows
from ...ops.tiles import planned
from .spec import ShortConv


def short_conv(projected: Array, state: RecurrentState | StepRows, weight: mx.array, sizes: ShortConv) -> Array:
    """The mixer from its input projection to its output projection; updates `state`.

    Args:
        projected: [B, L, 3 * channels], B, C and x one behind the other.
        state: of one text or a batch of them; or the states of the L rows of a step.
        weight: [channels, taps, 1], the last tap for the newest input.

    Returns:
        [B, L, channels] in the dtype of `projected`.
    """
    batch, length, _ = projected.shape
    if isinstance(state, StepRows):
        has_kernel = kernels_take(projected, refusal, batch, 1)

        def compute(rows: StepRows, own: Any) -> AnyArray:
            return _on_kernel(own, rows, weight, sizes) if has_kernel else short_conv(own, rows.cache, weight, sizes)

        return state.each((projected,), compute, has_kernel)
    if kernels_take(projected, refusal, batch, length):
        return _on_kernel(projected, StepRows([state]), weight, sizes)
    return _on_operations(projected, state, weight, sizes)


def _on_operations(projected: Array, state: RecurrentState, weight: mx.array, sizes: ShortConv) -> Array:
    """`short_conv` of the next tokens of one text or of a batch."""
    B, C, x = split(projected, sizes.channels, 2 * sizes.channels)
    with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
        out: Array = (float32(C) * convolution_sums(B * x, state, weight)).astype(projected.dtype)
    return out


# ---- the kernel, for the rows of a step on a GPU


def _on_kernel(projected: mx.array, rows: StepRows, weight: mx.array, sizes: ShortConv) -> AnyArray:
    """`short_conv` for a row of each of several sequences, of projected [1, R, 3 * channels]."""
    dtype, shape = projected.dtype, (1, *sizes.conv_shape)
    convs = [[mx.zeros(shape, dtype) if one.conv is None else one.conv.astype(dtype)] for one in rows.sequences]
    launch = plan(rows.sizes((sizes.projected,)), backend.name(), dtype, weight.dtype, sizes)
    out, *after = launch(projected, *as_rows(convs), weight, projected, projected)
    rows.absorb(after)
    return out


@planned("conv")
def plan(rows: RowSizes, target: str, dtype: mx.Dtype, weight: mx.Dtype, sizes: ShortConv) -> Launch:
    """The launch for some rows."""
    count = rows.count
    alone = plan_step(target, sizes.conv_shape, dtype, weight, 1.0, 0, False, True)
    own = {"projected": "projected+PROJECTED", "out": "out+C", "conv": "conv+CONV", "next_conv": "next_conv+CONV"}
    outputs = [((1, count, sizes.channels), dtype), ((count, *sizes.conv_shape), dtype)]
    return alone.of_rows(own, count, {"PROJECTED": sizes.projected, "CONV": prod(sizes.conv_shape)}, outputs)
