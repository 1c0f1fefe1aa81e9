"""Attention to latents, as plain data."""

from dataclasses import dataclass
from typing import Literal

from ...errors import ConfigError
from ...kinds.index import Indexer, KeyBlocks
from ...kinds.limits import WIDEST_WINDOW, check_head, check_index_head, check_width, check_window
from ...kinds.mixer import Attending, Mixer, product_operations
from ...kinds.query_scale import QueryFactor
from ...kinds.rotation import Rotation

ABSORB_AT_MOST = 8  # query rows; beyond, expanding costs fewer multiplications than attending over 512-wide latents
SPAN_VALUES = 1 << 28  # of keys and values of the heads that are attended to at a time


def heads_at_once(heads: int, values: int) -> int:
    """How many heads, each with keys and values of so many values, a GPU attends to at a time if it keeps no scores.
    They are halved, because each number of heads compiles another kernel.
    """
    while heads > 1 and heads * values > SPAN_VALUES:
        heads = (heads + 1) // 2
    return heads


@dataclass(frozen=True)
class Latent(Mixer):
    """Attention over a cached latent of `latent` values and one rotated key of `rotation.dims`, for all heads alike.

    Queries come from a normed latent of `q_latent` values; None: directly from the hidden state. Without a `rotation`
    there is no rotated key. `indexer`, or that of `blocks`, chooses the positions or blocks that a token attends to;
    None: all. `norm_eps`: epsilon of the norms of both latents. `takes_both`: queries come from the normed latent and,
    behind it, the latent itself, and so do gates for each value, whose sigmoid multiplies the value. `gate`: a
    projection (`g_proj`) makes a gate for each value ("sigmoid") or for each head ("sigmoid head"), whose sigmoid
    multiplies the value or the head's result. `key_norm`: whether the rotated key is normed before it is rotated.
    `window`: how many of the newest positions a query sees, itself included; None: all.
    `sinks`: whether each head has a learned logit in the softmax's denominator. `query_gain`, `latent_gain`: factors of
    the queries, and of the normed latent of keys and values. `grows`: the queries of each head, and those of the
    indexer, are multiplied by a learned scale times log(position + 1), plus a learned bias. `shares`: later layers use
    its latents and rotated keys too; `borrows`: it has none, and keeps a copy of those of the last layer that shares
    them and is rotated like itself, or not.
    """

    heads: int
    q_latent: int | None
    latent: int
    nope: int
    value: int
    rotation: Rotation | None
    query_scale: QueryFactor | None = None
    indexer: Indexer | None = None
    blocks: KeyBlocks | None = None
    norm_eps: float = 1e-6
    gate: Literal["sigmoid", "sigmoid head"] | None = None
    takes_both: bool = False
    key_norm: bool = False
    window: int | None = None
    sinks: bool = False
    query_gain: float = 1.0
    latent_gain: float = 1.0
    grows: bool = False
    shares: bool = False
    borrows: bool = False

    @property
    def attention(self) -> Attending:
        return self

    @property
    def has_own_choice(self) -> bool:
        return self.indexer is None or not self.indexer.reuses

    def check(self) -> None:
        check_head(self.head_dim, self.rotation)
        check_width("num_attention_heads * head_dim", self.heads * self.head_dim)
        check_width("num_attention_heads * (qk_nope_head_dim + v_head_dim)", self.heads * (self.nope + self.value))
        if self.takes_both and self.q_latent:
            check_width("2 * q_lora_rank", 2 * self.q_latent)
        check_width("kv_lora_rank + qk_rope_head_dim", self.latent + self.rotated)
        if self.window is not None:
            check_window(self.window)
        if self.scorer is not None:
            self._check_indexer(self.scorer)
        if self.blocks is not None and self.blocks.ratio > WIDEST_WINDOW:
            raise ConfigError(f"index_kpool is {self.blocks.ratio}; expected positions from 1 to {WIDEST_WINDOW}")

    def _check_indexer(self, indexer: Indexer) -> None:
        if self.q_latent is None and not indexer.from_input:
            raise ConfigError("q_lora_rank is missing, of which the indexer makes its queries")
        check_index_head(indexer.dim, self.rotated)
        check_width("index_n_heads * index_head_dim", indexer.heads * indexer.dim)

    @property
    def rule(self) -> Indexer | KeyBlocks | None:
        """What chooses the positions or blocks that a token attends to; None: it attends to all."""
        return self.blocks or self.indexer

    @property
    def scorer(self) -> Indexer | None:
        """The indexer by whose scores they are chosen, or None."""
        return self.blocks.indexer if self.blocks else self.indexer

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
        keys = () if self.scorer is None else (self.scorer.dim,)
        return (*queries, *keys, self.latent, self.nope, self.rotated, self.value)

    def seeing_all(self, first: int, count: int) -> int:
        """How many of the tokens from a place on attend to all positions that they see."""
        return self.rule.seeing_all(first, count) if self.rule else count

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once, without scores: the latents expanded to keys and values of every head,
        queries, results. With an indexer, latents are expanded only for the first tokens, which attend to all
        positions.
        """
        chooses = self.seeing_all(0, positions) < positions
        chosen = self.rule.temporaries(tokens, positions) if self.rule and chooses else 0
        expanded = self.heads * self._expanded(tokens, positions) * (self.head_dim + self.value)
        gates = self.heads * self.value if self.takes_both else 0
        return expanded + tokens * (3 * self.heads * self.head_dim + 2 * gates) + chosen

    def scores(self, tokens: int, positions: int) -> int:
        """Two sums of scores of all heads."""
        return 2 * self.heads * tokens * self._expanded(tokens, positions)

    @property
    def span_heads(self) -> tuple[int, int, int] | None:
        return None if self.window or self.sinks or self.rule else (self.heads, self.head_dim, self.value)

    def fused_temporaries(self, tokens: int, positions: int) -> int:
        """Keys and values of some heads at a time, keys without their rotated part too, and their queries. A few tokens
        keep scores over the latents.
        """
        some = heads_at_once(self.heads, positions * (self.head_dim + self.value))
        expanded = some * positions * (self.head_dim + self.nope + self.value)
        scores = 2 * self.scores(ABSORB_AT_MOST, positions)
        return self.temporaries(tokens, 0) + tokens * self.heads * self.head_dim + max(expanded, scores)

    def attends_at_once(self, positions: int) -> bool:
        return heads_at_once(self.heads, positions * (self.head_dim + self.value)) == self.heads

    @property
    def gates(self) -> int:
        """The gates of a token."""
        return {None: 0, "sigmoid": self.heads * self.value, "sigmoid head": self.heads}[self.gate]

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it, without those of the blocks' indexer."""
        queries = self.heads * self.head_dim if self.q_latent is None else self.q_latent
        index = self.indexer.dim + self.indexer.heads if self.indexer else 0
        if self.indexer and self.indexer.from_input:
            index += self.indexer.heads * self.indexer.dim
        latents = 0 if self.borrows else self.latent + self.rotated
        return queries + index + self.gates + latents + self.heads * self.value

    def own_operations(self, tokens: int) -> float:
        """Those of the queries from their latent."""
        index = self.indexer.heads * self.indexer.dim if self.indexer else 0
        gates = self.heads * (2 * self.value + self.head_dim) if self.takes_both else 0
        return product_operations(tokens, self.q_latent or 0, self.heads * self.head_dim + gates + index)

    def attended(self, tokens: int, positions: int) -> float:
        """Those of scores, and of sums weighed by them; `scores` counts two sums. A token alone attends to latents."""
        width = 2 * self.latent + self.rotated if tokens == 1 else self.head_dim + self.value
        return self.scores(tokens, positions) * width / 2

    @property
    def handed_on(self) -> int:
        """The positions that an indexer chooses, also one that reuses a choice; a choice of blocks is not reused."""
        return self.indexer.top if self.indexer else 0

    @property
    def borrowed(self) -> int:
        return self.latent + self.rotated if self.borrows else 0

    @property
    def lent(self) -> int:
        return self.latent + self.rotated if self.shares else 0

    @property
    def title(self) -> str:
        return "latent attention"

    def _expanded(self, tokens: int, positions: int) -> int:
        """Positions over which many tokens attend together."""
        if self.window:
            return min(positions, tokens + self.window)
        if self.blocks:
            return min(positions, self.blocks.most)
        return min(positions, self.indexer.top) if self.indexer else positions
