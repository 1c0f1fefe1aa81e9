"""A layer: its mixer and its feed-forward part, over a few tokens, the rows of a step, or a span."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..caches.layer_cache import LayerCache
from ..caches.stand_in import Traced
from ..experts.routing import AtOnce, FromTables, Pieces, RoutedExpertsCall, as_share
from ..experts.source import ExpertLoader
from ..experts.values import ValuesOf
from ..kinds import BlockSums, Experts
from ..layers import BranchConvolution, Caches, MixerModule, OutputNorm, norm_of
from ..mixers.registry import module_of
from ..ops import backend
from ..ops.backend import AnyArray, Array
from ..ops.rows import AnyCache, StepRows, begin_row
from ..ops.seen import Chosen
from ..spec import ModelArgs
from .compiled import DecodeStep, by_case
from .feed_forward import MoEBetweenStreams, feed_forward_of
from .moe import BeforeExperts, MoE
from .ngrams import NGramLayer
from .residual import (
    ConvolvedStream,
    NormedApart,
    NormedStream,
    OneStream,
    ResidualWay,
    SeveralStreams,
    ToldStreams,
    WeighedParts,
    WeighedStream,
)
from .span import MIXER_SHARE, Span
from .streams import MessageGates, MessageQueries, connection
from .tokens import Tokens


class MixedRows(NamedTuple):
    """What `DecoderLayer.mix_span` gives for `finish_rows`.

    Attributes:
        arrays: [B, N, .], one row of each for a token; some are [N, .] of a single text.
        kept: how many of them, the first ones, the residual keeps for its last sum.
        behind: of each text whose rows these are, one after another, what convolves the feed-forward part's output:
            the cache, its number in the layer, and the span; empty if nothing does.
    """

    arrays: list[AnyArray]
    kept: int
    behind: tuple[tuple[AnyCache, int, Span], ...] = ()


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward part, each with a norm before it, in the layer's `residual`. With one stream:
    h = x + mixer(norm(x)); out = h + mlp(norm(h)).
    """

    residual: ResidualWay

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, forms: frozenset[str]):
        super().__init__()
        spec, sizes = args.layers[layer], (args.hidden_size, args.rms_norm_eps)
        self._mixer_name = spec.mixer.module_name
        setattr(self, self._mixer_name, module_of(spec.mixer, *sizes, forms))
        self._values: ValuesOf | None = None
        if experts is not None and spec.mixer.experts is not None:
            self._values = ValuesOf(experts.source, args.matrix_set(layer))
            self.mixer.set_experts(self._values)
        self.mlp = feed_forward_of(args, layer, experts)
        connections = spec.residual.connections
        if spec.residual.convolved:
            assert spec.mixer.branches is not None, "a layer's mixer says how outputs are convolved"
            self.attn_sconv, self.mlp_sconv = (BranchConvolution(spec.mixer.branches) for _ in range(2))
        if connections is None or not connections.has_own_norm:
            before, behind = (spec.residual.eps(args.rms_norm_eps, 2 * layer + parts) for parts in (1, 2))
            if spec.mixer.inputs == 1:
                self.input_layernorm = norm_of(spec.residual, args.hidden_size, before, spec.residual.gate_rank)
            if spec.feed_forward is not None and not spec.residual.parallel:
                rank = spec.residual.gate_rank if isinstance(spec.feed_forward, Experts) else 0
                self.post_attention_layernorm = norm_of(spec.residual, args.hidden_size, behind, rank)
        if connections is not None:
            self.attn_hc, self.ffn_hc = (connection(connections, *sizes, layer, n) for n in (spec.mixer.inputs, 0))
            if spec.passes > 1:
                assert isinstance(connections, BlockSums) and connections.messages is not None, "passes have messages"
                self.controllers = MessageGates(args.hidden_size, connections.messages.rank, args.rms_norm_eps)
            around = self.get("input_layernorm"), self.attn_hc, self.ffn_hc, self.get("attn_sconv")
            self.residual = SeveralStreams(self.mixer, *around)
        elif spec.residual.output_norms:
            self.mixer_output = OutputNorm(*sizes)
            self.residual = NormedStream(self.mixer, self.input_layernorm, self.mixer_output)
        elif spec.residual.convolved:
            self.residual = ConvolvedStream(self.mixer, self.input_layernorm, self.attn_sconv)
        elif spec.residual.weighed is not None:
            sums = [WeighedParts(args.hidden_size, spec.residual.weighed, has_scale) for has_scale in (False, True)]
            self.mixer_sum, self.output_sum = sums
            norms = self.input_layernorm, self.post_attention_layernorm
            self.residual = WeighedStream(self.mixer, *norms, self.mixer_sum, self.output_sum)
        elif spec.residual.norms_apart:
            self.residual = NormedApart(self.mixer, self.input_layernorm, self.get("post_attention_layernorm"))
        else:
            self.residual = OneStream(self.mixer, self.input_layernorm)
        if spec.mixer.ngrams is not None:
            self.ple = NGramLayer(spec.mixer.ngrams, *sizes, layer)
        self._reads_tokens = self.mlp.reads_tokens or spec.mixer.ngrams is not None
        self._step: Callable[[bool, tuple[bool, ...]], DecodeStep] | None = None

    def again(self, layer: int, queries: MessageQueries) -> "DecoderLayer":
        """The layer with this number in a pass after the first: with the same parts, also its experts."""
        rule, visit = queries.rule, copy(self)
        assert isinstance(self.residual, SeveralStreams) and rule.messages is not None
        told, is_last = rule.told * queries.query.shape[1], layer + 1 == rule.messages.end
        visit.residual = ToldStreams(self.residual, partial(queries.messages, layer), self.controllers, told, is_last)
        return visit

    def compile(self, experts: ExpertLoader) -> None:
        """Compiles the part before the experts of a single token into one graph, which is kept until `experts`
        close. Without it, if the mixer waits for its own experts.
        """
        if isinstance(self.mlp, MoE) and (self._values is None or self._values.may_be_traced):
            self._step = by_case(self._choose, experts)

    def __call__(
        self, h: AnyArray, caches: Caches, chosen: Chosen | None = None, tokens: Tokens | None = None
    ) -> AnyArray:
        """`caches`: as of `MixerModule.mix`. `chosen`: the choice of the last layer with an indexer for these tokens;
        None before the first layer. `tokens`: may be None for a layer that reads none.
        """
        chosen = chosen or Chosen()
        caches, behind = self._parted(caches)
        if not self.residual.takes_rows and isinstance(caches[0], StepRows):
            return self._of_rows(h, caches, chosen, tokens, behind)
        if self._step is not None and DecodeStep.takes(h, [caches]):
            arrays = [one for one in chosen.handed if one is not None]
            step = self._step(self.mlp.should_predict(1), tuple(one is not None for one in chosen.handed))
            if tokens is not None and self._reads_tokens:
                arrays += tokens.arrays(self._tables)
            handed, kept, *parts = step(h, [caches], *arrays)
            chosen.take(handed)
            return self._added(self.mlp.run_experts(BeforeExperts(*parts)), kept, behind)
        x, *kept = self._mixed(h, caches, chosen, tokens)
        out = self.mlp.forward(x, self._second_norm, self._ids(x, tokens), *self._stream(kept))
        return self._added(out, kept, behind)

    def _parted(self, caches: Caches) -> tuple[Caches, AnyCache | None]:
        """The caches of what comes before the feed-forward part, and that of the convolution of its output."""
        return (caches[:-1], caches[-1]) if "mlp_sconv" in self else (caches, None)

    def _added(self, out: Array, kept: Sequence[Array], behind: AnyCache | None) -> Array:
        """The streams behind the layer."""
        out = out if behind is None else self.mlp_sconv(out, behind)
        return self.residual.added(out, *kept)

    def _choose(
        self, predict: bool, given: tuple[bool, ...], h: mx.array, caches: Sequence[Traced], *arrays: mx.array
    ) -> list[AnyArray]:
        """The function that is compiled. `given`: which parts of what earlier layers hand on (`Chosen.handed`) come
        first among `arrays`; the others are those of the tokens, if it reads them.
        """
        left, chosen = iter(arrays), Chosen()
        chosen.take([next(left) if is_given else None for is_given in given])
        of_tokens = list(left)
        tokens = Tokens.of(self._tables, *of_tokens) if of_tokens else None
        kept, before = self.choose(h, caches, chosen, predict, tokens)
        return [chosen.handed, kept, *before]

    def choose(
        self,
        h: mx.array,
        caches: Sequence[Traced],
        chosen: Chosen,
        predict: bool = False,
        tokens: Tokens | None = None,
    ) -> tuple[list[AnyArray], BeforeExperts]:
        """All before the experts, for a traced token: what `residual.added` takes besides, and what they take."""
        x, *kept = self._mixed(h, caches, chosen, tokens)
        return kept, self.mlp.choose(x, self._second_norm, predict, self._ids(x, tokens), *self._stream(kept))

    def _stream(self, kept: Sequence[Array]) -> Sequence[Array]:
        """The stream by which the next layer's choice is predicted, if the experts' input is normed before them."""
        return kept[:1] if isinstance(self.mlp, MoE) and isinstance(self.residual, NormedApart) else ()

    def finish(self, x: mx.array, kept: Sequence[mx.array], ids: np.ndarray) -> mx.array:
        """The output for a token of a layer that `may_be_queued`, from the input of its feed-forward part, what the
        residual keeps, and the ids that it has chosen, for which the host does not wait again.
        """
        before = self.mlp.choose(x, self._second_norm, False)
        return self.residual.added(self.mlp.run_experts(before._replace(ids=ids, host_copy=())), *kept)

    @property
    def may_be_queued(self) -> bool:
        """Whether it may be queued ahead of its choice (`optimistic`): its experts are this process's, and behind their
        kernels there is at most an addition, so that no bit depends on which layers share a graph.
        """
        is_plain = type(self.mlp) in (MoE, MoEBetweenStreams) and type(self.residual) in (OneStream, NormedApart)
        if not is_plain or self._reads_tokens or self._values:
            return False
        experts = self.mlp.experts
        return isinstance(experts, FromTables) and experts.reads_tables(self.mlp.layer, self.mlp.rule.top_k)

    def is_lazy(self, dtype: mx.Dtype, tokens: int) -> bool:
        """Whether the host needs no value of a span of so many tokens, with activations of `dtype`, in this layer."""
        if self._reads_tokens or self._values is not None:
            return False
        if not isinstance(self.mlp, MoE):
            return True
        experts = self.mlp.experts
        return isinstance(experts, AtOnce) and experts.are_at_once(self.mlp.layer, dtype, tokens * self.mlp.rule.top_k)

    def _of_rows(
        self, h: Array, caches: Sequence[StepRows], chosen: Chosen, tokens: Tokens | None, behind: StepRows | None
    ) -> Array:
        """Computes each row of a step as if it were alone; the rows meet in the experts alone."""
        rows = []
        for i in range(h.shape[1]):
            own = tokens.at(i, i + 1) if tokens is not None and self._reads_tokens else None
            rows.append(self._mixed(h[:, i : i + 1], begin_row(caches, i), chosen.of_row(i), own))
        library = backend.library_of(h)
        x = library.concatenate([x for x, *_ in rows], axis=1)
        out = self.mlp.forward(x, self._second_norm, self._ids(x, tokens))
        out = out if behind is None else self.mlp_sconv(out, behind)
        made = [self.residual.added(out[:, i : i + 1], *kept) for i, (_, *kept) in enumerate(rows)]
        return library.concatenate(made, axis=1)

    def _mixed(self, h: Array, caches: Caches, chosen: Chosen, tokens: Tokens | None) -> tuple[Array, ...]:
        """The feed-forward part's input, and what `ResidualWay.added` takes with its output."""
        return self.residual.mixed(self.ple(h, tokens, caches[-1]) if "ple" in self else h, caches, chosen)

    def _ids(self, x: Array, tokens: Tokens | None) -> AnyArray:
        """The ids as an array of x's kind, if the layer reads them."""
        if tokens is None or not self._reads_tokens:
            return None
        return backend.of_kind(tokens.ids, x)

    @property
    def _tables(self) -> list[int]:
        """The layers whose tables it reads."""
        return [self.ple.layer] if "ple" in self else []

    @property
    def _second_norm(self) -> Any:
        """The norm that the feed-forward part takes along, or None."""
        return None if isinstance(self.residual, NormedApart) else self.get("post_attention_layernorm")

    @property
    def mixer(self) -> MixerModule:
        return self[self._mixer_name]

    def pass_span(self, h: Array, caches: Sequence[LayerCache], span: Span) -> Pieces[AnyArray]:
        """The layer over a span: its mixer block by block, its experts over all rows."""
        rows = yield from as_share(self.mix_span(h, caches, span), 0, MIXER_SHARE)
        return (yield from as_share(self.finish_rows(rows), MIXER_SHARE, 1 - MIXER_SHARE))

    def mix_span(self, h: Array, caches: Sequence[LayerCache], span: Span) -> Pieces[MixedRows]:
        """The mixer over a span, block by block, and all that each token's feed-forward part needs before the experts.

        At most two blocks are in flight, or the layer before and one block, so that only their temporaries are in
        memory; those of the last block of several are gone before the experts begin.
        """
        parts: list[tuple[Any, ...]] = []
        kept: list[AnyArray] = []
        for cache in caches:
            cache.expect(span.length)
        caches, last = self._parted(caches)
        behind = () if last is None else ((last, len(caches), span),)
        for start, end in span.blocks(caches):
            tokens = span.inputs.at(start, end) if span.inputs is not None and self._reads_tokens else None
            self._relieve()
            own = h if end - start == span.length else backend.contiguous(h[:, start:end])
            x, *kept = self._mixed(own, caches, span.chosen[start], tokens)
            self._relieve()
            # Up to where rows meet.
            prepared: tuple[Array, ...] = self.mlp.prepare(x, self._second_norm, self._ids(x, tokens))
            part = *kept, *prepared
            backend.start(*part, *(array for cache in caches for array in cache.state[:-1]))
            span.passed(end, caches)
            if end - start < span.length:
                backend.finish(parts[-1][0] if parts else h)
            parts.append(part)
            yield start / span.length
        is_cut, joined = len(parts) > 1, backend.join(parts, axis=-2)
        if is_cut:
            backend.finish(joined[-1])
        return MixedRows(joined, len(kept), behind)

    def finish_rows(self, rows: MixedRows) -> Pieces[AnyArray]:
        """The layer's output [B, N, .] for the rows of a span, or of several joined: the experts over all of them."""
        kept, prepared = rows.arrays[: rows.kept], rows.arrays[rows.kept :]
        out = yield from self.mlp.finish_span(prepared)
        return self.residual.added(self._convolved(out, rows) if rows.behind else out, *kept)

    def _convolved(self, out: Array, rows: MixedRows) -> Array:
        """The feed-forward part's output [B, N, D] for `rows`, convolved text by text."""
        parts, at = list[Array](), 0
        for cache, number, span in rows.behind:
            for start, end in span.blocks([cache]):
                own = backend.contiguous(out[:, at + start : at + end])
                parts.append(self.mlp_sconv(own, cache))
                span.passed(end, [cache], number)
            at += span.length
        return parts[0] if len(parts) == 1 else backend.library_of(out).concatenate(parts, axis=1)

    def _relieve(self) -> None:
        """Returns memory of experts that the machine is short of before more is taken."""
        if isinstance(self.mlp, MoE) and self.mlp.experts is not None:
            self.mlp.experts.source.relieve()
