"""The tables of n-grams: which rows tokens need, and the object that reads them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..kinds import NGrams
from ..layers import Caches
from ..ops.ngrams import row_numbers
from ..ops.rows import StepRows
from .tokens import TableRows


class TableReader(Protocol):
    """Reads the rows of a layer's table; `token_map`: the numbers of tokens that are hashed, None: themselves."""

    token_map: np.ndarray | None

    def begin(self, numbers: np.ndarray) -> TableRows:
        """Begins to read the rows int64 [B, L, heads]."""


class Tables:
    """The tables of all layers that have n-grams.

    Args:
        parts: by layer.
        readers: by layer.
    """

    def __init__(self, parts: Mapping[int, NGrams], readers: Mapping[int, TableReader]):
        self.parts, self.readers = parts, readers

    def begin(self, tokens: np.ndarray, layers: Sequence[Caches] | Mapping[int, Caches]) -> dict[int, TableRows]:
        """Begins to read what tokens [B, L] want, after what the caches of `layers` have absorbed; by layer."""
        return {
            layer: self.readers[layer].begin(_numbers(tokens, layers[layer][-1], part, self.readers[layer].token_map))
            for layer, part in self.parts.items()
        }


def _numbers(tokens: np.ndarray, cache: Any, part: NGrams, token_map: np.ndarray | None) -> np.ndarray:
    """The rows int64 [B, L, heads] of tokens [B, L], behind those of the n-grams' cache."""
    if not isinstance(cache, StepRows):
        return row_numbers(np.concatenate([_before(cache, len(tokens), part), tokens], axis=1), part, token_map)
    texts: dict[int, np.ndarray] = {}  # the last tokens of each sequence
    rows = []
    for one, token in zip(cache.caches, tokens[0], strict=True):
        text = np.append(texts.get(id(one), _before(one, 1, part)), [[token]], axis=1)
        texts[id(one)] = text[:, 1:]
        rows.append(row_numbers(text, part, token_map))
    return np.concatenate(rows, axis=1)


def _before(cache: Any, count: int, part: NGrams) -> np.ndarray:
    """The last tokens that a cache has absorbed, for a number of texts."""
    kept = cache.recurrent
    return np.full((count, part.longest - 1), part.end) if kept is None else np.array(kept)
