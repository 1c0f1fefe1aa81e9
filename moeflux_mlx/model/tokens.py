"""Token ids as they come from callers, checked."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import RequestError


def check_vocabulary(tokens: np.ndarray | int, vocab_size: int) -> None:
    """Raises RequestError: a token is outside the vocabulary."""
    low, high = (tokens, tokens) if isinstance(tokens, int) else (int(tokens.min()), int(tokens.max()))
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")


def token_ids(tokens: Sequence[int] | np.ndarray | mx.array, vocab_size: int, name: str) -> mx.array:
    """`tokens` as uint32 [N]; messages call them `name`.

    Raises:
        RequestError: there are none, they are no integers, or one is outside the vocabulary.
    """
    try:
        values = np.array(tokens)
    except ValueError:
        raise RequestError(f"{name} is a nest of rows; give one row of token ids") from None
    if values.size == 0:
        raise RequestError(f"{name} is empty; give at least one token")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise RequestError(f"{name} is {values.dtype} {values.shape}; give text or one row of token ids")
    check_vocabulary(values, vocab_size)
    return mx.array(values.astype(np.uint32))
