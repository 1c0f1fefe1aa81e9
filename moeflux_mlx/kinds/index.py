"""The choice of positions for a token that does not attend to all of them."""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .rotation import Rotation

Place: TypeAlias = Any  # of tokens: an int, or an integer array of numpy or MLX
INDEX_VALUES = 1 << 24  # the most values of index scores, or of gathered entries, at once


@dataclass(frozen=True)
class Indexer:
    """Chooses the positions that a token attends to (DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1).

    A token that sees at most `top` positions attends to all of them. Any other token attends to the `top` positions
        with the largest scores, which come from `heads` queries of `dim` values and one key per position. Ties go to
        the earlier position. `interleaved`: how the first values of queries and keys are rotated. `reuses`: the layer
        has no such queries and keys, and reuses the choice of the last layer that has them. `rotates_last`: the last
        values are rotated, not the first ones. `norm_eps`: epsilon of the keys' norm. `from_input`: queries are made
        of the layer's input behind a norm of their own, not of the latent of attention's queries.
    """

    heads: int
    dim: int
    top: int
    interleaved: bool = False
    reuses: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6
    from_input: bool = False

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        return min(max(self.top - first, 0), count)

    def rotation(self, of: Rotation) -> Rotation:
        """The rotation of queries and keys: the attention's, but with its own pairing of values."""
        return replace(of, interleaved=self.interleaved)

    def rows_at_once(self, positions: int, width: int) -> int:
        """Number of tokens that are processed together, if each sees `positions` positions with entries of `width`
        values.
        """
        return max(INDEX_VALUES // max(self.heads * positions, self.top * width), 1)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once: queries; scores with their order, or gathered entries."""
        return tokens * self.heads * self.dim + 3 * max(INDEX_VALUES, self.heads * positions)


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of `ratio` positions. A token attends to the blocks that `indexer` chooses, and to the positions after the
    last whole block (transformers, `Qwen4ExpTextQSAIndexer`). A block's key is the mean of its positions' keys, normed
    and rotated by the first position; or, if `weighed`, the mean of their normed keys, each value weighted by a softmax
    of the positions' gates, without rotation (transformers, `Glm5NextTextIndexer`).
    """

    ratio: int
    indexer: Indexer
    weighed: bool = False

    @property
    def remembered(self) -> int:
        """Positions up to a token's own from which a block's key may still be made."""
        return self.ratio

    @property
    def overlap(self) -> int:
        """Positions before a block's own that its key is also made from."""
        return 0

    @property
    def row(self) -> int:
        """Values that a cache holds per position: the key, and its gates."""
        return self.indexer.dim * (2 if self.weighed else 1)

    @property
    def entry(self) -> int:
        """Values of a block's key."""
        return self.indexer.dim

    @property
    def most(self) -> int:
        """Positions that a token attends to, once it does not attend to all."""
        return self.indexer.top * self.ratio + self.ratio - 1

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        return min(max((self.indexer.top + 1) * self.ratio - 1 - first, 0), count)

    def whole(self, place: Place) -> Place:
        """Blocks among which the token at a place chooses."""
        return (place + 1) // self.ratio

    @property
    def chosen(self) -> int:
        """Blocks that it chooses."""
        return self.indexer.top

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once."""
        return self.indexer.temporaries(tokens, positions // self.ratio) + tokens * self.most


@dataclass(frozen=True)
class HeadBlocks:
    """Blocks of `ratio` positions. A token attends to its own block and, for each key head, to others that `indexer`
    chooses: `top` in all, by the largest product of a query and one of a block's keys (MiniMax-M3; transformers,
    `MiniMaxM3VLIndexer`). The indexer has one query per key head.
    """

    ratio: int
    indexer: Indexer

    @property
    def most(self) -> int:
        """Positions that a token attends to, once it does not attend to all."""
        return self.indexer.top * self.ratio

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        return min(max(self.most - first, 0), count)

    def whole(self, place: Place) -> Place:
        """Blocks among which the token at a place chooses: those before its own."""
        return place // self.ratio

    @property
    def chosen(self) -> int:
        """Blocks that it chooses besides its own."""
        return self.indexer.top - 1

    def temporaries(self, tokens: int, positions: int) -> int:
        """Values that exist at once."""
        return self.indexer.temporaries(tokens, positions) + tokens * self.indexer.heads * self.most
