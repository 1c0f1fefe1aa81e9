"""Attention to a window and to entries of positions before it, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...kinds import index
from ...kinds.index import Indexer
from ...kinds.limits import check_head, check_index_head, check_width, check_window, not_multiple
from ...kinds.mixer import Attending, Mixer, product_operations
from ...kinds.ngrams import NGrams
from ...kinds.rotation import Rotation


@dataclass(frozen=True)
class BestBlocks:
    """Blocks of `size` entries, of which the `top` with the best entries and the newest one are marked: the indexers of
    later layers choose among them. `reuses`: the layer marks none, and chooses among those of the last that does.
    """

    top: int
    size: int
    reuses: bool = False


@dataclass(frozen=True)
class Compressor:
    """Makes one entry from each `ratio` positions: each value is the mean of the positions' values, weighted by a
    softmax of their gates (DeepSeek-V4's model code in transformers). `overlaps`: an entry also uses the `ratio`
    positions before its own, with a second series of values. `indexer` chooses the entries that a token attends to, by
    its own entries, made in the same way; None: all.

    Attributes:
        shares: entries serve later layers too (DeepSeek-V4.1; mlx-lm, `deepseek_v41.py`). Their gates have no biases by
            place, an entry of one position has no gates, and the indexer's entries are projections of the others.
        borrows: the layer makes no entries, and attends to those of the last that shares its own.
        blocks: among whose entries the indexer chooses; None: among all.
    """

    ratio: int
    overlaps: bool = False
    indexer: Indexer | None = None
    shares: bool = False
    borrows: bool = False
    blocks: BestBlocks | None = None

    @property
    def series(self) -> int:
        return 2 if self.overlaps else 1

    @property
    def remembered(self) -> int:
        """Positions up to a token's own from which an entry may still be made."""
        return 0 if self.borrows else self.series * self.ratio

    def inputs(self, width: int) -> tuple[int, ...]:
        """Values per position: values and gates of entries of `width`, and of the indexer's."""
        if self.borrows:
            return ()
        if self.shares:
            return (width,) * min(self.ratio, 2)
        own = (self.series * width,) * 2
        return own if self.indexer is None else (*own, *((self.series * self.indexer.dim,) * 2))

    def entry(self, width: int) -> int:
        """Values of an entry, the indexer's behind the attention's."""
        return width + (self.indexer.dim if self.indexer else 0)


@dataclass(frozen=True)
class Compressed(Mixer):
    """Attention of `heads` queries over one head that is key and value: over a window of the newest positions and, with
    a `compressor`, over entries that summarise all earlier ones; with sinks.

    Queries come from a latent of `q_latent` values. The last `rotation.dims` values of a head are rotated, and those of
    attention's output are rotated back by the token's own position. `groups` of heads are each projected to
    `group_latent` values, and these to the stream. `norms_queries`: each query is normed. `rounds`: keys are rounded to
    8 bits, entries, index queries and index keys to 4, in blocks that share a scale (`ops/block_rounding.py`).
    `ngrams`: the n-grams that are added before; None: none.
    """

    heads: int
    head_dim: int
    q_latent: int
    rotation: Rotation
    window: int
    groups: int
    group_latent: int
    compressor: Compressor | None = None
    norms_queries: bool = True
    rounds: bool = False
    ngrams: NGrams | None = None

    @property
    def attention(self) -> Attending:
        return self

    def check(self) -> None:
        check_head(self.head_dim, self.rotation)
        if self.heads % self.groups:
            raise not_multiple("num_attention_heads", self.heads, "o_groups", self.groups)
        check_window(self.window)
        if self.ngrams is not None:
            self.ngrams.check()
        check_width("num_attention_heads * head_dim", self.heads * self.head_dim)
        check_width("o_groups * o_lora_rank", self.groups * self.group_latent)
        if self.indexer:
            check_width("index_n_heads * index_head_dim", self.indexer.heads * self.indexer.dim)
            check_index_head(self.indexer.dim, self.rotation.dims)

    @property
    def indexer(self) -> Indexer | None:
        """The indexer that chooses entries, or None."""
        return self.compressor.indexer if self.compressor else None

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        index = () if self.indexer is None else (self.indexer.dim,)
        group = self.heads * self.head_dim // self.groups
        grams = (self.ngrams.embedded,) if self.ngrams else ()
        return self.head_dim, self.q_latent, self.rotation.dims, group, self.groups * self.group_latent, *index, *grams

    @property
    def remembered(self) -> int:
        """The newest positions, a token's own among them, that a cache must hold."""
        return max(self.window, self.compressor.remembered if self.compressor else 0)

    @property
    def ratio(self) -> int:
        """Positions of an entry; 0: the layer makes no entries."""
        return self.compressor.ratio if self.compressor and not self.compressor.borrows else 0

    @property
    def seen_ratio(self) -> int:
        """Positions of an entry that the layer attends to, its own or another's; 0: it attends to none."""
        return self.compressor.ratio if self.compressor else 0

    @property
    def has_own_choice(self) -> bool:
        return not (self.compressor and self.compressor.borrows)

    @property
    def handed_on(self) -> int:
        own = self.compressor
        return own.indexer.top if own and own.indexer and (own.shares or own.borrows) else 0

    @property
    def overlap(self) -> int:
        """Positions before an entry's own that it is also made from, unless it is the first."""
        return self.compressor.remembered - self.compressor.ratio if self.compressor and self.ratio else 0

    @property
    def borrowed(self) -> int:
        own = self.compressor
        return own.entry(self.head_dim) if own and own.borrows else 0

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all entries that they see."""
        if self.indexer is None:
            return count
        return min(max((self.indexer.top + 1) * self.seen_ratio - 1 - first, 0), count)

    @property
    def row(self) -> int:
        """Values that a cache holds per position: the key, and the inputs of entries."""
        return self.head_dim + sum(self.compressor.inputs(self.head_dim) if self.compressor else ())

    @property
    def entry(self) -> int:
        """Values of an entry."""
        return self.compressor.entry(self.head_dim) if self.compressor and self.ratio else 0

    def rows_at_once(self, tokens: int, positions: int) -> int:
        """Number of tokens that are processed together."""
        entries = positions // self.compressor.ratio if self.compressor else 0
        least = self.heads * (2 * self.window + entries)
        if self.indexer:
            least = max(self.heads * (2 * self.window + self.indexer.top), self.indexer.top * self.head_dim)
        return min(max(index.INDEX_VALUES // least, 1), self.window, tokens)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once: the cache's new rows, queries, results, and scores of a few tokens."""
        indexer = self.indexer
        of_indexer = indexer.temporaries(tokens, positions) + tokens * indexer.top if indexer else 0
        scores = 3 * index.INDEX_VALUES + of_indexer
        of_grams = (8 * self.ngrams.channels + 2 * self.ngrams.embedded) * tokens if self.ngrams else 0
        return max(2 * self.row * tokens + 4 * self.heads * self.head_dim * tokens + scores, of_grams)

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""
        index = self.indexer.heads if self.indexer else 0
        return self.q_latent + self.row + index + self.groups * self.group_latent

    def own_operations(self, tokens: int) -> float:
        """Those of the queries from their latent, and of the groups' projections."""
        index = self.indexer.heads * self.indexer.dim if self.indexer else 0
        width = self.heads * self.head_dim
        queries = product_operations(tokens, self.q_latent, width + index)
        return queries + product_operations(tokens, width, self.group_latent)

    @property
    def title(self) -> str:
        return "compressed attention"

    def moments(self, longest: int) -> Iterator[tuple[str, int]]:
        """Also that in which the window is full and the next token ends an entry."""
        ratio = self.ratio or 1
        yield "full window", -(-(self.window + 1) // ratio) * ratio - 1
        yield from super().moments(longest)
