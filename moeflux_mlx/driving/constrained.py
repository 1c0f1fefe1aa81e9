"""A logits processor that allows only the tokens of a mask."""

from collections.abc import Sequence, Set
from typing import Protocol

import mlx.core as mx
import numpy as np

from .sampling import NEG_INF


class TokenMask(Protocol):
    """Says which tokens may come next."""

    def allowed(self) -> np.ndarray:
        """Allowed tokens as bool [V]. If the mask is narrower than the logits, the tokens beyond it are not allowed."""

    def redirected(self) -> tuple[Set[int], int] | None:
        """Forbidden tokens and the token that replaces them; None if there are none."""

    def consume(self, token: int) -> None:
        """Appends `token` to the text."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the mask allows in a row, as far as it can tell without consuming them."""


class Constraint:
    """A logits processor for one generation: sets the logits of tokens that `mask` forbids to -inf. A token that
    replaces forbidden ones gets the largest of their logits and its own.

    The tokens of the first call are the prompt; the mask consumes each later token once.
    """

    def __init__(self, mask: TokenMask):
        self.mask = mask
        self._known: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for token in np.array(tokens[len(tokens) if self._known is None else self._known :]).tolist():
            self.mask.consume(token)
        self._known = len(tokens)
        allowed = np.zeros(logits.shape[-1], bool)
        by_mask = self.mask.allowed()[: len(allowed)]
        allowed[: len(by_mask)] = by_mask
        logits = logits.astype(mx.float32)
        redirected = self.mask.redirected()
        if redirected is not None:
            ends, other = redirected
            logits[:, other] = logits[:, [*ends, other]].max(axis=-1)
        return mx.where(mx.array(allowed), logits, NEG_INF)
