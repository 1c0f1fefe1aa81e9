"""The decoder: one class for every family, built from `ModelArgs`. mx.array in, mx.array out."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..caches.layer_cache import LayerCache
from ..caches.stand_in import Traced
from ..errors import RequestError
from ..experts.routing import Pieces, RoutedExpertsCall, as_share, finished
from ..experts.source import Passage
from ..kinds import BlockSums, streams_before
from ..layers import Embedding, LastProduct, Linear, norm_of
from ..mixers.registry import USUAL, by_layer, cache_numbers, make_caches
from ..ops import backend, gpu_time, native
from ..ops.backend import AnyArray, Array, EitherArray
from ..ops.limits import within_limits
from ..ops.norm import rms_norm
from ..ops.rows import StepRows
from ..ops.seen import Chosen
from ..ops.streams import spread
from ..ops.tiles import CODE, MAX_TOKENS, Tiles, using
from ..spec import ModelArgs
from .ahead import LayersAhead
from .compiled import DecodeStep
from .drafting import Drafting
from .head import DraftHead, SharedParts
from .images import ImageEncoder
from .layer import DecoderLayer
from .optimistic import OptimisticLayers
from .span import PromptSizes, Span
from .step import SequenceRows, Step, checked_rows
from .streams import MessageQueries, connection
from .tables import Tables
from .tokens import Tokens, check_vocabulary

PIECE_SECONDS = 0.004  # a piece takes at least as long, because a turn of its own takes 0.05 ms


class Decoder(nn.Module):
    """Embedding, layers and final norm: the part that checkpoints call `model`."""

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, forms: frozenset[str]):
        super().__init__()
        eps = args.rms_norm_eps if args.embedding_norm == "learned" else None
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size, eps)
        self.layers: list[Any] = [DecoderLayer(args, i, experts, forms) for i in range(args.num_hidden_layers)]
        connections = args.connections
        if isinstance(connections, BlockSums) and connections.messages is not None:
            self.messages = MessageQueries(connections, args.hidden_size, args.rms_norm_eps)
        self.visits = tuple(self._in_order(args.visits))  # of layers; in a tuple, so that they are not submodules twice
        if connections is None or not connections.has_own_norm:
            self.norm = norm_of(args.layers[-1].residual, args.hidden_size, args.last_norm_eps)
        if connections is not None:
            self.hc_head = connection(connections, args.hidden_size, args.rms_norm_eps, None)
        has_one = connections is None and not args.layers[0].residual.parallel
        for layer, following in pairwise(self.layers[i] for i in args.moe_layers):
            # A table needs the ids. An input says nothing of the next layer's if it is another sum of streams.
            if layer.mlp.reads_tokens if following.mlp.reads_tokens else has_one:
                layer.mlp.set_next(following.mlp, following.post_attention_layernorm)

    def _in_order(self, visits: Sequence[int]) -> Iterator[DecoderLayer]:
        """The layers as a token passes them."""
        passed = set[int]()
        for number in visits:
            layer = self.layers[number]
            yield layer.again(number, self.messages) if number in passed else layer
            passed.add(number)

    def normed(self, h: Array) -> Array:
        """The normed hidden states of one stream after the last layer."""
        h = self.hc_head.last(h) if "hc_head" in self else h
        return self.norm(h) if "norm" in self else h

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the last norm."""
        return (self.norm if "norm" in self else self.hc_head.hc_norm).weight.dtype


class Model(nn.Module):
    """A language model: `model(tokens [B, L], cache) -> logits [B, L, vocab_size]`.

    Args:
        args: the hyper-parameters.
        experts: reads and computes routed experts; None if only the model's shapes are needed.
        forms: other forms of mixers' tensors that the checkpoint has (`stored_forms`).
        sizes: how prompts are cut.
        tiles: the kernels' tiles in all computations of the model.
        cpu_activations: bits to which the native products round activations.
        drafting: the source of drafts, and how many of them a step checks; None: no drafts.
        tables: reads the rows of n-grams; None: there are none, or zeros replace them.

    Attributes:
        args, sizes, tiles, cpu_activations, tables: as given.
        drafting: of all its texts.
        experts: the source of routed experts, an `ExpertLoader`.
        head: its draft head, or None.
        vision: reads and encodes images; None: not set.
    """

    def __init__(
        self,
        args: ModelArgs,
        experts: RoutedExpertsCall | None,
        forms: frozenset[str] = USUAL,
        sizes: PromptSizes = PromptSizes(),  # noqa: B008
        tiles: Tiles = CODE,
        cpu_activations: int = native.EXACT,
        drafting: Drafting | None = None,
        tables: Tables | None = None,
    ):
        super().__init__()
        self.tables = tables
        self.drafting = Drafting() if drafting is None else drafting
        self._tabled = tuple(args.ngrams)  # the layers that have n-grams, in order
        self._cache_numbers = numbers = cache_numbers(args.visited)
        self.args, self.sizes, self.tiles, self.cpu_activations = args, sizes, tiles, cpu_activations
        self.model_type = args.model_type
        self.model = Decoder(args, experts, forms)
        if not args.is_tied:
            self.lm_head = Linear(args.hidden_size, args.vocab_size)
        self.suits_cpu = backend.takes_widths(args.widths)
        self.experts = None if experts is None else experts.source
        self._head: Callable[[], DraftHead | None] = lambda: None  # in a function, so that it is not a submodule
        self.vision: ImageEncoder | None = None
        self.decode_step: DecodeStep | None = None
        self.optimistic: OptimisticLayers | None = None
        self._ahead: LayersAhead | None = None
        if self.experts is not None and self.experts.is_resident:
            self.decode_step = DecodeStep(self._compute_step)
            self._ahead = LayersAhead(self.visits, numbers, args.mixer_counts)
            self.experts.at_close(self.decode_step.forget)
        elif self.experts is not None and backend.has_kernels():
            self.optimistic = OptimisticLayers(self.visits, numbers, self.experts, self.embedded, self.project)

    def __call__(self, tokens: mx.array, cache: list[LayerCache] | None = None) -> mx.array:
        """Runs `tokens` after those that `cache` (from `make_cache`) has absorbed, and updates it.

        Many tokens in one call are one span, for which each expert is read once. Without a cache they stand alone.

        Args:
            tokens: integers [B, L] of the vocabulary. On a GPU a single token is not checked, because that would need a
                wait.

        Raises:
            RequestError: tokens with a wrong shape or outside the vocabulary, or a wrong number of caches.
            ExpertIOError: experts cannot be read, the loader is closed, or this process was forked.
            DeviceError: memory is exhausted or the GPU timed out; the caches' contents are then undefined.
        """
        return self._in_turn(self._compute, tokens, cache)[0]

    @property
    def head(self) -> DraftHead | None:
        return self._head()

    def attach(self, head: DraftHead) -> None:
        """Attaches a draft head, for which steps then keep hidden states, before anything is computed. The model's
        experts close the head's.
        """
        assert self.experts is not None
        head.bind(SharedParts(self._embed, self._compute_logits, self._computing))
        self._head = lambda: head
        self.experts.at_close(head.close)

    def hidden(self, tokens: mx.array, cache: list[LayerCache] | None = None) -> mx.array:
        """As calling the model, but returns the normed hidden states [B, L, hidden_size] that `last_product` takes."""
        return self._in_turn(lambda tokens, cache: [self.run(tokens, cache)], tokens, cache)[0]

    def step(self, sequences: Sequence[SequenceRows]) -> Step:
        """Runs the next tokens of several sequences, at most `MAX_ROWS` in all, and returns the logits of each.

        Each row has the bits that it has alone, and each expert is requested once. If the step fails, all caches are
        unchanged.

        Args:
            sequences: each has its own caches, which may be empty, and 1 to `MAX_OF_SEQUENCE` tokens in order.

        Raises:
            RequestError: no rows, too many, a cache in two sequences, or what calling the model refuses.
            ExpertIOError, DeviceError: as calling the model does.
        """
        for rows in sequences:
            self.check_cache(rows.cache)
        step = Step(checked_rows(sequences, self.args.vocab_size, believed=backend.has_kernels()))
        tokens = step.tokens
        try:
            if tokens.size == 1:
                logits, *hidden = self._in_turn(self._compute, tokens, step.sequences[0].cache)
                step.logits, step.hidden = logits[:, -1], hidden[0] if hidden else None
            else:
                step.logits, step.hidden = self._of_rows(tokens, step)
        except BaseException:
            step.undo()
            raise
        if self.experts is not None and self.experts.counts_rows:
            step.asked = self.experts.asked_by_row()
        return step

    def _of_rows(self, tokens: mx.array, step: Step) -> tuple[mx.array, mx.array | None]:
        """Logits [R, vocab_size] of the tokens [1, R] of a step, and for a head hidden states [1, R, hidden_size]."""
        with self._turn(tokens.size) as shared:
            logits, *hidden = map(backend.leave, self._compute_rows(tokens, step))
            if shared:
                mx.eval(logits, hidden, [layer.state for rows in step.sequences for layer in rows.cache])
        return logits[0], hidden[0] if hidden else None

    def check_process(self) -> None:
        """Raises ExpertIOError: this process was forked from the one that loaded the model."""
        if self.experts is not None:
            self.experts.check_process()

    def _in_turn(
        self,
        compute: Callable[[mx.array, list[LayerCache]], list[Any]],
        tokens: mx.array,
        cache: list[LayerCache] | None,
    ) -> list[mx.array]:
        cache = self.make_cache() if cache is None else cache
        with self._turn(getattr(tokens, "size", 0)) as shared:  # `_check` may still refuse them
            self._check(tokens, cache)
            out = [backend.leave(one) for one in compute(tokens, cache)]
            if shared:
                mx.eval(out, [layer.state for layer in cache])
        return out

    @contextmanager
    def _turn(self, tokens: int, passage: Passage | None = None) -> Iterator[bool]:
        """Admits one thread at a time if threads share the memory of experts; yields whether results must be evaluated.
        `passage`: of the span, if it is computed in pieces.
        """
        turn = nullcontext(False) if self.experts is None else self.experts.turn(tokens, passage)
        with within_limits(), turn as shared, self._computing():
            yield shared

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """The settings of kernels for any computation of this model."""
        with native.activations(self.cpu_activations), using(self.tiles):
            yield

    def _check(self, tokens: mx.array, cache: list[LayerCache]) -> None:
        if not isinstance(tokens, mx.array) or tokens.ndim != 2 or not mx.issubdtype(tokens.dtype, mx.integer):
            form = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, mx.array) else type(tokens).__name__
            raise RequestError(f"tokens are {form}; give an mx.array of integers [B, L]")
        if tokens.size == 0:
            raise RequestError(f"tokens are {tokens.shape}; give at least one")
        self.check_cache(cache)
        if tokens.size > 1 or not backend.has_kernels():
            check_vocabulary(cast(Any, tokens.item()) if tokens.size == 1 else np.array(tokens), self.args.vocab_size)

    def check_cache(self, cache: object) -> None:
        """Raises RequestError: it is not a list with the caches of all layers."""
        if isinstance(cache, Sequence) and len(cache) == sum(map(len, self._cache_numbers)):
            return
        form = f"{len(cache)} caches" if isinstance(cache, Sequence) else f"a cache of type {type(cache).__name__}"
        raise RequestError(f"{form} for {len(self.layers)} layers; use model.make_cache()")

    def _compute(self, tokens: mx.array, cache: list[LayerCache]) -> list[AnyArray]:
        """Returns logits [B, L, vocab_size], and for a head that drafts its hidden states [B, L, hidden_size]."""
        if self.decode_step is not None and self.decode_step.takes(tokens, [cache]):
            return self.decode_step(tokens, [cache], *self._begin_inputs(tokens, cache).arrays(self._tabled))
        return self._compute_step(tokens, cache)

    def _compute_step(
        self, tokens: mx.array, cache: Sequence[LayerCache | Traced | StepRows], *arrays: Any
    ) -> list[AnyArray]:
        """Returns what `_compute` does; this is what is compiled. `arrays`: of the tokens, where they were read."""
        if self.optimistic is not None and tokens.size == 1:
            return self.optimistic.compute(tokens, cache, self._begin_inputs(tokens, cache))
        return self.project(self._run_layers(tokens, cache, *arrays))

    def project(self, last: Array) -> list[Array]:
        """Returns what `_compute` does, from what the last layer gave."""
        normed = self.model.normed(last)
        logits = self._compute_logits(normed)
        return [logits] if self.head is None else [logits, normed if self.head.takes_normed else last]

    def _compute_logits(self, hidden: AnyArray) -> AnyArray:
        """Returns the logits of normed hidden states [B, L, hidden_size]."""
        product, count = self.last_product, hidden.shape[1]
        most = gpu_time.rows_at_once(*product.matrix.shape)
        if most is None or count <= most:
            return product(hidden)
        return mx.concatenate([product(hidden[:, at : at + most]) for at in range(0, count, most)], axis=1)

    @property
    def last_product(self) -> LastProduct:
        """Makes logits from normed hidden states; it holds no other part of the model."""
        matrix = self.model.embed_tokens if self.args.is_tied else self.lm_head
        return LastProduct(matrix, self.args.logit_softcap, self.args.logit_scale)

    def _compute_rows(self, tokens: mx.array, step: Step) -> list[AnyArray]:
        """Returns what `_compute` does, of the rows of a step."""
        sequences, caches = [rows.cache for rows in step.sequences for _ in range(rows.count)], step.caches
        if self.decode_step is not None:
            if self.decode_step.takes(tokens, sequences):
                inputs = self._begin_inputs(tokens, caches).arrays(self._tabled)
                return self.decode_step(tokens, sequences, *inputs, begin=step.begin)
            return self._one_by_one(tokens, sequences, step)
        return self._compute_step(tokens, caches)

    def _one_by_one(self, tokens: mx.array, sequences: Sequence[list[LayerCache]], step: Step) -> list[mx.array]:
        """As `_compute`, for rows without a graph: a graph joins operations, which CUDA then rounds differently."""
        rows = []
        for row, cache in enumerate(sequences):
            for i in range(len(cache)):
                step.begin(row, i)
            rows.append(self._compute(tokens[:, row : row + 1], cache))
        return [mx.concatenate(list(parts), axis=1) for parts in zip(*rows, strict=True)]

    def run(self, tokens: mx.array, cache: Sequence[LayerCache]) -> EitherArray:
        """The normed hidden states [B, L, hidden_size] before `last_product`, on the CPU as a numpy array."""
        return self.model.normed(self._run_layers(tokens, cache))

    def _run_layers(self, tokens: mx.array, cache: Sequence[Any], *arrays: mx.array) -> AnyArray:
        """Returns the output of the last layer."""
        if tokens.shape[1] > MAX_TOKENS:
            span = Span(tokens, cache[0].offset, self.sizes.block)
            try:
                finished(self._through_layers(span, cache))
            except BaseException:
                span.drop(cache)  # otherwise some layers would have seen tokens that others have not
                raise
            return span.hidden
        inputs = Tokens.of(self._tabled, *arrays) if arrays else self._begin_inputs(tokens, cache)
        h, chosen, of_layers = self.embedded(tokens), Chosen(), by_layer(self._cache_numbers, cache)
        for layer, caches in zip(self.visits, of_layers, strict=True):
            h = layer(h, caches, chosen, inputs)
        return h

    def draft_states(self, span: Span, start: int, end: int) -> EitherArray:
        """A draft head's input for the tokens from `start` to `end` of a span that has passed all layers."""
        assert self.head is not None
        with self._computing():
            last = backend.contiguous(span.hidden[:, start:end])
            return self.model.normed(last) if self.head.takes_normed else last

    def advance(self, span: Span, cache: list[LayerCache]) -> Pieces[mx.array]:
        """Takes a span, the tokens after those in `cache`, through its remaining layers, at least a block or a wave of
        experts at a time; returns the logits [B, vocab_size] of its last token.

        Between two pieces the same thread may compute anything else but a span. Closing the iterator, like an error,
        leaves the span between two layers: another `advance` continues it, `span.drop` undoes it.

        Raises:
            RequestError, ExpertIOError, DeviceError: as calling the model does.
        """
        self._check(span.tokens, cache)
        begun = nullcontext() if self.experts is None else self.experts.begin_span()
        with begun as passage, closing(self._through_layers(span, cache)) as pieces:
            while True:
                with self._turn(span.tokens.size, passage):
                    share, end = next(pieces, None), time.perf_counter() + PIECE_SECONDS
                    while share is not None and time.perf_counter() < end:
                        share = next(pieces, None)
                    if share is None:
                        last = self.model.normed(backend.contiguous(span.hidden[:, -1:]))
                        logits = backend.leave(self.last_product(last))
                        mx.eval(logits)
                        return logits[:, 0]
                yield share

    def _through_layers(self, span: Span, cache: Sequence[Any]) -> Pieces[None]:
        count, layers = len(self.visits), by_layer(self._cache_numbers, cache)
        if span.hidden is None:
            self._expect(span)
            span.inputs = self._begin_inputs(span.tokens, cache)
            span.reached = 0, span.images.embedded(self.embedded(span.tokens), span.start, self.vision)
        if self._ahead is not None and self._ahead.takes(span, self.activation_dtype):
            yield from self._ahead.pass_span(span, layers)
        while span.layer < count:
            i, own, layer = span.layer, layers[span.layer], self.visits[span.layer]
            first = self._cache_numbers[i].start
            span.begin(first, own)
            try:
                h = yield from as_share(layer.pass_span(span.hidden, own, span), i / count, 1 / count)
                h = span.images.deepened(h, span.start, self.args.visits[i], self.vision)
                backend.start(h)
                backend.finish(span.hidden)  # a GPU gets at most two layers at a time, so that memory is as planned
            except BaseException:
                span.undo(first, own)
                raise
            span.reached = i + 1, h
            backend.give_back(h)

    def _begin_inputs(self, tokens: mx.array, cache: Sequence[Any]) -> Tokens:
        """Returns the layers' inputs besides hidden states; begins to read the rows of tables."""
        rows = self.tables.begin(np.array(tokens), by_layer(self._cache_numbers, cache)) if self.tables else {}
        return Tokens(tokens, rows)

    def _expect(self, span: Span) -> None:
        """Begins to read the experts of the first layer with experts while the layers before it are computed."""
        first = self.layers[self.args.moe_layers[0]].mlp if self.args.moe_layers else None
        if first is not None and first.experts is not None:
            first.experts.expect(first.layer, span.tokens.size)

    def embedded(self, tokens: mx.array) -> AnyArray:
        """[B, L, hidden_size] of each stream, on the CPU as a numpy array."""
        return spread(self._embed(tokens), streams_before(self.args.connections, 0))

    def _embed(self, tokens: mx.array) -> AnyArray:
        h = self.model.embed_tokens(backend.enter(tokens, self.activation_dtype) if self.suits_cpu else tokens)
        h = backend.as_dtype(h, self.activation_dtype)  # mxfp4 has none of its own
        h = rms_norm(h, None, self.args.rms_norm_eps) if self.args.embedding_norm == "unit" else h
        return h if self.args.stream_scale == 1.0 else h * self.args.stream_scale

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    @property
    def visits(self) -> tuple[DecoderLayer, ...]:
        """The layers in the order in which a token passes them; one that it passes again shares its parts."""
        return self.model.visits

    @property
    def activation_dtype(self) -> mx.Dtype:
        """The dtype that the model computes in and that its attention and convolution caches hold."""
        return self.model.dtype

    def make_cache(self) -> list[LayerCache]:
        """The empty caches of a text: those of the first visit of a layer, then those of the next one, and so on."""
        return [cache for mixer in self.args.visited for cache in make_caches(mixer)]
