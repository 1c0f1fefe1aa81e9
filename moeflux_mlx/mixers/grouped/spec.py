"""Attention with grouped heads, as plain data."""

from dataclasses import dataclass, replace
from typing import Literal

from ...errors import ConfigError
from ...kinds.convolution import ShortConvolution
from ...kinds.feed_forward import MatrixExperts, Router
from ...kinds.index import HeadBlocks, KeyBlocks
from ...kinds.limits import WIDEST_HEAD, WIDEST_WINDOW, check_head, check_width, check_window, not_multiple
from ...kinds.mixer import Attending, Mixer
from ...kinds.query_scale import QueryFactor
from ...kinds.rotation import Rotation

VALUE_ROWS = 64  # the CPU's kernels multiply so many rows of a value expert at a time


@dataclass(frozen=True)
class RelativeBias:
    """What is added to a score by the distance of its positions: r . p[distance], where r, `width` values, is made of
    the query's token for each head, and p of learned rows; 0 from a distance of `extent` on (transformers,
    `InklingRelativeLogits`). A factor of the query multiplies it too. `clip`: each head's r, times learned numbers, is
    shortened to this length; None: r is as it is.
    """

    width: int
    extent: int
    clip: float | None = None


@dataclass(frozen=True)
class GroupedQuery(Mixer):
    """Attention with `heads` queries over `kv_heads` keys and values.

    Attributes:
        rotation: of queries and keys; None: positions are not encoded.
        norm: RMS norm of queries and keys: of each "head" (weight [head_dim]), of all heads at once ("flat", weight
            [heads * head_dim]), of each head without a weight ("unit"), none, or "clip".
        clip: of the norm "clip", which shortens a longer head to this length, a query's after a learned factor of each
            value (transformers, `Inkling2L2Clip`).
        rotates_first: whether the norms of each head take rotated queries and keys.
        bias, output_bias: whether the projections to q, k and v, and the one from the heads, add a bias.
        gate: "joined": the query projection holds, for each head, the query and then a gate whose sigmoid multiplies
            the head's output. "sigmoid": the same with gates from a separate projection (`g_proj`), one per value.
            "softplus2": likewise log2(1 + 2^x) of gates x.
            "sigmoid head", "softplus head": one gate per head from there, whose sigmoid or softplus multiplies the
            head's output.
        gate_bias: whether each head has a bias, which is added to each of its gates from a separate projection.
        query_scale: of the queries by their positions; None: they are not scaled.
        window: how many of the newest positions a query sees, itself included; None: all.
        chunked: whether a query sees those positions up to its own whose number divided by `window`, rounded down, is
            the same.
        sinks: whether each head has a learned logit in the softmax's denominator.
        token_sinks: whether a projection makes such logits of each token.
        value_dim: width of a value head; None: head_dim.
        scale: of the scores; None: head_dim ** -0.5.
        value_scale: factor of the values, and so of attention's output.
        value_is_key: whether keys, before norm and rotation, serve as values.
        value_norm: whether the values of each head are normed, without a weight.
        output_norm: whether the result of each head is normed, without a weight, before its gate.
        blocks: blocks of positions, of which a token attends to some; None: it attends to all positions that it sees.
        value_experts: chooses the matrices of a token's values, which are the weighed sum of silu(W x) over them (K2
            Horizon's MoVA); None: one matrix makes them.
        relative: the bias of scores by distance; None: there is none.
        convolution: what keys and values, side by side, pass before their norms; None: nothing.
        branches, inputs: as of all mixers; several inputs are those of queries, of keys and of values.
        parted: whether its layer may give it three inputs instead of one, for all of which it has the same norm.
        kv_bits: bits to which a cache rounds keys and values, 8; None: unchanged. It is not a field of config.json but
            chosen when a model is loaded.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    norm: Literal["head", "flat", "unit", "clip"] | None = "head"
    bias: bool = False
    output_bias: bool = False
    gate: Literal["joined", "sigmoid", "softplus2", "sigmoid head", "softplus head"] | None = None
    window: int | None = None
    sinks: bool = False
    value_dim: int | None = None
    scale: float | None = None
    value_scale: float = 1.0
    value_is_key: bool = False
    value_norm: bool = False
    blocks: KeyBlocks | HeadBlocks | None = None
    kv_bits: Literal[8] | None = None
    gate_bias: bool = False
    query_scale: QueryFactor | None = None
    chunked: bool = False
    rotates_first: bool = False
    value_experts: Router | None = None
    relative: RelativeBias | None = None
    convolution: ShortConvolution | None = None
    branches: ShortConvolution | None = None
    output_norm: bool = False
    inputs: int = 1
    clip: float = 0.0
    token_sinks: bool = False
    parted: bool = False

    @property
    def attention(self) -> Attending:
        return self

    @property
    def rounds_keys(self) -> bool:
        return self.blocks is None

    def with_kv_bits(self, kv_bits: Literal[8] | None) -> "GroupedQuery":
        return replace(self, kv_bits=kv_bits) if self.rounds_keys else self

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
        assert not (self.output_norm and self.gate == "joined"), "no family norms results behind a joined gate"
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.rotates_first:
            turns_whole = self.rotation is None or self.rotation.dims == self.head_dim
            assert self.norm == "head" and self.blocks is None and turns_whole, "no such norms behind a rotation"
        if self.relative is not None:
            assert self.inputs in (1, 3), "queries, keys and values have inputs"
            assert (self.norm == "clip") == (self.relative.clip is not None), "all lengths are limited, or none"
            is_plain = self.rotation is None and self.gate != "joined" and self.blocks is None and not self.chunked
            assert is_plain and not self.sinks and self.norm != "flat", "no such attention with a bias by distance"
            check_width("num_attention_heads * d_rel", self.heads * self.relative.width)
            check_width("rel_extent", self.relative.extent)
        assert self.relative is not None or not (self.token_sinks or self.inputs > 1 or self.norm == "clip")
        if self.convolution is not None:
            check_width("the convolution of keys and values", self.convolution.channels * self.convolution.taps)
        if self.blocks is not None:
            self._check_blocks(self.blocks)

    def _check_experts(self, own: MatrixExperts) -> None:
        if own.router.top_k > own.router.experts:
            chosen = f"mova_num_experts_per_tok is {own.router.top_k}"
            raise ConfigError(f"{chosen}, more than mova_num_experts {own.router.experts}")
        if own.rows % VALUE_ROWS:
            raise ConfigError(f"num_key_value_heads * head_dim {own.rows} is not a multiple of {VALUE_ROWS}")

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
    def gates(self) -> int:
        """The gates of a token that a separate projection makes."""
        if self.gate is None or self.gate == "joined":
            return 0
        return self.heads * (1 if self.gate.endswith(" head") else self.value_width)

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
        convolutions = sum(one.temporaries(tokens) for one in (self.convolution, self.branches) if one is not None)
        of_distances = self.heads * self.relative.extent * tokens if self.relative else 0
        queries = 4 * self.heads * max(self.head_dim, self.value_width) * tokens
        return queries + seen + chosen + convolutions + of_distances

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads, with what is added to them."""
        return self._pairs(tokens, positions) * (6 if self.relative else 1)

    def _pairs(self, tokens: int, positions: int) -> int:
        """How many scores there are."""
        if self.blocks:
            return self.heads * tokens * min(positions, self.blocks.most)
        return self.heads * tokens * (min(positions, tokens + self.window) if self.window else positions)

    @property
    def span_heads(self) -> tuple[int, int, int] | None:
        is_limited = self.window or self.sinks or self.relative or self.blocks
        return None if is_limited else (self.heads, self.head_dim, self.value_width)

    @property
    def attends_natively(self) -> bool:
        return self.relative is None

    @property
    def experts(self) -> MatrixExperts | None:
        return MatrixExperts(self.value_experts, self.kv_heads * self.value_width) if self.value_experts else None

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it, without an indexer's."""
        queries = self.head_dim * (1 + (self.gate == "joined")) + self.value_width
        values = self.value_width * (self.value_experts.top_k if self.value_experts else 1)
        of_heads = queries + (self.relative.width if self.relative else 0) + self.token_sinks
        return self.heads * of_heads + self.gates + self.kv_heads * (self.head_dim + values)

    def attended(self, tokens: int, positions: int) -> float:
        """Those of scores, and of sums weighed by them."""
        return self._pairs(tokens, positions) * (self.head_dim + self.value_width)

    @property
    def title(self) -> str:
        return "attention"
