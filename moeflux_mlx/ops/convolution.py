"""A causal convolution of each channel by itself, in float32, whose state is its last inputs. Plain operations."""

from typing import Any

import numpy as np

from .backend import AnyArray, Array, contiguous, leave, library_of, of_kind
from .elementwise import float32
from .recurrent_state import RecurrentState
from .rows import StepRows


def convolved(
    x: AnyArray, state: RecurrentState | StepRows, weight: AnyArray, factor: float = 1.0, more: AnyArray = None
) -> AnyArray:
    """(x [B, L, channels] plus its convolution) * factor, in x's dtype; updates `state`. `weight`, `more`: as of
    `convolution_sums`.
    """
    if isinstance(state, StepRows):
        return state.each((x, more), lambda rows, x, more: convolved(x, rows.cache, weight, factor, more))
    return ((float32(x) + convolution_sums(x, state, weight, more)) * factor).astype(x.dtype)


def convolution_sums(x: Array, state: RecurrentState, weight: AnyArray, more: AnyArray = None) -> AnyArray:
    """The convolution of the next inputs x [B, L, channels] of one text or of a batch, float32; updates `state`.

    Args:
        weight: [channels, taps, 1], the last tap for the newest input.
        more: [B, L, heads, taps], what each token adds to the taps of a head's channels, the first tap for the newest
            input; None: nothing.
    """
    (batch, length, channels), taps, library = x.shape, weight.shape[1], library_of(x)
    shape = batch, taps - 1, channels
    before: AnyArray = library.zeros(shape, x.dtype) if state.conv is None else of_kind(state.conv, x)
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
