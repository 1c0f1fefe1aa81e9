"""Mixers that attend to earlier positions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ConfigError
from . import chosen
from .chosen import HeadBlocks, Indexer, KeyBlocks
from .limits import WIDEST_HEAD, WIDEST_WINDOW, check_head, check_index_head, check_width, check_window, not_multiple
from .mixer import Attending, Mflx, Mixer, product
from .rotation import Rotation


@dataclass(frozen=True)
class GroupedQuery(Mixer):
    """Attention with `heads` queries over `kv_heads` keys and values.

    Attributes:
        rotation: of queries and keys; None: positions are not encoded.
        norm: RMS norm of queries and keys: of each "head" (weight [head_dim]), of all heads at once ("flat", weight
            [heads * head_dim]), or none.
        bias, output_bias: whether the projections to q, k and v, and the one from the heads, add a bias.
        gate: "joined": the query projection holds, for each head, the query and then a gate whose sigmoid multiplies
            the head's output. "sigmoid head", "softplus head": one gate per head, from a separate projection
            (`g_proj`), whose sigmoid or softplus multiplies the head's output.
        window: how many of the newest positions a query sees, itself included; None: all.
        sinks: whether each head has a learned logit in the softmax's denominator.
        value_dim: width of a value head; None: head_dim.
        scale: of the scores; None: head_dim ** -0.5.
        value_scale: factor of the values, and so of attention's output.
        value_is_key: whether keys, before norm and rotation, serve as values.
        value_norm: whether the values of each head are normed, without a weight.
        blocks: blocks of positions, of which a token attends to some; None: it attends to all positions that it sees.
        kv_bits: bits to which a cache rounds keys and values, 8; None: unchanged. It is not a field of config.json but
            chosen when a model is loaded.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    norm: Literal["head", "flat"] | None = "head"
    bias: bool = False
    output_bias: bool = False
    gate: Literal["joined", "sigmoid head", "softplus head"] | None = None
    window: int | None = None
    sinks: bool = False
    value_dim: int | None = None
    scale: float | None = None
    value_scale: float = 1.0
    value_is_key: bool = False
    value_norm: bool = False
    blocks: KeyBlocks | HeadBlocks | None = None
    kv_bits: Literal[8] | None = None

    @property
    def attention(self) -> Attending:
        return self

    @property
    def rounds_keys(self) -> bool:
        return self.blocks is None

    def with_kv_bits(self, kv_bits: Literal[8] | None) -> "GroupedQuery":
        return replace(self, kv_bits=kv_bits) if self.rounds_keys else self

    @property
    def mflx(self) -> Mflx | None:
        is_plain = self.window is None and self.value_width == self.head_dim and self.blocks is None
        return Mflx() if is_plain else None

    @property
    def flat_fields(self) -> dict[str, Any]:
        turning = self.rotation.flat_fields if self.rotation else {}
        share = self.rotation.dims / self.head_dim if self.rotation else 0.0
        return {**turning, "partial_rotary_factor": share, "attn_output_gate": self.gate == "joined"}

    def check(self) -> None:
        if self.heads % self.kv_heads:
            raise not_multiple("num_attention_heads", self.heads, "num_key_value_heads", self.kv_heads)
        check_head(self.head_dim, self.rotation)
        if self.gate == "joined" and self.value_width != self.head_dim:
            raise ConfigError(f"v_head_dim {self.value_width} is not head_dim {self.head_dim}, as the gate wants")
        joined = 2 if self.gate == "joined" else 1
        check_width("num_attention_heads * head_dim", self.heads * self.head_dim * joined)
        check_width("num_attention_heads * v_head_dim", self.heads * self.value_width)
        if self.window is not None:
            check_window(self.window)
        if self.blocks is not None:
            self._check_blocks(self.blocks)

    def _check_blocks(self, blocks: KeyBlocks | HeadBlocks) -> None:
        if isinstance(blocks, HeadBlocks) and blocks.indexer.heads != self.kv_heads:
            heads = f"index_n_heads {blocks.indexer.heads} is not num_key_value_heads {self.kv_heads}"
            raise ConfigError(f"{heads}, which is not implemented")
        dims = self.rotation.dims if self.rotation else 1
        if not dims <= blocks.indexer.dim <= WIDEST_HEAD:
            raise ConfigError(
                f"the indexer's head_dim is {blocks.indexer.dim}; expected an integer from {dims} to {WIDEST_HEAD}"
            )
        if blocks.ratio > WIDEST_WINDOW:
            raise ConfigError(f"indexer_compress_ratio is {blocks.ratio}; expected positions from 1 to {WIDEST_WINDOW}")
        check_width("(indexer_n_heads + 1) * indexer_head_dim", (blocks.indexer.heads + 1) * blocks.indexer.dim)

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        flat = (self.heads * self.head_dim, self.kv_heads * self.head_dim) if self.norm == "flat" else ()
        keys = (self.blocks.indexer.dim,) if self.blocks else ()
        return (self.head_dim, self.value_width, *flat, *keys)

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        return self.blocks.seeing_all(first, count) if self.blocks else count

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once while `tokens` attend over `positions`, without scores: queries, gates,
        results, and keys and values that are not in a cache because they have left the window.
        """
        seen = self.kv_heads * (self.head_dim + self.value_width) * (tokens + self.window) if self.window else 0
        chooses = self.seeing_all(0, positions) < positions
        chosen = self.blocks.temporaries(tokens, positions) if self.blocks and chooses else 0
        return 4 * self.heads * max(self.head_dim, self.value_width) * tokens + seen + chosen

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads."""
        if self.blocks:
            return self.heads * tokens * min(positions, self.blocks.most)
        return self.heads * tokens * (min(positions, tokens + self.window) if self.window else positions)

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it, without an indexer's."""
        queries = self.head_dim * (1 + (self.gate == "joined")) + self.value_width
        gates = self.gate not in (None, "joined")
        return self.heads * (queries + gates) + self.kv_heads * (self.head_dim + self.value_width)

    def attended(self, tokens: int) -> float:
        """Those of scores, and of sums weighed by them."""
        return self.scores(tokens, tokens) * (self.head_dim + self.value_width)

    @property
    def title(self) -> str:
        return "attention"


@dataclass(frozen=True)
class QueryScale:
    """The factor of a query at position p: 1 + beta * ln(1 + floor(p / original_max_position_embeddings)).

    Llama 4 has it (transformers, `Llama4TextAttention`), and others with longer contexts than they were trained on.
    """

    beta: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Latent(Mixer):
    """Attention over a cached latent of `latent` values and one rotated key of `rotation.dims`, for all heads alike.

    Queries come from a normed latent of `q_latent` values; None: directly from the hidden state. Without a `rotation`
    there is no rotated key. `indexer`, or that of `blocks`, chooses the positions or blocks that a token attends to;
    None: all. `norm_eps`: epsilon of the norms of both latents.
    """

    heads: int
    q_latent: int | None
    latent: int
    nope: int
    value: int
    rotation: Rotation | None
    query_scale: QueryScale | None = None
    indexer: Indexer | None = None
    blocks: KeyBlocks | None = None
    norm_eps: float = 1e-6

    @property
    def attention(self) -> Attending:
        return self

    @property
    def has_own_choice(self) -> bool:
        return self.indexer is None or not self.indexer.reuses

    @property
    def mflx(self) -> Mflx | None:
        if self.indexer is not None or self.blocks is not None:
            return None
        return Mflx(latent=self.latent, rotated=self.rotated)

    @property
    def flat_fields(self) -> dict[str, Any]:
        return {
            **(self.rotation.flat_fields if self.rotation else {}),
            "q_lora_rank": self.q_latent,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rotated,
            "v_head_dim": self.value,
        }

    def check(self) -> None:
        check_head(self.head_dim, self.rotation)
        check_width("num_attention_heads * head_dim", self.heads * self.head_dim)
        check_width("num_attention_heads * (qk_nope_head_dim + v_head_dim)", self.heads * (self.nope + self.value))
        check_width("kv_lora_rank + qk_rope_head_dim", self.latent + self.rotated)
        indexer = self.blocks.indexer if self.blocks else self.indexer
        if indexer is not None:
            self._check_indexer(indexer)
        if self.blocks is not None and self.blocks.ratio > WIDEST_WINDOW:
            raise ConfigError(f"index_kpool is {self.blocks.ratio}; expected positions from 1 to {WIDEST_WINDOW}")

    def _check_indexer(self, indexer: Indexer) -> None:
        if self.q_latent is None:
            raise ConfigError("q_lora_rank is missing, of which the indexer makes its queries")
        check_index_head(indexer.dim, self.rotated)
        check_width("index_n_heads * index_head_dim", indexer.heads * indexer.dim)

    @property
    def rotated(self) -> int:
        """Values of the rotated key."""
        return self.rotation.dims if self.rotation else 0

    @property
    def head_dim(self) -> int:
        """Values of a query: those that come from the latent, and the rotated ones."""
        return self.nope + self.rotated

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values once the latent is expanded: as many as there are queries."""
        return self.heads

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        queries = () if self.q_latent is None else (self.q_latent,)
        indexer = self.blocks.indexer if self.blocks else self.indexer
        keys = () if indexer is None else (indexer.dim,)
        return (*queries, *keys, self.latent, self.nope, self.rotated, self.value)

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        rule = self.blocks or self.indexer
        return rule.seeing_all(first, count) if rule else count

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once, without scores: the latents expanded to keys and values of every head,
        queries, results. With an indexer, latents are expanded only for the first tokens, which attend to all
        positions.
        """
        rule = self.blocks or self.indexer
        chooses = self.seeing_all(0, positions) < positions
        chosen = rule.temporaries(tokens, positions) if rule and chooses else 0
        expanded = self.heads * self._expanded(positions) * (self.head_dim + self.value)
        return expanded + 3 * self.heads * tokens * self.head_dim + chosen

    def scores(self, tokens: int, positions: int) -> int:
        """Two sums of scores of all heads."""
        return 2 * self.heads * tokens * self._expanded(positions)

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it, without those of the blocks' indexer."""
        queries = self.heads * self.head_dim if self.q_latent is None else self.q_latent
        index = self.indexer.dim + self.indexer.heads if self.indexer else 0
        return queries + index + self.latent + self.rotated + self.heads * self.value

    def own_operations(self, tokens: int) -> float:
        """Those of the queries from their latent."""
        index = self.indexer.heads * self.indexer.dim if self.indexer else 0
        return product(tokens, self.q_latent or 0, self.heads * self.head_dim + index)

    def attended(self, tokens: int) -> float:
        """Those of scores, and of sums weighed by them; `scores` counts two sums."""
        return self.scores(tokens, tokens) * (self.head_dim + self.value) / 2

    @property
    def handed_on(self) -> int:
        """The positions that an indexer chooses, also one that reuses a choice; a choice of blocks is not reused."""
        return self.indexer.top if self.indexer else 0

    @property
    def title(self) -> str:
        return "latent attention"

    def _expanded(self, positions: int) -> int:
        """Positions over which many tokens attend together."""
        if self.blocks:
            return min(positions, self.blocks.most)
        return min(positions, self.indexer.top) if self.indexer else positions


@dataclass(frozen=True)
class Compressor:
    """Makes one entry from each `ratio` positions: each value is the mean of the positions' values, weighted by a
    softmax of their gates (DeepSeek-V4's model code in transformers). `overlaps`: an entry also uses the `ratio`
    positions before its own, with a second series of values. `indexer` chooses the entries that a token attends to, by
    its own entries, made in the same way; None: all.
    """

    ratio: int
    overlaps: bool = False
    indexer: Indexer | None = None

    @property
    def series(self) -> int:
        return 2 if self.overlaps else 1

    @property
    def remembered(self) -> int:
        """Positions up to a token's own from which an entry may still be made."""
        return self.series * self.ratio

    def inputs(self, width: int) -> tuple[int, ...]:
        """Values per position: values and gates of entries of `width`, and of the indexer's."""
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
    `group_latent` values, and these to the stream.
    """

    heads: int
    head_dim: int
    q_latent: int
    rotation: Rotation
    window: int
    groups: int
    group_latent: int
    compressor: Compressor | None = None

    @property
    def attention(self) -> Attending:
        return self

    def check(self) -> None:
        check_head(self.head_dim, self.rotation)
        if self.heads % self.groups:
            raise not_multiple("num_attention_heads", self.heads, "o_groups", self.groups)
        check_window(self.window)
        check_width("num_attention_heads * head_dim", self.heads * self.head_dim)
        check_width("o_groups * o_lora_rank", self.groups * self.group_latent)
        indexer = self.compressor and self.compressor.indexer
        if indexer:
            check_width("index_n_heads * index_head_dim", indexer.heads * indexer.dim)
            check_index_head(indexer.dim, self.rotation.dims)

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        indexer = self.compressor.indexer if self.compressor else None
        index = () if indexer is None else (indexer.dim,)
        group = self.heads * self.head_dim // self.groups
        return self.head_dim, self.q_latent, self.rotation.dims, group, self.groups * self.group_latent, *index

    @property
    def remembered(self) -> int:
        """The newest positions, a token's own among them, that a cache must hold."""
        return max(self.window, self.compressor.remembered if self.compressor else 0)

    @property
    def ratio(self) -> int:
        """Positions of an entry; 0: there are no entries."""
        return self.compressor.ratio if self.compressor else 0

    @property
    def overlap(self) -> int:
        """Positions before an entry's own that it is also made from, unless it is the first."""
        return self.compressor.remembered - self.compressor.ratio if self.compressor else 0

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all entries that they see."""
        if self.compressor is None or self.compressor.indexer is None:
            return count
        return min(max((self.compressor.indexer.top + 1) * self.ratio - 1 - first, 0), count)

    @property
    def row(self) -> int:
        """Values that a cache holds per position: the key, and the inputs of entries."""
        return self.head_dim + sum(self.compressor.inputs(self.head_dim) if self.compressor else ())

    @property
    def entry(self) -> int:
        """Values of an entry."""
        return self.compressor.entry(self.head_dim) if self.compressor else 0

    def rows_at_once(self, tokens: int, positions: int) -> int:
        """Number of tokens that are processed together."""
        entries = positions // self.compressor.ratio if self.compressor else 0
        least = self.heads * (2 * self.window + entries)
        if self.compressor and self.compressor.indexer:
            indexer = self.compressor.indexer
            least = max(self.heads * (2 * self.window + indexer.top), indexer.top * self.head_dim)
        return min(max(chosen.INDEX_VALUES // least, 1), self.window, tokens)

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once: the cache's new rows, queries, results, and scores of a few tokens."""
        indexer = self.compressor.indexer if self.compressor else None
        of_indexer = indexer.temporaries(tokens, positions) + tokens * indexer.top if indexer else 0
        scores = 3 * chosen.INDEX_VALUES + of_indexer
        return 2 * self.row * tokens + 4 * self.heads * self.head_dim * tokens + scores

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""
        index = self.compressor.indexer.heads if self.compressor and self.compressor.indexer else 0
        return self.q_latent + self.row + index + self.groups * self.group_latent

    def own_operations(self, tokens: int) -> float:
        """Those of the queries from their latent, and of the groups' projections."""
        indexer = self.compressor.indexer if self.compressor else None
        index = indexer.heads * indexer.dim if indexer else 0
        width = self.heads * self.head_dim
        return product(tokens, self.q_latent, width + index) + product(tokens, width, self.group_latent)

    @property
    def title(self) -> str:
        return "compressed attention"

    def moments(self, longest: int) -> Iterator[tuple[str, int]]:
        """Also that in which the window is full and the next token ends an entry."""
        ratio = self.ratio or 1
        yield "full window", -(-(self.window + 1) // ratio) * ratio - 1
        yield from super().moments(longest)
