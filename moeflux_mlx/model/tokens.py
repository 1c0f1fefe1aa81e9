"""Checks token ids from callers and brings them to the form that layers need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..ops.backend import AnyArray, Array, dtype_of, library_of, of_kind


class TableRows(Protocol):
    """Rows of a table that are being read, for the n-grams of tokens [B, L]."""

    @property
    def nbytes(self) -> int: ...

    def take(self, start: int, end: int) -> mx.array:
        """[B, end - start, values] of these tokens, in the dtype that the model computes in."""


@dataclass(frozen=True)
class ReadRows:
    """Rows [B, L, values] that have been read."""

    rows: mx.array

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def take(self, start: int, end: int) -> mx.array:
        """[B, end - start, values] of these tokens."""
        return self.rows[:, start:end]


@dataclass(frozen=True)
class Tokens:
    """The layers' inputs for tokens besides hidden states.

    Attributes:
        ids: [B, L].
        tables: by layer, the rows of tables for n-grams.
        start: of these tokens, among those that the rows are for.
    """

    ids: mx.array
    tables: Mapping[int, TableRows] = field(default_factory=dict)
    start: int = 0

    @classmethod
    def of(cls, layers: Sequence[int], ids: mx.array, *rows: mx.array) -> "Tokens":
        """Tokens with the rows that `arrays` gave for these layers."""
        return cls(ids, {layer: ReadRows(some) for layer, some in zip(layers, rows, strict=False)})

    def arrays(self, layers: Sequence[int]) -> list[mx.array]:
        """The ids, and the rows [B, L, values] of the tables of these layers, if there are tables."""
        L = self.ids.shape[1]
        return [self.ids, *(self.tables[i].take(self.start, self.start + L) for i in layers if i in self.tables)]

    def at(self, start: int, end: int) -> "Tokens":
        """Some of them."""
        return replace(self, ids=self.ids[:, start:end], start=self.start + start)

    def rows(self, layer: int, width: int, like: Array) -> AnyArray:
        """[B, L, width] of a layer's table, as an array of the same kind and dtype as `like`; zeros without tables."""
        B, L = self.ids.shape
        if layer not in self.tables:
            return library_of(like).zeros((B, L, width), like.dtype)
        rows = self.tables[layer].take(self.start, self.start + L)
        return of_kind(rows.astype(dtype_of(like)), like)


def check_vocabulary(tokens: np.ndarray | int, vocab_size: int) -> None:
    """Raises RequestError: a token is outside the vocabulary."""
    low, high = (tokens, tokens) if isinstance(tokens, int) else (int(tokens.min()), int(tokens.max()))
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")


def token_ids(tokens: Sequence[int] | np.ndarray | mx.array, vocab_size: int, name: str) -> mx.array:
    """`tokens` as uint32 [N]; messages call them `name`.

    Raises:
        RequestError: the list is empty, or an id is not an integer or outside the vocabulary.
    """
    try:
        values = np.array(tokens)
    except ValueError:
        raise RequestError(f"{name} is a nest of rows; give one row of token ids") from None
    if values.size == 0:
        raise RequestError(f"{name} is empty; give at least one token")
    if values.dtype.kind in "OU":
        kind = f"a list of {type(tokens[0]).__name__}" if values.ndim else type(tokens).__name__
        raise RequestError(
            f"{name} is {kind}; give text, one row of token ids, or tokenizer.apply_chat_template(messages)"
        )
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise RequestError(f"{name} is {values.dtype} {values.shape}; give text or one row of token ids")
    check_vocabulary(values, vocab_size)
    return mx.array(values.astype(np.uint32))
