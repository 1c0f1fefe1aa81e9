"""A causal convolution of each channel by itself, in float32, whose state is its last inputs. On a GPU a single token
takes one kernel.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from . import backend
from .backend import AnyArray, Array, contiguous, kernels_take, leave, library_of, of_kind
from .elementwise import float32
from .launch import SEVERAL, Kernel, Launch, Reason, Shape, ceildiv
from .recurrent_state import RecurrentState
from .rows import StepRows
from .tiles import planned

STEP = Kernel("conv_step", "projected conv taps more residual", "out next_conv")
THREADS = 256  # of a threadgroup


def convolved(
    x: AnyArray,
    state: RecurrentState | StepRows,
    weight: AnyArray,
    factor: float = 1.0,
    more: AnyArray = None,
    residual: AnyArray = None,
) -> AnyArray:
    """(x [B, L, channels] plus its convolution) * factor, in x's dtype, plus `residual` if there is one; updates
    `state`. `weight`, `more`: as of `convolution_sums`.
    """
    if isinstance(state, StepRows):

        def of_row(rows: StepRows, *own: AnyArray) -> AnyArray:
            return convolved(own[0], rows.cache, weight, factor, *own[1:])

        return state.each((x, more, residual), of_row)
    if kernels_take(x, refusal, *x.shape[:2]):
        heads = 0 if more is None else more.shape[2]
        shape = weight.shape[1] - 1, weight.shape[0]
        launch = plan_step(backend.name(), shape, x.dtype, weight.dtype, factor, heads, residual is not None)
        before = mx.zeros((1, *shape), x.dtype) if state.conv is None else state.conv.astype(x.dtype)
        out, after = launch(x, before, weight, x if more is None else more, x if residual is None else residual)
        state.absorb([after], 1)
        return out
    made = ((float32(x) + convolution_sums(x, state, weight, more)) * factor).astype(x.dtype)
    return made if residual is None else residual + made


@planned("conv")
def refusal(target: str, sequences: int, tokens: int) -> Reason | None:
    """Why the kernel does not take this number of sequences in one array, with this number of tokens of each."""
    if tokens > 1:
        return SEVERAL
    return Reason(f"there are {sequences} sequences; the kernel takes one") if sequences > 1 else None


@planned("conv")
def plan_step(
    target: str,
    shape: Shape,
    dtype: mx.Dtype,
    weight: mx.Dtype,
    factor: float = 1.0,
    heads: int = 0,
    adds: bool = False,
    gated: bool = False,
) -> Launch:
    """The launch for one token, with a state of this `shape` [taps - 1, channels]. `heads`: for so many the token has
    taps of its own; `adds`: a residual; `gated`: the convolution is that of a mixer.
    """
    kept, channels = shape
    template = {"X": dtype, "W": weight, "C": channels, "TAPS": kept + 1, "GATED": int(gated)}
    template |= {"FACTOR": factor, "HEADS": heads, "ADD": int(adds)}
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, 1, channels), dtype), ((1, *shape), dtype)]
    return Launch(target, STEP, template, (ceildiv(channels, THREADS), 1), THREADS, outputs)


def convolution_sums(x: Array, state: RecurrentState, weight: mx.array, more: Array | None = None) -> Array:
    """The convolution of the next inputs x [B, L, channels] of one text or of a batch, float32; updates `state`.

    Args:
        weight: [channels, taps, 1], the last tap for the newest input.
        more: [B, L, heads, taps], what each token adds to the taps of a head's channels, the first tap for the newest
            input; None: nothing.
    """
    (batch, length, channels), taps, library = x.shape, weight.shape[1], library_of(x)
    shape = batch, taps - 1, channels
    before: Array = library.zeros(shape, x.dtype) if state.conv is None else of_kind(state.conv, x)
    inputs, weights = library.concatenate([before.astype(x.dtype), x], axis=1), of_kind(weight, x)
    total: Any = 0.0
    with np.errstate(invalid="ignore"):  # damaged weights give NaN here and an error where logits are checked
        for i in range(taps):
            tap = float32(weights[:, i, 0])
            if more is not None:
                own = float32(more[..., taps - 1 - i])
                tap = tap + library.repeat(own, channels // own.shape[-1], axis=-1)
            total = total + float32(inputs[:, i : i + length]) * tap
    state.absorb([leave(contiguous(inputs[:, length:]))], length)
    return total
