"""A logits processor that leaves only the tokens which a mask allows."""

from collections.abc import Sequence, Set
from typing import Protocol

import mlx.core as mx
import numpy as np

from .sampling import NEG_INF


class TokenMask(Protocol):
    """Says which tokens may come next."""

    def allowed(self) -> np.ndarray:
        """bool [V], or narrower than the logits, which then may not have the tokens beyond."""

    def redirected(self) -> tuple[Set[int], int] | None:
        """Tokens that are not allowed, and the one that is as likely in their place; None for none."""

    def consume(self, token: int) -> None:
        """The text goes on with `token`."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come in a row, as far as that can be told without taking them."""


class Constraint:
    """For one generation: what `mask` does not allow becomes -inf, and may raise what is there in its place.

    The tokens that the first call gets are the prompt; of those that follow, the mask is told each once.
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
